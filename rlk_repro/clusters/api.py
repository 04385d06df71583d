"""Define the functions of a backend (the module of one cluster), and the values that they take and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
SURROUNDINGS_MIN: Final = 45
"""Minutes for work outside trials: importing the image, preflight, Ray's start and end, analysis, packing."""


class JobState(StrEnum):
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
    """A rendered job: the files of the folder ``job/`` by name, and the command that submits the job."""

    files: Mapping[str, str]
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Submission:
    cluster: str
    job_id: str
    submitted_at: str
    details: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any, where: str = "submission.json") -> Submission:
        check_schema(where, value, SCHEMA)
        details = value.get("details")
        if not isinstance(details, Mapping):
            raise BundleUnreadable(Problem(f"{where}: details", "wrong value", got=details, expected="a mapping"))
        texts = {name: value.get(name) for name in ("cluster", "job_id", "submitted_at")}
        named = texts | {f"details.{name}": item for name, item in details.items()}
        wrong = [
            Problem(f"{where}: {name}", "wrong value", got=item, expected="text")
            for name, item in named.items()
            if not isinstance(item, str)
        ]
        if wrong:
            raise BundleUnreadable(*wrong)
        return cls(**texts, details=dict(details))


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The state of a submission when its cluster was last asked; ``reason`` quotes the cluster's own words."""

    state: JobState
    reason: str = ""
    nodes: str = ""
    is_unreachable: bool = False


@dataclass(frozen=True, kw_only=True)
class TrialLine:
    trial: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a job may use at most, and how often it may start."""

    time_min: int
    gpus_per_node: int
    num_jobs: int = 1


class Backend(Protocol):
    """The functions that every backend must have; mypy checks the backends in ``registry`` against this protocol."""

    @property
    def CLIENT(self) -> str | None:  # noqa: N802
        """The program by which this machine talks to the cluster, such as ``kubectl``."""

    @property
    def IS_REMOTE(self) -> bool:  # noqa: N802
        """Whether the cluster and this machine share no file system, so that ``collect`` must copy the run."""

    def available(self) -> str | None:
        """Return why this machine cannot use the cluster, or None."""

    def render(self, plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> Job:
        """Render the job and change nothing; ``nodes``, if given, are exactly the nodes that the job requests.

        Raises:
            SpecError: this cluster cannot run the plan.
        """

    def submit(self, job: Job, run_dir: RunDir) -> Submission:
        """Submit the given job unchanged.

        Raises:
            SchedulerRefused: the cluster refused the job; the error quotes its message.
        """

    def poll(self, submission: Submission, run_dir: RunDir) -> JobStatus:
        """Ask for the job's state once; the state is ``unknown`` if this machine cannot find it out."""

    def poll_all(self, items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
        """Return the state of each submission, with as few requests as the cluster allows."""

    def logs(self, submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[TrialLine]:
        """Yield the lines of the trials' logs; with ``is_following``, wait for new lines until the job ends."""

    def cancel(self, submission: Submission, run_dir: RunDir) -> bool:
        """Ask a job to pack its run and end; return False if it has ended.  A second call may end the job at once.

        Raises:
            SchedulerRefused: the cluster refused; the error quotes its message.
            EnvironmentMissing: this machine cannot find out whether the job runs, or cannot signal it.
        """

    def collect(self, submission: Submission, run_dir: RunDir, tell: Tell = silence) -> Path:
        """Bring the bundle to ``run_dir.bundle``; ``tell`` receives the progress of a long transfer.

        Raises:
            CheckFailed: the job waits or runs, or its results are lost.
            SchedulerRefused: the connection broke; call ``collect`` again to continue the transfer.
        """

    def find_bound(self, plan: Plan) -> Bound | None:
        """Return the limits of the plan's job; None if the cluster sets no limits."""

    def propose_profile(self, ask: Ask) -> tuple[Proposal, str]:
        """Return a draft profile and the source of its values; raise EnvironmentMissing if no cluster answers."""

    def check_profile(self, profile: Profile, plan: Plan | None) -> list[Finding]:
        """Find values of a profile that would make the plan's run fail (without a plan: any run).

        Raises:
            EnvironmentMissing: no cluster answers.
        """
