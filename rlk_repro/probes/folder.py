"""Find facts of the run directory's file system: its type, free space, clock, and the time to write a file."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

from rlk_repro.base.units import GIB
from rlk_repro.probes.sources import derive, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

SECTION: Final = "run_directory"
NUM_FILES: Final = 5
FILE_BYTES: Final = 4096


def probe_folder(folder: Path, root: Path = Path("/")) -> dict[str, Fact]:
    """Return the facts of a folder; write and remove a few small files in the folder."""
    return {
        "filesystem": derive(read_text(root, "/proc/mounts"), lambda text: find_filesystem(text, folder.resolve())),
        **_room(folder),
        **_measure(folder),
    }


def find_filesystem(mounts: str, path: Path) -> str | Unknown:
    """Return the type of the file system that holds ``path``; of several mounts on one mount point, the last counts."""
    rows = [line.split(" ") for line in mounts.splitlines()]
    above = [
        (len(Path(point).parts), kind)
        for point, kind in ((_unescape(row[1]), row[2]) for row in rows if len(row) > 2)
        if path.is_relative_to(point)
    ]
    deepest = max((depth for depth, _ in above), default=0)
    return next((kind for depth, kind in reversed(above) if depth == deepest), Unknown("no mount point found"))


def _unescape(text: str) -> str:
    """Decode a path of the mount table, in which blanks and backslashes are octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _room(folder: Path) -> dict[str, Fact]:
    try:
        found = os.statvfs(folder)
    except OSError as error:
        reason = Unknown(f"statvfs: {error.strerror}")
        return {"free_gib": reason, "free_inodes": reason}
    inodes: Fact = found.f_favail if found.f_files else Unknown("this file system reports no inode count")
    return {"free_gib": round(found.f_bavail * found.f_frsize / GIB, 1), "free_inodes": inodes}


def _measure(folder: Path) -> dict[str, Fact]:
    """Return the median time in ms to write a file, and by how many seconds the file system's clock is ahead."""
    try:
        durations, skews = zip(*(_write_one(folder) for _ in range(NUM_FILES)), strict=True)
    except OSError as error:
        reason = Unknown(f"no file can be written in the folder: {error.strerror}")
        return {"file_latency_ms": reason, "clock_skew_s": reason}
    return {
        "file_latency_ms": round(statistics.median(durations) * 1000, 2),
        "clock_skew_s": round(statistics.median(skews), 3),
    }


def _write_one(folder: Path) -> tuple[float, float]:
    begin = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".partial-") as stream:
        written_s = time.time()
        stream.write(bytes(FILE_BYTES))
        stream.flush()
        os.fsync(stream.fileno())
        skew_s = Path(stream.name).stat().st_mtime - written_s
    return time.perf_counter() - begin, skew_s
