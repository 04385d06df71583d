"""What a backend is: a module with these seven functions.  The values they pass are defined here, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from rlk_repro.base.console import Tell, silence
from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import check_schema
from rlk_repro.base.findings import Finding
from rlk_repro.clusters.profiles import Ask, Proposal
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Profile

SCHEMA: Final = 1


class JobState(StrEnum):
    """Where a submission stands, the same words on every cluster."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        return self in {JobState.DONE, JobState.FAILED, JobState.CANCELLED}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A rendered job before submission: files for ``job/`` (name to text) and the command that submits or starts it.

    ``remarks`` say what was taken that the profile does not say.
    """

    files: Mapping[str, str]
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What is needed to ask about a submission again: the cluster's own id and, where it has one, its extra words."""

    cluster: str
    job_id: str
    submitted_at: str
    details: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "cluster": self.cluster, "job_id": self.job_id, "submitted_at": self.submitted_at,
                "details": dict(self.details)}  # fmt: skip

    @classmethod
    def from_json(cls, value: Any, where: str = "submission.json") -> Submission:
        """Raises BundleUnreadable for whatever ``to_json`` does not write."""
        check_schema(where, value, SCHEMA)
        details = value.get("details")
        if not isinstance(details, Mapping):
            raise BundleUnreadable(Problem(f"{where}: details", "wrong value", got=details, expected="a mapping"))
        texts = {name: value.get(name) for name in ("cluster", "job_id", "submitted_at")}
        wrong = [
            Problem(f"{where}: {name}", "wrong value", got=item, expected="text")
            for name, item in [*texts.items(), *((f"details.{name}", item) for name, item in details.items())]
            if not isinstance(item, str)
        ]
        if wrong:
            raise BundleUnreadable(*wrong)
        return cls(**texts, details=dict(details))


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """One answer of ``poll``; ``reason`` quotes the cluster's own words.

    ``is_unreachable``: the cluster did not answer, ask again later.  Otherwise ``unknown`` is its answer.
    """

    state: JobState
    reason: str = ""
    nodes: str = ""
    is_unreachable: bool = False


@dataclass(frozen=True, kw_only=True)
class TrialLine:
    """One line of a trial's log, without its end."""

    trial: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The most that a job may take: minutes, GPUs on each of its nodes, and how often it may start."""

    time_min: int
    gpus_per_node: int
    num_jobs: int = 1


class Backend(Protocol):
    """The module interface; mypy checks each module at its line of the registry."""

    @property
    def CLIENT(self) -> str | None:  # noqa: N802
        """The program that talks to the cluster, for ``doctor``; None where none is needed."""

    @property
    def IS_REMOTE(self) -> bool:  # noqa: N802
        """Whether no file system is shared with this machine: a run is here when it has been collected."""

    def available(self) -> str | None:
        """Why this machine cannot use the cluster; None where it can."""

    def render(self, plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> Job:
        """The job, without touching anything; SpecError for a plan that this cluster cannot run.

        ``nodes`` asks for exactly these.
        """

    def submit(self, job: Job, run_dir: RunDir) -> Submission:
        """Send exactly that job."""

    def poll(self, submission: Submission, run_dir: RunDir) -> JobStatus:
        """Ask once; ``unknown`` where this machine cannot tell."""

    def poll_all(self, items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
        """The state of each, with as few questions as the cluster allows."""

    def logs(self, submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[TrialLine]:
        """Lines of the trials in order, ending when the job ends."""

    def cancel(self, submission: Submission, run_dir: RunDir) -> bool:
        """Ask for the end, letting the agent pack; False where it has ended already.  Cancelling twice is fine."""

    def collect(self, submission: Submission, run_dir: RunDir, tell: Tell = silence) -> Path:
        """Bring the bundle to ``run_dir.bundle``, telling how far it is where that takes long."""

    def find_bound(self, plan: Plan) -> Bound | None:
        """The most that the plan's job may take; None where only the trials' own limits bound it."""

    def propose_profile(self, ask: Ask) -> tuple[Proposal, str]:
        """A first profile, and what it was learnt from; EnvironmentMissing where the cluster does not answer."""

    def check_profile(self, profile: Profile, plan: Plan | None) -> list[Finding]:
        """Find what would fail with the plan's run, or with any run without a plan; queues no job."""
