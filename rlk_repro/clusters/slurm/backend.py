"""Run on Slurm: one sbatch script per run, on a file system that the nodes share with this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.clock import utc_now
from rlk_repro.base.console import Tell, silence
from rlk_repro.base.errors import EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.base.files import write_text
from rlk_repro.base.findings import Finding
from rlk_repro.base.places import hide_places
from rlk_repro.base.resources import home_dir
from rlk_repro.base.secrets import Scrubber
from rlk_repro.clusters.api import Bound, Job, JobState, JobStatus, Submission, TrialLine
from rlk_repro.clusters.asking import NO_REPORT, asked_rarely, describe_lost, join_words, require_ended, require_known
from rlk_repro.clusters.profiles import Ask, Proposal, load_all_hardware
from rlk_repro.clusters.slurm import client as slurmctl
from rlk_repro.clusters.slurm.client import JobFacts
from rlk_repro.clusters.slurm.options import find_max_jobs, time_limit_min
from rlk_repro.clusters.triallogs import read_logs
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_last_word
from rlk_repro.spec import Profile

LOG_POLL_S: Final = 5.0
SUBMIT_TIMEOUT_S: Final = 300.0
CLUSTER_NAME: Final = "cluster_name"
VERSION: Final = "slurm_version"
_SCRIPT_FAILED: Final = "Slurm says FAILED"
_NODE_FAILED: Final = "NODE_FAIL"
# what the batch script and srun write into the job's output
_ALLOCATION: Final = re.compile(r"^allocation \S+: (\S+)$", re.MULTILINE)
_NODE_FAILURE: Final = re.compile(r"Node failure on ([\w.-]+)")
_TASK_END: Final = re.compile(r"^srun: error: ([\w.-]+): tasks? [^:]+: (.+)$", re.MULTILINE)
_AFTER_SIGTERM: Final = "Exited with exit code 143"
MAX_OUTPUT_BYTES: Final = 64 << 10


CLIENT: Final = "sbatch"
IS_REMOTE: Final = False


def available() -> str | None:
    return slurmctl.find_obstacle()


def render(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> Job:
    from rlk_repro.clusters.slurm.container import find_remarks
    from rlk_repro.clusters.slurm.script import SCRIPT, render_sbatch, sbatch_command

    script = render_sbatch(plan, run_dir, nodes=nodes)
    return Job(files={SCRIPT: script}, command=sbatch_command(run_dir), remarks=find_remarks(plan))


def submit(job: Job, run_dir: RunDir) -> Submission:
    """Test the job, then send it, without variables of this shell that would change the script's options."""
    config = slurmctl.probe_config()
    program, *options = job.command
    _test(job, program, "--test-only", *options)
    for earlier in (run_dir.state, run_dir.bundle, run_dir.cancelled):
        earlier.unlink(missing_ok=True)
    _record_site(run_dir, config)
    sent = _run_sbatch(job, program, *options)
    job_id = slurmctl.parse_job_id(sent.stdout) if sent.is_ok else None
    if job_id is None:
        raise _make_refusal(sent)
    details = {CLUSTER_NAME: config.get("ClusterName", ""), VERSION: config.get("SLURM_VERSION", "")}
    return Submission(cluster="slurm", job_id=str(job_id), submitted_at=utc_now(), details=details)


def poll(submission: Submission, run_dir: RunDir) -> JobStatus:
    return poll_all([(submission, run_dir)])[0]


def poll_all(items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
    ids = [slurmctl.parse_job_id(submission.job_id) for submission, _ in items]
    open_ids = {
        job_id for job_id, (_, run_dir) in zip(ids, items, strict=True) if job_id and not _is_over(run_dir)
    }  # fmt: skip
    try:
        facts = slurmctl.ask_queue(open_ids)
        silent = {
            job_id
            for job_id, (_, run_dir) in zip(ids, items, strict=True)
            if job_id in open_ids - facts.keys() and read_last_word(run_dir).exit_code is None
        }
        facts |= slurmctl.ask_accounting(silent)
        elsewhere = _find_elsewhere([submission for submission, _ in items]) if silent - facts.keys() else ""
    except (EnvironmentMissing, SchedulerRefused) as error:
        return [_judge_unasked(run_dir, str(error)) for _, run_dir in items]
    return [
        _judge(submission, run_dir, None if job_id is None else facts.get(job_id), elsewhere)
        for job_id, (submission, run_dir) in zip(ids, items, strict=True)
    ]


def logs(submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[TrialLine]:
    ask = asked_rarely(lambda: poll(submission, run_dir).state.is_final, LOG_POLL_S)
    return read_logs(run_dir, ask if is_following else lambda: True)


def cancel(submission: Submission, run_dir: RunDir) -> bool:
    status = poll(submission, run_dir)
    job_id = slurmctl.parse_job_id(submission.job_id)
    if status.state.is_final or job_id is None or not run_dir.plan.is_file():
        return False
    require_known(status, run_dir)
    is_first = not run_dir.cancelled.exists()
    write_text(run_dir.cancelled, utc_now() + "\n")
    done = slurmctl.cancel(job_id, is_gentle=is_first and status.state is JobState.RUNNING)
    if done.is_ok:
        return True
    if is_first:
        run_dir.cancelled.unlink()
    if poll(submission, run_dir).state.is_final:
        return False
    raise SchedulerRefused(Problem("slurm", f'scancel refused: "{slurmctl.quote_words(done)}"'))


def collect(submission: Submission, run_dir: RunDir, tell: Tell = silence) -> Path:
    """Return the bundle; if killed agents left none, pack the run directory with Slurm's last record of the job."""
    from rlk_repro.bundle.seal import pack

    if _is_over(run_dir) and run_dir.bundle.is_file():
        return run_dir.bundle
    require_ended(poll(submission, run_dir), run_dir)
    job_id = slurmctl.parse_job_id(submission.job_id)
    if not run_dir.is_sealed and job_id is not None and (record := slurmctl.dump_accounting(job_id)):
        _record(run_dir, "accounting-at-end", record)
    tell(f"packing run directory {run_dir.root}")
    return pack(run_dir)


def find_bound(plan: Plan) -> Bound | None:
    gpus = plan.hardware.gpus_per_node
    return Bound(time_min=time_limit_min(plan), gpus_per_node=gpus, num_jobs=find_max_jobs(plan))


def propose_profile(ask: Ask) -> tuple[Proposal, str]:
    from rlk_repro.clusters.slurm.propose import propose_slurm

    return propose_slurm(load_all_hardware(), home_dir() / "rlk-repro-images", ask)


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    from rlk_repro.clusters.slurm import check

    return check.check_profile(profile, plan)


def _test(job: Job, *argv: str) -> None:
    """Let Slurm test the job; raise SchedulerRefused if all nodes are up and Slurm refuses the job twice."""
    if _run_sbatch(job, *argv).is_ok or slurmctl.has_missing_nodes():
        return
    again = _run_sbatch(job, *argv)
    if not again.is_ok:
        raise _make_refusal(again)


def _run_sbatch(job: Job, *argv: str) -> proc.Completed:
    env = slurmctl.clean_env({**os.environ, **job.env})
    return proc.run(argv, timeout_s=SUBMIT_TIMEOUT_S, env=env)


def _make_refusal(done: proc.Completed) -> SchedulerRefused:
    words = slurmctl.quote_words(done)
    hint = "Slurm may have taken the job: look at squeue --me" if done.is_timeout else None
    if done.is_ok:
        words = f"no job id in {done.stdout!r}"
    return SchedulerRefused(Problem("slurm", f'sbatch refused the job: "{words}"', hint=hint))


def _record_site(run_dir: RunDir, config: Mapping[str, str]) -> None:
    rows = [f"{name} = {config[name]}\n" for name in sorted(config)]
    _record(run_dir, "config", "".join(rows))
    _record(run_dir, "topology", slurmctl.read_client("scontrol", "show", "topology"))
    write_text(run_dir.accounting_fields, ",".join(slurmctl.find_sacct_fields()))


def _record(run_dir: RunDir, topic: str, text: str) -> None:
    """Record Slurm's output without secrets: comments and command lines may hold them, and paths name users."""
    write_text(run_dir.scheduler_file(topic), hide_places(Scrubber.from_environment().text(text), run_dir.root))


def _is_over(run_dir: RunDir) -> bool:
    """Whether the run is sealed and packed, so that no answer of Slurm can change its state."""
    return run_dir.is_sealed and read_last_word(run_dir).exit_code is not None


def _judge_unasked(run_dir: RunDir, why: str) -> JobStatus:
    if _is_over(run_dir):
        return JobStatus(state=JobState.DONE, reason=read_last_word(run_dir).line)
    return JobStatus(state=JobState.UNKNOWN, reason=why, is_unreachable=True)


def _find_elsewhere(submissions: Sequence[Submission]) -> str:
    here = slurmctl.probe_config().get("ClusterName", "")
    return here if any(submission.details.get(CLUSTER_NAME, here) != here for submission in submissions) else ""


def _judge(submission: Submission, run_dir: RunDir, facts: JobFacts | None, elsewhere: str) -> JobStatus:
    if _is_over(run_dir):
        return JobStatus(state=JobState.DONE, reason=read_last_word(run_dir).line)
    if facts is None:
        home = submission.details.get(CLUSTER_NAME, "")
        if elsewhere and home != elsewhere:
            return JobStatus(
                state=JobState.UNKNOWN, reason=f"the job was sent to cluster {home}, but this is cluster {elsewhere}"
            )
        if not run_dir.plan.is_file():
            return describe_lost(f"job {submission.job_id}")
        return _judge_end(run_dir, JobState.FAILED, f"Slurm no longer knows job {submission.job_id}")
    match facts.state:
        case JobState.PENDING:
            start = f"expected to start {facts.start}" if facts.start else ""
            word = "" if facts.word == "PENDING" else facts.word
            lost = find_loss(submission, run_dir, is_fresh=True)
            return JobStatus(state=JobState.PENDING, reason=join_words(lost, facts.reason or word, start))
        case JobState.RUNNING:
            word = "" if facts.word == "RUNNING" else facts.word
            return JobStatus(state=JobState.RUNNING, reason=join_words(word, f"on {facts.nodes}"), nodes=facts.nodes)
        case JobState.UNKNOWN:
            return JobStatus(state=JobState.UNKNOWN, reason=f"Slurm says {facts.word}")
        case _:
            lost = find_loss(submission, run_dir, is_fresh=facts.word == _NODE_FAILED)
            return _judge_end(run_dir, facts.state, f"Slurm says {facts.word}", lost)


def find_loss(submission: Submission, run_dir: RunDir, *, is_fresh: bool) -> str:
    """Name the nodes or the agent that the job's last allocation lost; an empty text if none is known.

    ``srun`` names a lost node in the job's output, unless it ran on that node itself.  If the loss ``is_fresh``, Slurm
    still calls the node down.  An agent that was killed makes srun end the other agents by SIGTERM.
    """
    job = slurmctl.parse_job_id(submission.job_id)
    text = "" if job is None else read_end(run_dir.job_output(job.number))
    allocations = list(_ALLOCATION.finditer(text))
    if not allocations:
        return ""
    lost = set(_NODE_FAILURE.findall(text, allocations[-1].end()))
    if is_fresh:
        lost |= slurmctl.find_down_nodes() & set(allocations[-1][1].split(","))
    if lost:
        return f"lost node {', '.join(sorted(lost))}"
    ends = _TASK_END.findall(text, allocations[-1].end())
    told = [f"the agent of {node} ended first ({how})" for node, how in ends if how != _AFTER_SIGTERM]
    return told[0] if told and len(ends) > 1 else ""


def read_end(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(max(path.stat().st_size - MAX_OUTPUT_BYTES, 0))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _judge_end(run_dir: RunDir, state: JobState, word: str, lost: str = "") -> JobStatus:
    last = read_last_word(run_dir)
    if run_dir.is_sealed:
        return JobStatus(state=JobState.DONE, reason=last.line)
    if run_dir.cancelled.exists():
        return JobStatus(state=JobState.CANCELLED, reason=last.line or word)
    said = last.line or ("" if last.exit_code is not None else NO_REPORT)
    if word == _SCRIPT_FAILED and last.is_interrupted and not lost:
        said += ", which Slurm sends before the time limit"
    final = state if state is JobState.CANCELLED else JobState.FAILED
    return JobStatus(state=final, reason=join_words(word, lost, said))
