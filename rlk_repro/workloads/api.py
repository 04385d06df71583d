"""The interface of a workload, a module with these functions, and the values that they pass."""

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
    """One trainer process: its arguments, and the variables added to the node agent's environment.

    ``from_env`` maps a variable of the trainer to the node agent's variable that holds its value; no plan or file holds
    the value.  If it ``needs_ray``, the agents first start Ray on all nodes with this environment, which Ray's workers
    inherit; the process finds Ray by ``RAY_ADDRESS``, and each worker its node's address in the variables
    ``address_names``.  ``stored`` are the rollouts that a session trains on; the node agent lays them out in a folder.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    from_env: Mapping[str, str] = field(default_factory=dict)
    needs_ray: bool = False
    address_names: tuple[str, ...] = ()
    stored: RolloutDir | None = None


@dataclass(frozen=True, kw_only=True)
class Code:
    """A flag or source with the code that it names; ``is_known`` if that is in this package or pinned sources."""

    where: str
    value: str
    is_known: bool

    def __str__(self) -> str:
        return f"{self.where} {self.value}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What a plan brings from outside: sources by topic, environment of its trainers, and named code."""

    sources: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    code: tuple[Code, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Words:
    """How a report speaks of a workload.

    ``takes`` begins the sentence about a step's time.  ``scope`` says for what the result does not stand.  Optimizer
    steps are counted per ``updates_per``.
    ``baseline_trainer`` names the trainer whose entropy metric the baseline may leave out.
    """

    step: str
    takes: str = "a step takes"
    scope: str = ""
    updates_per: str = "rollout"
    baseline_trainer: str = ""
    may_not_claim: tuple[str, ...] = ()


class TrialCommands(Protocol):
    """The functions that the node agent calls.  All four are pure."""

    def find_problems(self, plan: Plan) -> list[Problem]:
        """Find why this plan cannot run on any machine."""

    def find_warnings(self, plan: Plan) -> list[Finding]:
        """Find what may go wrong in this plan, or measure less than a reader expects."""

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        """Return the trainer's command for one trial."""

    def rollout_commands(self, plan: Plan, run_dir: RunDir) -> dict[int, Command]:
        """Return, by seed, the commands that fill ``run_dir.rollouts_of(seed)`` before the trials, if any."""


class Workload(TrialCommands, Protocol):
    """The module interface; mypy checks each module at its line of the registry."""

    @property
    def WORDS(self) -> Words:  # noqa: N802  (a constant of the module)
        """The workload's name and limits in reports."""

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield names and values that distinguish this run for a reader, from the plan's own record."""

    def find_brought(self, plan: Plan) -> Brought:
        """Return what a replay shows before it runs another person's plan."""

    def list_folders(self, run: Run, stack: Stack, prepared: PreparedDir) -> dict[str, Path]:
        """Return, by kind, the folders needed before the first trial; none if the workload makes everything itself."""

    def list_steps(self, request: PrepareRequest) -> list[PrepareStep]:
        """Return the steps by which ``rlk-repro prepare`` gets or makes those folders, in order."""
