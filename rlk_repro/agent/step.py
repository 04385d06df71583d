"""What the nodes of a job tell each other: the leader's present step, and each other node's report about it.

All nodes have the same plan, so a step only names the plan's command that runs now.  Both are files that are replaced
as a whole: reading one late, or twice, changes nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, write_json
from rlk_repro.rundir.paths import RunDir

SCHEMA: Final = 1


class Stage(StrEnum):
    """Nodes join a step's Ray cluster only while it is ``joining``; ``ended``: no step follows."""

    WAITING = "waiting"
    JOINING = "joining"
    RUNNING = "running"
    OVER = "over"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Use:
    """The command of a step: that of a trial, or the one that stores the rollouts of a seed."""

    trial: str | None = None
    seed: int | None = None

    def __str__(self) -> str:
        return f"rollouts-{self.seed}" if self.trial is None else self.trial


@dataclass(frozen=True, kw_only=True)
class Step:
    """``number`` counts the allocation's steps from 1; ``head`` is the address:port of Ray's head, if agents start Ray.

    Without ``keeps_logs``, the nodes delete Ray's logs, because the command ended well.
    """

    allocation: str
    number: int = 0
    stage: Stage = Stage.WAITING
    use: Use = Use()
    head: str = ""
    keeps_logs: bool = True


@dataclass(frozen=True, kw_only=True)
class Report:
    """One node's report about a step: ``is_over`` if nothing of it runs there any more, ``reason`` if its Ray ended.

    ``busy`` names GPUs that are still in use; ``has_left``: the node's agent has ended.
    """

    allocation: str
    number: int = 0
    is_over: bool = False
    reason: str = ""
    busy: tuple[str, ...] = ()
    has_left: bool = False


def write_step(run_dir: RunDir, step: Step) -> None:
    _write(run_dir.step, step)


def write_report(run_dir: RunDir, node: str, report: Report) -> None:
    _write(run_dir.report_of(node), report)


def read_step(run_dir: RunDir) -> Step | None:
    value = _read(run_dir.step)
    if value is None:
        return None
    return Step(**{**value, "stage": Stage(value["stage"]), "use": Use(**value["use"])})


def read_report(run_dir: RunDir, node: str, allocation: str) -> Report:
    """Return the node's last report in this allocation; an empty one before its first."""
    value = _read(run_dir.report_of(node))
    if value is None or value["allocation"] != allocation:
        return Report(allocation=allocation)
    return Report(**{**value, "busy": tuple(value["busy"])})


def _write(path: Path, item: Step | Report) -> None:
    write_json(path, {"schema": SCHEMA, **dataclasses.asdict(item)}, is_durable=False)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = load_json(path, schema=SCHEMA)
    except BundleUnreadable:
        return None
    del value["schema"]
    return value
