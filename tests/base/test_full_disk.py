"""A writer that meets a full or read-only file system names the path and the file system, and leaves nothing partial.

The file systems are real ones of a few MiB; only root may mount them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from rlk_repro.base.disk import Unwritable, open_stream
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.bundle.seal import pack, seal
from rlk_repro.bundle.verify import unpack
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.prepare.steps import PrepareRequest, fill
from rlk_repro.rundir.state import read_state
from rlk_repro.spec.load import load_hardware, load_run, load_stack, parse_overrides
from rlk_repro.workloads import WORKLOADS
from tests.support.job_examples import FakeWorkload, fill_disk, make_staged, run_example
from tests.support.make_run import finish_run, make_run
from tests.support.prepare_examples import fill_hub, from_hub, serve_hub, words

VIME = WORKLOADS["vime"]

Call = Callable[..., tuple[int, str, str]]
PROFILE = b"profile: local\ncluster: local\npreflight: {min_free_disk_gib: 0.001, min_free_memory_gib: 0.01}\n"


@dataclass(frozen=True)
class Disk:
    folder: Path

    @property
    def complaint(self) -> str:
        return (
            f"cannot be written (No space left on device), expected room on the file system at {self.folder} (0 B of "
        )

    def list(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def disk(small_disk: Path) -> Disk:
    return Disk(small_disk)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return finish_run(make_run(tmp_path / "made"))


def test_packing_and_sealing_name_the_disk_and_leave_no_part(disk: Disk) -> None:
    run_dir = make_run(disk.folder / "run")
    ballast = fill_disk(disk.folder)
    with pytest.raises(EnvironmentMissing) as caught:
        seal(run_dir)
    assert str(caught.value).startswith(f"{run_dir.checksums}: {disk.complaint}")
    assert not run_dir.is_sealed
    os.truncate(ballast, ballast.stat().st_size - 8192)  # room for a part
    before = disk.list()
    with pytest.raises(EnvironmentMissing) as caught:
        pack(run_dir)
    assert str(caught.value).startswith(f"{run_dir.bundle}: {disk.complaint}")
    assert disk.list() == before


def test_a_report_names_the_disk_and_not_standard_output(call: Call, disk: Disk, bundle: Path) -> None:
    fill_disk(disk.folder)
    code, _, err = call("report", str(bundle), "-o", str(disk.folder / "out"))
    expected = (f"{disk.folder}/out/report.html: {disk.complaint}", "hint: name another folder with -o")
    assert (code, [words for words in expected if words not in err]) == (3, [])
    assert "standard output" not in err
    assert disk.list() == {"ballast"}


def test_staging_names_the_disk_and_leaves_no_folder(call: Call, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_REPRO_RUNS", str(disk.folder / "runs"))
    ballast = fill_disk(disk.folder)
    os.truncate(ballast, ballast.stat().st_size - 8192)  # room for some files of a run directory
    code, _, err = call("submit", "--run", "smoke", "--hardware", "cpu", "--wait")
    expected = (f"{disk.folder}/runs/smoke/", disk.complaint, "export RLK_REPRO_RUNS=")
    assert (code, [words for words in expected if words not in err]) == (3, [])
    assert (disk.list(), list((disk.folder / "runs/smoke").iterdir())) == ({"ballast"}, [])


def test_an_agent_names_the_disk_that_fills_up_in_a_trial(disk: Disk) -> None:
    _, run_dir = make_staged(disk.folder / "run", profile=PROFILE)
    assert run_example(run_dir, FakeWorkload(actions=[f"flood:{32 << 20}"])) == 3
    state = read_state(run_dir)
    assert state is not None
    assert state.exit_code == 3
    assert state.message.startswith(f"trials: {run_dir.trial('00-p1-baseline').stdout}: {disk.complaint}")
    assert '"event":"error"' in run_dir.agent_log.read_text()
    assert not run_dir.is_sealed


def test_unpacking_names_the_disk_and_leaves_no_part(disk: Disk, bundle: Path) -> None:
    ballast = fill_disk(disk.folder)
    os.truncate(ballast, ballast.stat().st_size - 16384)
    with pytest.raises(EnvironmentMissing) as caught:
        unpack(bundle, disk.folder / "here")
    assert str(caught.value).startswith(f"{disk.folder}/here/")
    assert disk.complaint in str(caught.value)
    assert disk.list() == {"ballast"}


def test_a_full_temporary_folder_is_named(call: Call, disk: Disk, bundle: Path, tmp_path: Path) -> None:
    ballast = fill_disk(disk.folder)
    os.truncate(ballast, ballast.stat().st_size - 16384)
    argv = [sys.executable, "-m", "rlk_repro", "report", str(bundle), "-o", str(tmp_path / "out")]
    done = subprocess.run(argv, env={**os.environ, "TMPDIR": str(disk.folder)}, capture_output=True, text=True)  # noqa: PLW1510
    expected = (f"rlk-repro: {disk.folder}/rlk-repro-", disk.complaint, "hint: export TMPDIR=")
    assert (done.returncode, [words for words in expected if words not in done.stderr]) == (3, [])
    assert disk.list() == {"ballast"}


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_download_names_the_disk_and_not_the_hub(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*words(), *from_hub()]
    overrides = parse_overrides([value for name, value in pairwise(options) if name == "--set"])
    run = load_run("vime-smoke", overrides).model
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        fill_hub(hub, shard_bytes=6 << 20)
        stack, hardware = load_stack(run.stack).model, load_hardware("h200").model
        request = PrepareRequest(run=run, stack=stack, hardware=hardware, prepared=PreparedDir(disk.folder))
        step = next(item for item in VIME.list_steps(request) if item.kind == "model")
        with pytest.raises(EnvironmentMissing) as caught:
            fill(step, lambda _: None)
    assert str(caught.value).startswith(f"{step.folder}: cannot be written (No space left on device)")
    assert f"room on the file system at {disk.folder} (" in str(caught.value)
    assert not step.folder.exists()
    assert not [name for name in disk.list() if "incoming" in name], "a part that nobody can use takes room"


def test_a_read_only_file_system_is_named(call: Call, disk: Disk, bundle: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk.folder)], check=True)
    code, _, err = call("report", str(bundle), "-o", str(disk.folder / "out"))
    assert code == 3
    said = f"{disk.folder}/out/report.html: cannot be written (Read-only file system; the file system at {disk.folder} "
    assert said in err


def test_a_full_disk_of_standard_output_is_named() -> None:
    with Path("/dev/full").open("wb") as output:
        argv = [sys.executable, "-m", "rlk_repro", "runs", "list", "--json"]
        done = subprocess.run(argv, stdout=output, stderr=subprocess.PIPE, text=True)  # noqa: PLW1510
    assert done.returncode == 3
    assert "standard output: cannot be written (No space left on device)" in done.stderr


def test_nothing_is_appended_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "log").symlink_to(tmp_path / "mine")
    with pytest.raises(Unwritable, match="cannot be written"):
        open_stream(tmp_path / "log", "ab")
    assert (tmp_path / "mine").read_text() == "mine"
