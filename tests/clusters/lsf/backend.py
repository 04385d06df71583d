"""LSF as a cluster: one script for each run, on a file system that the hosts share with this machine."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.clock import utc_now
from rlk_repro.base.console import Tell, silence
from rlk_repro.base.errors import Problem, SchedulerRefused, SpecError
from rlk_repro.base.findings import Finding, Level
from rlk_repro.bundle.seal import pack
from rlk_repro.clusters.api import Bound, Job, JobState, JobStatus, Submission, TrialLine
from rlk_repro.clusters.asking import require_ended
from rlk_repro.clusters.profiles import Ask, Proposal
from rlk_repro.clusters.triallogs import read_logs
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_last_word
from rlk_repro.spec import Profile

CLIENT: Final = "bsub"
IS_REMOTE: Final = False
SCRIPT: Final = "job.lsf"
TIMEOUT_S: Final = 60.0
_STATES: Final = {
    "PEND": JobState.PENDING,
    "RUN": JobState.RUNNING,
    "DONE": JobState.DONE,
    "EXIT": JobState.FAILED,
}


def available() -> str | None:
    return None if shutil.which(CLIENT) else "bsub is not on PATH"


def render(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> Job:
    if nodes or plan.layout.num_nodes > 1:
        raise SpecError(Problem("cluster lsf", "runs on one host of LSF's choice", expected="one node"))
    command = shlex.join([sys.executable, "-m", "rlk_repro.job", str(run_dir.root.absolute()), "--resume"])
    lines = [
        "#!/bin/bash",
        f"#BSUB -J {plan.run.run}",
        f"#BSUB -q {plan.profile.settings.get('queue', 'normal')}",
        f"#BSUB -W {_time_limit_min(plan)}",
        f"exec {command}",
    ]
    return Job(files={SCRIPT: "\n".join(lines) + "\n"}, command=(CLIENT, str(run_dir.job / SCRIPT)))


def _time_limit_min(plan: Plan) -> int:
    return round(len(plan.trials) * plan.time_limit_min) + 30


def submit(job: Job, run_dir: RunDir) -> Submission:
    done = proc.run(job.command, timeout_s=TIMEOUT_S)
    found = re.search(r"Job <(\d+)> is submitted", done.stdout)
    if found is None:
        raise SchedulerRefused(Problem(CLIENT, done.stderr.strip() or done.stdout.strip()))
    return Submission(cluster="lsf", job_id=found[1], submitted_at=utc_now())


def poll(submission: Submission, run_dir: RunDir) -> JobStatus:
    done = proc.run(("bjobs", "-noheader", "-o", "stat", submission.job_id), timeout_s=TIMEOUT_S)
    state = _STATES.get(done.stdout.strip(), JobState.UNKNOWN)
    if run_dir.is_sealed and state.is_final:
        state = JobState.DONE
    return JobStatus(state=state, reason=read_last_word(run_dir).message)


def poll_all(items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
    return [poll(submission, run_dir) for submission, run_dir in items]


def logs(submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[TrialLine]:
    return read_logs(run_dir, lambda: not is_following or poll(submission, run_dir).state.is_final)


def cancel(submission: Submission, run_dir: RunDir) -> bool:
    is_over = poll(submission, run_dir).state.is_final
    if not is_over:
        proc.run(("bkill", submission.job_id), timeout_s=TIMEOUT_S)
    return not is_over


def collect(submission: Submission, run_dir: RunDir, tell: Tell = silence) -> Path:
    require_ended(poll(submission, run_dir), run_dir)
    return run_dir.bundle if run_dir.bundle.is_file() else pack(run_dir)


def find_bound(plan: Plan) -> Bound | None:
    return Bound(time_min=_time_limit_min(plan), gpus_per_node=plan.layout.gpus_per_node)


def propose_profile(ask: Ask) -> tuple[Proposal, str]:
    done = proc.run(("bqueues", "-noheader", "-o", "queue_name"), timeout_s=TIMEOUT_S)
    queues = done.stdout.split()
    queue = ask("Which queue?", queues, queues[0])
    values = {"schema": 1, "profile": "lsf", "cluster": "lsf", "hardware": "cpu", "settings": {"queue": queue}}
    return Proposal(values=values), "LSF"


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    done = proc.run(("bqueues", "-noheader", "-o", "queue_name"), timeout_s=TIMEOUT_S)
    queue = profile.settings.get("queue", "normal")
    if queue in done.stdout.split():
        return []
    return [Finding(Level.BLOCKING, "settings.queue", f"one of {', '.join(done.stdout.split())}", str(queue))]
