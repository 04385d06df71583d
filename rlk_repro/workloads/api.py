"""Define the class of a workload, and the types of its functions' arguments and results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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

    ``from_env`` maps a variable of the trainer to the variable of the node agent that holds its value.  No file holds
    this value.  With ``needs_ray``, the agents first start Ray on all nodes; each worker finds its node's address in
    the variables ``address_names``.  ``stored`` are the rollouts that a session trains on.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    from_env: Mapping[str, str] = field(default_factory=dict)
    needs_ray: bool = False
    address_names: tuple[str, ...] = ()
    stored: RolloutDir | None = None


@dataclass(frozen=True, kw_only=True)
class Code:
    """Code that a plan's setting names; known code lies in this package or in a source that the stack pins."""

    where: str
    value: str
    is_known: bool

    def __str__(self) -> str:
        return f"{self.where} {self.value}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What a plan takes from outside: the sources of model, data and rollouts, environment variables, and code."""

    sources: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    code: tuple[Code, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Words:
    """The phrases that reports use for a workload.

    ``takes`` is the text before an effect such as "4 % less time".  ``scope`` says what the result does not show.
    """

    step: str
    takes: str = "a step takes"
    scope: str = ""
    updates_per: str = "rollout"
    baseline_trainer: str = ""


class Workload(ABC):
    """A kind of trainer; the functions that are not abstract fit one that makes its model, data and rollouts itself.

    The functions that turn a plan into problems, warnings and commands are pure.
    """

    WORDS: ClassVar[Words]

    @abstractmethod
    def find_problems(self, plan: Plan) -> list[Problem]:
        """Return the reasons why this plan cannot run on any machine."""

    @abstractmethod
    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        """Return the command of one trial; the trials of a pair differ only in switches and output folders."""

    @abstractmethod
    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield names and values that tell runs apart in reports; ``settings`` is the plan's record of the workload."""

    def find_warnings(self, plan: Plan) -> list[Finding]:  # noqa: ARG002
        """Return what may fail in a run of this plan, and which values the run may fail to measure."""
        return []

    def rollout_commands(self, plan: Plan, run_dir: RunDir) -> dict[int, Command]:  # noqa: ARG002
        """Return, by seed, the commands that fill ``run_dir.rollouts_of(seed)`` before the trials."""
        return {}

    def find_brought(self, plan: Plan) -> Brought:  # noqa: ARG002
        """Return what a replay shows its user before it runs another person's plan."""
        return Brought()

    def list_folders(self, run: Run, stack: Stack, prepared: PreparedDir) -> dict[str, Path]:  # noqa: ARG002
        """Return, by kind, the folders that must exist before the first trial."""
        return {}

    def list_steps(self, request: PrepareRequest) -> list[PrepareStep]:  # noqa: ARG002
        """Return the steps by which ``rlk-repro prepare`` makes the folders of ``list_folders``, in order."""
        return []
