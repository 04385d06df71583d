"""What backends share in asking a cluster: how often, what an answer allows, and how its parts are put together."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.clusters.api import JobState, JobStatus
from rlk_repro.rundir.paths import RunDir


def require_known(status: JobStatus, run_dir: RunDir) -> None:
    """Raises EnvironmentMissing where this machine cannot tell whether the job runs."""
    if status.state is JobState.UNKNOWN:
        raise EnvironmentMissing(Problem(run_dir.run_id, f"its job may still run ({status.reason})"))


def require_ended(status: JobStatus, run_dir: RunDir) -> None:
    """Raises CheckFailed where the job waits or runs, and as ``require_known``."""
    require_known(status, run_dir)
    if not status.state.is_final:
        hint = f"rlk-repro status --watch {run_dir.run_id}"
        raise CheckFailed(Problem(run_dir.run_id, f"has not ended: {status.state}", hint=hint))


def asked_rarely(is_over: Callable[[], bool], every_s: float) -> Callable[[], bool]:
    """Ask a question every ``every_s`` seconds at most, and never again after a yes."""
    asked_s = -every_s
    was_over = False

    def ask() -> bool:
        nonlocal asked_s, was_over
        if not was_over and time.monotonic() - asked_s >= every_s:
            was_over = is_over()
            asked_s = time.monotonic()
        return was_over

    return ask


def join_words(*parts: str) -> str:
    """Join words with commas, without empty ones."""
    return ", ".join(part for part in parts if part)
