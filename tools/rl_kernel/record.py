"""Keep this tool's files in the environment: the build record in RL-Kernel's metadata, and the command rlk-repro."""

from __future__ import annotations

import csv
import importlib
import io
import sys
import sysconfig
from collections.abc import Collection
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.files import write_json, write_text
from rlk_repro.probes import code
from rlk_repro.probes.installed import BUILD_RECORD, BuildRecord, find_changed_files, load_build_record, record_digest
from rlk_repro.sources import RL_KERNEL

# newer generations of RL-Kernel declare a command of the same name
OWN_COMMANDS: Final = ("rlk-repro",)


def find_distribution() -> metadata.Distribution | None:
    """Return the metadata of the installed RL-Kernel; None if pip has not installed it."""
    importlib.invalidate_caches()
    return code.find_distribution(RL_KERNEL)


def is_installed(record: BuildRecord) -> bool:
    """Tell whether this environment has an RL-Kernel of exactly this build, with unchanged files."""
    distribution = find_distribution()
    if distribution is None or load_build_record(distribution) != record:
        return False
    is_ours = Path(str(distribution.locate_file(""))).resolve().is_relative_to(Path(sys.prefix).resolve())
    return is_ours and find_changed_files(distribution, RL_KERNEL.module) == []


def read_own_commands() -> dict[Path, bytes]:
    """Return the files of this tool's commands in this environment, each with its bytes."""
    folder = Path(sysconfig.get_path("scripts"))
    return {folder / name: (folder / name).read_bytes() for name in OWN_COMMANDS if (folder / name).is_file()}


def restore_commands(kept: dict[Path, bytes]) -> list[Path]:
    """Write back those of this tool's commands that the installation of RL-Kernel overwrote, and return them."""
    lost = [path for path, data in kept.items() if not path.is_file() or path.read_bytes() != data]
    for path in lost:
        path.write_bytes(kept[path])
        path.chmod(0o755)
    return lost


def write_record(record: BuildRecord, not_its_own: Collection[Path]) -> None:
    """Add the build record to RL-Kernel's metadata, and remove other projects' commands from its list of files.

    Raises:
        CheckFailed: pip reported success, but no installation is found.
    """
    distribution = find_distribution()
    listed = [file for file in (distribution.files if distribution else None) or [] if file.name == "RECORD"]
    if distribution is None or not listed:
        raise CheckFailed(Problem("pip install", f"left no distribution {' or '.join(RL_KERNEL.distributions)}"))
    listing = Path(str(listed[0].locate()))
    written = [listing.parent / BUILD_RECORD]
    write_json(written[0], asdict(record))
    if not_its_own:
        written.append(listing.parent / "entry_points.txt")
        _drop_commands(written[1], {path.name for path in not_its_own})
    _list_again(listing, distribution, written, {path.resolve() for path in not_its_own})


def _drop_commands(entry_points: Path, names: set[str]) -> None:
    lines = entry_points.read_text().splitlines()
    write_text(entry_points, "".join(f"{line}\n" for line in lines if line.partition("=")[0].strip() not in names))


def _list_again(listing: Path, distribution: metadata.Distribution, written: list[Path], foreign: set[Path]) -> None:
    """Write RL-Kernel's list of files again, without ``foreign`` files and with the new hashes of ``written`` files."""

    def locate(entry: str) -> Path:
        return Path(str(distribution.locate_file(entry))).resolve()

    replaced = foreign | {path.resolve() for path in written}
    rows = [row for row in csv.reader(io.StringIO(listing.read_text())) if row and locate(row[0]) not in replaced]
    for path in written:
        rows.append([f"{listing.parent.name}/{path.name}", f"sha256={record_digest(path)}", str(path.stat().st_size)])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(listing, text.getvalue())
