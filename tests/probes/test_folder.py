"""Facts of the run directory's file system, and of the kernel's clock."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from rlk_repro.probes import folder, host
from rlk_repro.rundir.manifest import Unknown

MOUNTS = "overlay / overlay rw 0 0\nfs:/x /lustre lustre rw 0 0\nnas:/y /lustre/my\\040runs nfs4 rw 0 0\n"


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/home/x", "overlay"),
        ("/lustre/y/z", "lustre"),
        ("/lustre/my runs/a", "nfs4"),
        ("/lustre-old", "overlay"),
    ],
)
def test_the_deepest_mount_point_above_a_folder_decides(path: str, filesystem: str) -> None:
    assert folder.find_filesystem(MOUNTS, Path(path)) == filesystem


def test_a_folder_is_measured_and_left_empty(tmp_path: Path) -> None:
    facts = folder.probe_folder(tmp_path)
    assert set(facts) == {"filesystem", "free_gib", "free_inodes", "file_latency_ms", "clock_skew_s"}
    latency_ms, skew_s = facts["file_latency_ms"], facts["clock_skew_s"]
    assert isinstance(latency_ms, float)
    assert 0 < latency_ms < 60_000
    assert isinstance(skew_s, float)
    assert abs(skew_s) < 60
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_absent_gives_reasons(tmp_path: Path) -> None:
    facts = folder.probe_folder(tmp_path / "absent")
    assert facts["free_gib"] == Unknown("statvfs: No such file or directory")
    assert facts["file_latency_ms"] == Unknown("no file can be written in the folder: No such file or directory")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0x2001, {"clock_is_synchronized": True, "clock_max_error_s": 0.25}),
        (0x40, {"clock_is_synchronized": False, "clock_max_error_s": Unknown("this clock is not synchronized")}),
    ],
)
def test_the_kernel_reports_whether_its_clock_is_synchronized(status: int, expected: dict[str, object]) -> None:
    data = struct.pack("@i4xqqqqi", 0, 0, 0, 250_000, 100, status)
    assert host.read_timex(data + bytes(100)) == expected
