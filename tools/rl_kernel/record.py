"""Keep this tool's files in the environment: the build record in RL-Kernel's metadata, and the command rlk-repro."""

from __future__ import annotations

import csv
import importlib
import io
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.files import write_json, write_text
from rlk_repro.probes import code
from rlk_repro.probes.installed import (
    BUILD_RECORD,
    AppliedRepair,
    BuildRecord,
    find_changed_files,
    load_build_record,
    record_digest,
)
from rlk_repro.sources import RL_KERNEL
from tools.rl_kernel.build import Machine
from tools.rl_kernel.source import Sources

# newer generations of RL-Kernel declare a command of the same name
OWN_COMMANDS: Final = ("rlk-repro",)


def find_distribution() -> metadata.Distribution | None:
    """Return the metadata of the installed RL-Kernel; None if pip has not installed it."""
    importlib.invalidate_caches()
    return code.find_distribution(RL_KERNEL)


def make_record(
    sources: Sources, repairs: tuple[AppliedRepair, ...], variables: Mapping[str, str], machine: Machine
) -> BuildRecord:
    return BuildRecord(
        repository=sources.repository,
        commit=sources.commit,
        tree=sources.tree,
        is_dirty=sources.is_dirty,
        diff_sha256=sources.diff_sha256,
        repairs=repairs,
        build_variables=variables,
        platform=machine.platform,
        device_capability=machine.device_capability,
        torch=machine.torch,
        toolkit=machine.toolkit,
        nvcc=machine.nvcc,
    )


def is_installed(record: BuildRecord) -> bool:
    """Tell whether this environment has an RL-Kernel of exactly this build, with unchanged files."""
    distribution = find_distribution()
    if distribution is None or load_build_record(distribution) != record:
        return False
    is_ours = Path(str(distribution.locate_file(""))).resolve().is_relative_to(Path(sys.prefix).resolve())
    return is_ours and find_changed_files(distribution, RL_KERNEL.module) == []


def install(record: BuildRecord, run: Callable[[], None], *, is_from_wheel: bool = False) -> list[Path]:
    """Let ``run`` install RL-Kernel, and write the build record; return this tool's commands that were written back."""
    folder = Path(sysconfig.get_path("scripts"))
    kept = {folder / name: (folder / name).read_bytes() for name in OWN_COMMANDS if (folder / name).is_file()}
    try:
        run()
    finally:
        restored = _restore_commands(kept)
    _write_record(record, restored, is_from_wheel=is_from_wheel)
    return restored


def _restore_commands(kept: dict[Path, bytes]) -> list[Path]:
    """Write back those of this tool's commands that the installation of RL-Kernel overwrote, and return them."""
    lost = [path for path, data in kept.items() if not path.is_file() or path.read_bytes() != data]
    for path in lost:
        path.write_bytes(kept[path])
        path.chmod(0o755)
    return lost


def _write_record(record: BuildRecord, not_its_own: list[Path], *, is_from_wheel: bool) -> None:
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
    gone = list(not_its_own)
    if is_from_wheel:  # pip's direct_url.json names the wheel's folder, which no longer exists
        gone.append(listing.parent / "direct_url.json")
        gone[-1].unlink(missing_ok=True)
    _list_again(listing, distribution, written, {path.resolve() for path in gone})


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
