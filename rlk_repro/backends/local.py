"""This machine as a cluster: one node agent, started detached, known by its pid and start time."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rlk_repro import proc, procfs
from rlk_repro.backends.api import Job, JobState, Status, Submission
from rlk_repro.backends.triallogs import read_logs
from rlk_repro.bundle import pack
from rlk_repro.clock import utc_now
from rlk_repro.errors import BundleUnreadable, CheckFailed, Problem
from rlk_repro.files import dump_json, load_json
from rlk_repro.plan import Plan
from rlk_repro.rundir import RunDir

AGENT: Final = ("-m", "rlk_repro.job")
COMMAND_FILE: Final = "command.json"
SCHEMA: Final = 1

_INTERRUPTED: Final = frozenset({128 + signal.SIGINT, 128 + signal.SIGTERM})


def available() -> str | None:
    """Any machine that runs this can."""
    return None


def render(plan: Plan, run_dir: RunDir) -> Job:
    """One agent, which leads.  The file names neither this machine's Python nor its folders; the command has to."""
    options = ("--resume",)
    record = {
        "schema": SCHEMA,
        "argv": ["python", *AGENT, "RUN_DIR", *options],
        "experiment_hash": plan.experiment_hash,
    }
    command = (sys.executable, *AGENT, str(run_dir.root.absolute()), *options)
    return Job(files={COMMAND_FILE: dump_json(record).decode()}, command=command)


def submit(job: Job, run_dir: RunDir) -> Submission:
    """Start the agent in a session of its own; it outlives this process.

    Raises:
        EnvironmentMissing: this Python cannot be started.
    """
    run_dir.state.unlink(missing_ok=True)  # an earlier agent's
    with run_dir.agent_output.open("ab") as output:
        pid = proc.start_detached(job.command, output_fd=output.fileno(), env={**os.environ, **job.env})
    stat = procfs.read_stat(pid)
    return Submission(
        cluster="local",
        job_id=f"{pid}:{stat.start_ticks if stat else 0}",
        submitted_at=utc_now(),
        details={"host": platform.node(), "run_dir": str(run_dir.root.absolute())},
    )


def poll(submission: Submission) -> Status:
    """Whether that very process runs, else what it left."""
    host = submission.details.get("host")
    if host not in {None, platform.node()}:
        return Status(state=JobState.UNKNOWN, reason=f"started on {host}, this is {platform.node()}")
    if _find_pid(submission) is not None:
        return Status(state=JobState.RUNNING)
    folder = submission.details.get("run_dir")
    if folder is None or not Path(folder).is_dir():
        return Status(state=JobState.UNKNOWN, reason=f"no process {submission.job_id} and no run directory")
    return _describe_end(RunDir(Path(folder)))


def logs(submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[str]:
    """Lines of the trials in order; following ends when the agent does."""
    return read_logs(run_dir, lambda: not is_following or poll(submission).state is not JobState.RUNNING)


def cancel(submission: Submission) -> None:
    """Ask the agent to stop; it records, packs and ends.  Nothing happens where it has ended already."""
    pid = _find_pid(submission)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)


def collect(submission: Submission, run_dir: RunDir) -> Path:
    """The bundle is here already; what a killed agent left is packed now.

    Raises:
        CheckFailed: the run goes on.
    """
    if poll(submission).state is JobState.RUNNING:
        raise CheckFailed(
            Problem(run_dir.run_id, "is still running", hint=f"rlk-repro status --watch {run_dir.run_id}")
        )
    return run_dir.bundle if run_dir.is_sealed and run_dir.bundle.is_file() else pack(run_dir)


def _find_pid(submission: Submission) -> int | None:
    """The agent's pid while it runs; a later process with the same number has another start time."""
    pid, _, start_ticks = submission.job_id.partition(":")
    if not (pid.isdecimal() and start_ticks.isdecimal()):
        return None
    stat = procfs.read_stat(int(pid))
    is_ours = stat is not None and stat.is_running and stat.start_ticks == int(start_ticks)
    return int(pid) if is_ours else None


def _describe_end(run_dir: RunDir) -> Status:
    end = _read_end(run_dir)
    reason = str(end.get("message") or "")
    if run_dir.is_sealed:
        return Status(state=JobState.DONE, reason=reason)
    code = end.get("exit_code")
    if code is None:
        return Status(state=JobState.FAILED, reason="the agent ended without a word")
    return Status(state=JobState.CANCELLED if code in _INTERRUPTED else JobState.FAILED, reason=reason)


def _read_end(run_dir: RunDir) -> dict[str, Any]:
    """The agent's last words; the state is the one file that it writes after sealing."""
    try:
        value = load_json(run_dir.state)
    except BundleUnreadable:
        return {}
    return value if isinstance(value, dict) else {}
