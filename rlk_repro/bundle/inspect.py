"""Describe what a bundle contains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.answer import Answer
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.escapes import printable
from rlk_repro.base.files import MAX_ANALYSIS_BYTES, MAX_PLAN_BYTES, load_json
from rlk_repro.base.units import format_bytes
from rlk_repro.bundle.seal import FolderReader
from rlk_repro.bundle.verify import open_verified
from rlk_repro.plan import find_run_id
from rlk_repro.rundir.exits import read_exit

_SHORT_HASH: Final = 12
_MAX_FACT: Final = 500
_FACTS: Final[Mapping[str, tuple[str, ...]]] = {
    "name": ("plan", "experiment", "run", "run"),
    "lane": ("plan", "experiment", "run", "lane"),
    "hardware": ("plan", "experiment", "hardware", "hardware"),
    "cluster": ("plan", "profile", "cluster"),
    "plan_hash": ("plan", "plan_hash"),
    "verdict": ("analysis", "verdict", "word"),
    "headline": ("analysis", "verdict", "headline"),
    "rlk_repro": ("analysis", "facts", "rlk-repro"),
}


@dataclass(frozen=True, kw_only=True)
class BundleInfo(Answer):
    """A description of a bundle; ``bundle_id`` is None without a seal, and a fact is None if it is not recorded."""

    run_id: str
    bundle_id: str | None
    is_sealed: bool
    name: str | None
    lane: str | None
    hardware: str | None
    cluster: str | None
    plan_hash: str | None
    verdict: str | None
    headline: str | None
    rlk_repro: str | None
    num_files: int
    size_bytes: int
    trials: Mapping[str, str]
    nodes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        yield f"run {self.run_id}"
        yield f"id {self.bundle_id or 'not sealed: the run was interrupted or has not finished'}"
        yield f"sealed {'yes' if self.is_sealed else 'no'}"
        for name in _FACTS:
            value = getattr(self, name) or "not recorded"
            if name == "verdict" and self.verdict:
                value += f" (as {'sealed' if self.is_sealed else 'recorded'}, not recomputed)"
            yield f"{name.replace('_', '-')} {value[:_SHORT_HASH] if name == 'plan_hash' else value}"
        yield f"{self.num_files} files, {format_bytes(self.size_bytes)}"
        yield f"nodes {', '.join(map(printable, self.nodes)) or 'none'}"
        for name, status in self.trials.items():
            yield f"trial {printable(name)}: {printable(status)}"


def inspect_bundle(path: Path) -> BundleInfo:
    """Describe a bundle or run directory, whether it is intact or not."""
    with open_verified(path) as (run_dir, verification):
        records = {"plan": _load(run_dir.plan, MAX_PLAN_BYTES), "analysis": _load(run_dir.analysis, MAX_ANALYSIS_BYTES)}
        sizes_bytes = [member.size_bytes for member in FolderReader(run_dir)]
        return BundleInfo(
            run_id=find_run_id(records["plan"], run_dir.run_id),
            bundle_id=verification.bundle_id,
            is_sealed=verification.bundle_id is not None,
            **{name: _find_fact(records, keys) for name, keys in _FACTS.items()},
            num_files=len(sizes_bytes),
            size_bytes=sum(sizes_bytes),
            trials={folder.path.name: read_exit(folder).status.value for folder in run_dir.trial_dirs()},
            nodes=tuple(node.path.name for node in run_dir.node_dirs()),
        )


def _load(path: Path, max_bytes: int) -> Any:
    try:
        return load_json(path, max_bytes=max_bytes)
    except BundleUnreadable:
        return None


def _find_fact(value: Any, keys: tuple[str, ...]) -> str | None:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return printable(value[:_MAX_FACT]) if isinstance(value, str) and value else None
