"""Run on Slurm: one sbatch script per run, on a file system that the nodes share with this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.console import Tell, silence
from rlk_repro.base.errors import EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.base.files import read_end, write_text
from rlk_repro.base.findings import Finding
from rlk_repro.base.places import hide_places
from rlk_repro.base.resources import home_dir
from rlk_repro.base.secrets import Scrubber
from rlk_repro.base.units import utc_now
from rlk_repro.clusters.api import Bound, Job, JobState, JobStatus, Submission, TrialLine
from rlk_repro.clusters.asking import NO_REPORT, describe_lost, join_words, require_ended, require_known
from rlk_repro.clusters.profiles import Ask, Proposal, load_all_hardware
from rlk_repro.clusters.slurm import client as slurmctl
from rlk_repro.clusters.slurm.client import JobFacts
from rlk_repro.clusters.slurm.options import find_max_jobs, time_limit_min
from rlk_repro.clusters.triallogs import read_logs
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_last_word
from rlk_repro.spec import Profile

LOG_POLL_S: Final = 3.0
SUBMIT_TIMEOUT_S: Final = 300.0
CLUSTER_NAME: Final = "cluster_name"
VERSION: Final = "slurm_version"
# what the batch script and srun write into the job's output
_ALLOCATION: Final = re.compile(r"^allocation \S+: (\S+)$", re.MULTILINE)
_NODE_FAILURE: Final = re.compile(r"Node failure on ([\w.-]+)")
_TASK_END: Final = re.compile(r"^srun: error: ([\w.-]+): tasks? [^:]+: (.+)$", re.MULTILINE)
# a job's or step's end by Slurm, and what pyxis, enroot, Apptainer, docker and podman say where no container starts
_STOPPED: Final = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO ([A-Z ]+?) \*\*\*", re.IGNORECASE)
_ERROR: Final = re.compile(r"\berror\b|fatal|denied|not found|no such|n't start|cannot|failed|no space|killed", re.I)
_ECHO: Final = re.compile(
    r"Exited with|spank|printing (?:enroot|contents of) log|\[INFO\]|unblock task|unusual entrypoint"
    r"|Killing tasks|Job step aborted|CANCELLED AT|Terminated$"
)
NUM_ERRORS: Final = 3
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
    from rlk_repro.clusters.slurm.check import require_time

    require_time(Plan.load(run_dir.plan))
    config = slurmctl.probe_config()
    program, *options = job.command
    env = slurmctl.clean_env({**os.environ, **job.env})
    tested = proc.ask((program, "--test-only", *options), timeout_s=SUBMIT_TIMEOUT_S, env=env)
    if not tested.is_ok and not slurmctl.list_nodes(slurmctl.AWAY):
        raise _make_refusal(tested)
    for earlier in (run_dir.state, run_dir.bundle, run_dir.cancelled):
        earlier.unlink(missing_ok=True)
    _record_site(run_dir, config)
    sent = proc.run(job.command, timeout_s=SUBMIT_TIMEOUT_S, env=env)
    job_id = slurmctl.parse_job_id(sent.stdout) if sent.is_ok else None
    if job_id is None:
        raise _make_refusal(sent)
    cluster = sent.stdout.split()[-1].partition(";")[2] or config.get("ClusterName", "")
    details = {CLUSTER_NAME: cluster, VERSION: config.get("SLURM_VERSION", "")}
    return Submission(cluster="slurm", job_id=job_id, submitted_at=utc_now(), details=details)


def poll(submission: Submission, run_dir: RunDir) -> JobStatus:
    return poll_all([(submission, run_dir)])[0]


def poll_all(items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
    ids = {slurmctl.parse_job_id(submission.job_id): run_dir for submission, run_dir in items if not _is_over(run_dir)}
    facts: dict[str, JobFacts] = {}
    why = ""
    try:
        facts |= slurmctl.ask_queue([job_id for job_id in ids if job_id])
        forgotten = [job_id for job_id in ids if job_id and job_id not in facts]
        facts |= slurmctl.ask_accounting([job for job in forgotten if read_last_word(ids[job]).exit_code is None])
    except (EnvironmentMissing, SchedulerRefused) as error:
        why = str(error)
    return [_judge(submission, run_dir, facts, why) for submission, run_dir in items]


def logs(submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[TrialLine]:
    def is_over() -> bool:
        return not is_following or poll(submission, run_dir).state.is_final

    return read_logs(run_dir, is_over, LOG_POLL_S)


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


def _make_refusal(done: proc.Completed) -> SchedulerRefused:
    words = slurmctl.quote_words(done)
    hint = "Slurm may have taken the job: look at squeue --me" if done.is_timeout else None
    if "--segment" in words:
        hint = "--segment needs Slurm 24.05: delete slurm.block_size in the profile"
    if done.is_ok:
        words = f"no job id in {done.stdout!r}"
    what = "Slurm did not answer" if done.is_outage else "sbatch refused the job"
    return SchedulerRefused(Problem("slurm", f'{what}: "{words}"', hint=hint))


def _record_site(run_dir: RunDir, config: Mapping[str, str]) -> None:
    rows = [f"{name} = {config[name]}\n" for name in sorted(config)]
    _record(run_dir, "config", "".join(rows))
    _record(run_dir, "topology", slurmctl.read_client("scontrol", "show", "topology"))


def _record(run_dir: RunDir, topic: str, text: str) -> None:
    """Record Slurm's output without secrets: comments and command lines may hold them, and paths name users."""
    write_text(run_dir.scheduler_file(topic), hide_places(Scrubber.from_environment().text(text), run_dir.root))


def _is_over(run_dir: RunDir) -> bool:
    """Whether the run is sealed and packed, so that no answer of Slurm can change its state."""
    return run_dir.is_sealed and read_last_word(run_dir).exit_code is not None


def _judge(submission: Submission, run_dir: RunDir, known: Mapping[str, JobFacts], why: str) -> JobStatus:
    """Return a job's state; ``why`` is the reason if Slurm could not be asked."""
    if _is_over(run_dir):
        return JobStatus(state=JobState.DONE, reason=read_last_word(run_dir).line)
    if why:
        return JobStatus(state=JobState.UNKNOWN, reason=why, is_unreachable=True)
    job_id = slurmctl.parse_job_id(submission.job_id)
    facts = None if job_id is None else known.get(job_id)
    if job_id is None or facts is None:
        return _judge_forgotten(submission, run_dir)
    match facts.state:
        case JobState.PENDING:
            start = facts.start and f"expected to start {facts.start}"
            word = "" if facts.word == "PENDING" else facts.word
            last = _read_last_start(job_id, run_dir)
            told = (last.find_loss(is_fresh=True), last.find_stop(), facts.reason or word, start)
            return JobStatus(state=JobState.PENDING, reason=join_words(*told))
        case JobState.RUNNING:
            word = "" if facts.word == "RUNNING" else facts.word
            return JobStatus(state=JobState.RUNNING, reason=join_words(word, f"on {facts.nodes}"), nodes=facts.nodes)
        case JobState.UNKNOWN:
            return JobStatus(state=JobState.UNKNOWN, reason=f"Slurm says {facts.word}")
        case _:
            last = _read_last_start(job_id, run_dir)
            said = last.quote_errors()
            file = said and f"{run_dir.job_output(job_id).name} says: {said}"
            lost = last.find_loss(is_fresh=facts.word == "NODE_FAIL")
            return _judge_end(run_dir, facts.state, f"Slurm says {facts.word}", lost, file)


def _judge_forgotten(submission: Submission, run_dir: RunDir) -> JobStatus:
    home = submission.details.get(CLUSTER_NAME)
    if home and read_last_word(run_dir).exit_code is None:
        here = slurmctl.probe_config().get("ClusterName", home)
        if here != home:
            reason = f"the job was sent to cluster {home}, but this is cluster {here}"
            return JobStatus(state=JobState.UNKNOWN, reason=reason)
    if not run_dir.plan.is_file():
        return describe_lost(f"job {submission.job_id}")
    return _judge_end(run_dir, JobState.FAILED, f"Slurm no longer knows job {submission.job_id}")


@dataclass(frozen=True)
class _Start:
    """The nodes of a job's last start, and what the batch script and srun have written since."""

    nodes: frozenset[str]
    output: str

    def quote_errors(self) -> str:
        """Quote the last errors of the script and of the container's start, without what only follows from them."""
        lines = self.output.splitlines()
        errors = [" ".join(line.split()) for line in lines if _ERROR.search(line) and not _ECHO.search(line)]
        return "; ".join(list(dict.fromkeys(errors))[-NUM_ERRORS:])

    def find_stop(self) -> str:
        """Say how Slurm ended this start, such as by preemption, which a requeued job's reason does not say."""
        stops = _STOPPED.findall(self.output)
        return f"requeued after {stops[-1].lower()}" if stops else ""

    def find_loss(self, *, is_fresh: bool) -> str:
        """Name the nodes or the agent that this start lost; an empty text if none is known.

        ``srun`` names a lost node, unless it ran on that node itself.  If the loss ``is_fresh``, Slurm still calls the
        node down.  An agent that was killed makes srun end the other agents by SIGTERM.
        """
        lost = set(_NODE_FAILURE.findall(self.output))
        if is_fresh and self.nodes:
            lost |= self.nodes.intersection(slurmctl.list_nodes("down,fail,no_respond"))
        if lost:
            return f"lost node {', '.join(sorted(lost))}"
        ends = _TASK_END.findall(self.output)
        told = [f"the agent of {node} ended first ({how})" for node, how in ends if how != _AFTER_SIGTERM]
        return told[0] if told and len(ends) > 1 else ""


def _read_last_start(job_id: str, run_dir: RunDir) -> _Start:
    text = read_end(run_dir.job_output(job_id), MAX_OUTPUT_BYTES).decode(errors="replace")
    starts = list(_ALLOCATION.finditer(text))
    if not starts:
        return _Start(frozenset(), text)
    return _Start(frozenset(starts[-1][1].split(",")), text[starts[-1].end() :])


def _judge_end(run_dir: RunDir, state: JobState, word: str, lost: str = "", output: str = "") -> JobStatus:
    last = read_last_word(run_dir)
    if run_dir.is_sealed:
        return JobStatus(state=JobState.DONE, reason=last.line)
    if run_dir.cancelled.exists():
        return JobStatus(state=JobState.CANCELLED, reason=last.line or word)
    said = last.line or ("" if last.exit_code is not None else join_words(NO_REPORT, output))
    if word == "Slurm says FAILED" and last.is_interrupted and not lost:
        said += ", which Slurm sends before the time limit"
    final = state if state is JobState.CANCELLED else JobState.FAILED
    return JobStatus(state=final, reason=join_words(word, lost, said))
