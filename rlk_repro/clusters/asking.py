"""Define functions that several backends share."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.clusters.api import JobState, JobStatus
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import FromEnv

NOT_WHOLE: Final = "a partition or a share of a GPU is not comparable with a whole GPU"
NO_REPORT: Final = "the agent ended without a report"


def describe_lost(job: str) -> JobStatus:
    """Return the status of a job that has no run directory and that its cluster does not know."""
    return JobStatus(state=JobState.UNKNOWN, reason=f"neither {job} nor its run directory exists")


def require_known(status: JobStatus, run_dir: RunDir) -> None:
    if status.state is JobState.UNKNOWN:
        raise EnvironmentMissing(Problem(run_dir.run_id, f"the job may still be running ({status.reason})"))


def require_ended(status: JobStatus, run_dir: RunDir) -> None:
    """Raise CheckFailed if the job waits or runs, and EnvironmentMissing if its state is unknown."""
    require_known(status, run_dir)
    if not status.state.is_final:
        hint = f"rlk-repro status --watch {run_dir.run_id}"
        raise CheckFailed(Problem(run_dir.run_id, f"has not ended: {status.state}", hint=hint))


def asked_rarely(is_over: Callable[[], bool], every_s: float) -> Callable[[], bool]:
    """Return a function that calls ``is_over`` at most every ``every_s`` seconds, until ``is_over`` returns True."""
    asked_s = -every_s
    was_over = False

    def ask() -> bool:
        nonlocal asked_s, was_over
        if not was_over and time.monotonic() - asked_s >= every_s:
            was_over = is_over()
            asked_s = time.monotonic()
        return was_over

    return ask


def quote_answer(done: proc.Completed, prefix: str) -> str:
    """Quote a client's message on one line, without repeated lines; ``prefix`` is a pattern of text to leave out."""
    if done.is_timeout:
        return "no answer in time"
    lines = (re.sub(prefix, "", line.strip()) for line in (done.stderr or done.stdout).splitlines())
    return "; ".join(word for word in dict.fromkeys(lines) if word) or f"exit code {done.returncode}"


def find_count_problems(plan: Plan, nodes: Sequence[str]) -> Iterator[Problem]:
    if nodes and len(nodes) != plan.layout.num_nodes:
        what = "names more or fewer nodes than the layout has"
        yield Problem("--same-nodes", what, got=len(nodes), expected=f"{plan.layout.num_nodes}")


def list_secrets(plan: Plan) -> list[str]:
    """List variables of the submitting shell that the profile names; their values are written nowhere."""
    return sorted({value.from_env for value in plan.profile.env.values() if isinstance(value, FromEnv)})


def join_words(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
