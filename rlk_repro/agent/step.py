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

from rlk_repro.agent.parts import Agent
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, write_json
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads.api import Command

SCHEMA: Final = 2
ROLLOUTS: Final = "rollouts-"


class Stage(StrEnum):
    """Nodes join a step's Ray cluster only while it is ``joining``; ``ended``: no step follows."""

    WAITING = "waiting"
    JOINING = "joining"
    RUNNING = "running"
    OVER = "over"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Step:
    """``number`` counts the allocation's steps from 1; ``head`` is the address:port of Ray's head, where it starts.

    ``use`` names the command: a trial, or ``rollouts-<seed>``.  Without ``keeps_logs``, the nodes delete Ray's logs,
    because the command ended well.
    """

    allocation: str
    number: int = 0
    stage: Stage = Stage.WAITING
    use: str = ""
    head: str = ""
    keeps_logs: bool = True


@dataclass(frozen=True, kw_only=True)
class Report:
    """One node's report about a step: ``is_over`` if nothing of it runs there any more, ``reason`` if its Ray ended.

    ``has_left``: the node's agent has ended.
    """

    allocation: str
    number: int = 0
    is_over: bool = False
    reason: str = ""
    has_left: bool = False


def write_step(run_dir: RunDir, step: Step) -> None:
    _write(run_dir.step, step)


def write_report(run_dir: RunDir, node: str, report: Report) -> None:
    _write(run_dir.report_of(node), report)


def read_step(run_dir: RunDir, allocation: str) -> Step | None:
    """Return the step that the leader of this allocation has told."""
    value = _read(run_dir.step, allocation)
    return None if value is None else Step(**value | {"stage": Stage(value["stage"])})


def read_report(run_dir: RunDir, node: str, allocation: str) -> Report:
    """Return the node's last report in this allocation; an empty one before its first."""
    value = _read(run_dir.report_of(node), allocation)
    return Report(allocation=allocation) if value is None else Report(**value)


def find_command(agent: Agent, use: str) -> Command:
    """Return the command that a step names; every node computes the same command."""
    workload, plan = agent.parts.workload, agent.plan
    if use.startswith(ROLLOUTS):
        return workload.rollout_commands(plan, agent.run_dir)[int(use.removeprefix(ROLLOUTS))]
    trial = next(trial for trial in plan.trials if trial.name == use)
    return workload.trainer_command(plan, trial, agent.run_dir)


def _write(path: Path, item: Step | Report) -> None:
    write_json(path, {"schema": SCHEMA, **dataclasses.asdict(item)}, is_durable=False)


def _read(path: Path, allocation: str) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = load_json(path, schema=SCHEMA)
    except BundleUnreadable:
        return None
    del value["schema"]
    return value if value["allocation"] == allocation else None
