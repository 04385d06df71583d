"""Find facts of the run directory's file system: its type and free space."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from rlk_repro.base.units import GIB
from rlk_repro.probes.sources import derive, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

SECTION: Final = "run_directory"


def probe_folder(folder: Path, root: Path = Path("/")) -> dict[str, Fact]:
    return {
        "filesystem": derive(read_text(root, "/proc/mounts"), lambda text: find_filesystem(text, folder.resolve())),
        **_room(folder),
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
