"""What a workload is: a module with these functions.  The values they pass are defined here, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlk_repro.base.errors import Problem
from rlk_repro.base.findings import Finding
from rlk_repro.plan import Plan, Trial
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.rundir.paths import RolloutDir, RunDir
from rlk_repro.spec import Run, Stack

if TYPE_CHECKING:
    from rlk_repro.prepare.steps import PrepareRequest, PrepareStep


@dataclass(frozen=True, kw_only=True)
class Command:
    """One trainer process: its arguments and what its environment adds to the node agent's own.

    ``from_env`` maps a variable of the trainer to the variable of the node agent that holds its value; the value itself
    is in no plan and in no file.  Where it ``needs_ray`` the agents start Ray on all nodes before, with the same
    environment, which Ray's workers inherit; the process finds it by ``RAY_ADDRESS``.  ``stored`` are the rollouts that
    a session trains on, which the node agent lays out for it in a folder of its own.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    from_env: Mapping[str, str] = field(default_factory=dict)
    needs_ray: bool = False
    stored: RolloutDir | None = None


@dataclass(frozen=True, kw_only=True)
class Code:
    """A flag or source with what it names; ``is_known`` where that is this package's or of the pinned sources."""

    where: str
    value: str
    is_known: bool

    def __str__(self) -> str:
        return f"{self.where} {self.value}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What a plan's workload takes from elsewhere: sources by topic, environment of its trainers, and named code."""

    sources: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    code: tuple[Code, ...] = ()


class TrialCommands(Protocol):
    """What the node agent asks of a workload.  All four are pure."""

    def find_problems(self, plan: Plan) -> list[Problem]:
        """Why this plan cannot run at all, whatever the machine."""

    def find_warnings(self, plan: Plan) -> list[Finding]:
        """What may well go wrong in this plan, or measure less than a reader may think."""

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        """The trainer of one trial."""

    def rollout_commands(self, plan: Plan, run_dir: RunDir) -> dict[int, Command]:
        """By seed, what fills ``run_dir.rollouts_of(seed)`` before the trials; none where the lane stores none."""


class Workload(TrialCommands, Protocol):
    """The module interface; mypy checks each module at its line of the registry."""

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Name and value of what tells this run from another for a reader, from the plan's own record."""

    def find_brought(self, plan: Plan) -> Brought:
        """What a replay shows before it runs somebody else's plan."""

    def list_folders(self, run: Run, stack: Stack, prepared: PreparedDir) -> dict[str, Path]:
        """By kind, what has to lie on disk before the first trial; none where the workload makes everything itself."""

    def list_steps(self, request: PrepareRequest) -> list[PrepareStep]:
        """How ``rlk-repro prepare`` gets or makes those folders, in order."""
