"""Ask Slurm's clients (22.05 or later) and interpret job states."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.clusters.api import JobState
from rlk_repro.clusters.asking import quote_answer

TIMEOUT_S: Final = 60.0

STATES: Final[Mapping[str, JobState]] = {
    word: state
    for state, words in (
        (JobState.PENDING, "CONFIGURING EXPEDITING PENDING POWER_UP_NODE REQUEUED REQUEUE_FED REQUEUE_HOLD"),
        (JobState.PENDING, "RESV_DEL_HOLD SPECIAL_EXIT"),
        (JobState.RUNNING, "COMPLETING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED SUSPENDED UPDATE_DB"),
        (JobState.DONE, "COMPLETED"),
        (JobState.CANCELLED, "CANCELLED"),
        (JobState.FAILED, "BOOT_FAIL DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED"),
        (JobState.FAILED, "RECONFIG_FAIL TIMEOUT"),
        (JobState.UNKNOWN, "REVOKED"),  # a sibling cluster of a federation took the job
    )
    for word in words.split()
}

# sacct fails if it does not know a field; Slurm 22.05 knows these.
SACCT_FIELDS: Final = (
    "JobIDRaw,JobName,Cluster,Account,Partition,QOS,State,ExitCode,DerivedExitCode,Submit,Eligible,"
    "Start,End,ElapsedRaw,TimelimitRaw,NodeList,NNodes,AllocTRES,ReqTRES,Reason,Constraints,"
    "Comment,SubmitLine,WorkDir,Reservation,ConsumedEnergyRaw"
)

_KEPT: Final = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
_CLIENT_VARIABLES: Final = ("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
# Slurm's own tests of a job are not reliable while nodes are in one of these states.
AWAY: Final = "down,drain,fail,maint,no_respond,reboot,unk"
_NOTHING: Final = frozenset({"", "None", "N/A", "(null)", "None assigned", "Unknown"})


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What Slurm reports about one job; ``word`` is Slurm's name of the state."""

    word: str
    state: JobState
    reason: str = ""
    nodes: str = ""
    start: str = ""


def parse_job_id(text: str) -> str | None:
    """Read ``12`` or ``12;CLUSTER`` of ``sbatch --parsable``, below lines of a site's filter."""
    found = re.search(r"(?:^|\s)([0-9]+)(?:;\S*)?\s*$", text)
    return None if found is None else found[1]


def parse_state(text: str) -> tuple[str, JobState]:
    """Return Slurm's and rlk-repro's names of a state such as ``CANCELLED by 1000``; the second may be ``unknown``."""
    word = text.partition(" ")[0].rstrip("+")
    return word, STATES.get(word, JobState.UNKNOWN)


def clean_env(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without variables such as ``SBATCH_PARTITION``, which change a client's options."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(_CLIENT_VARIABLES)
    }  # fmt: skip


def run_client(*argv: str) -> proc.Completed:
    return proc.run(argv, timeout_s=TIMEOUT_S, env=clean_env())


def ask_client(*argv: str) -> proc.Completed:
    """Ask again after a time-out or an error of the server."""
    return proc.ask(argv, timeout_s=TIMEOUT_S, env=clean_env())


def read_client(*argv: str, must_answer: bool = False) -> str:
    """Return a client's output; empty if it fails, as sacct without accounting, or if this machine lacks the client.

    Raises:
        SchedulerRefused: Slurm ``must_answer``, and its daemon did not.
    """
    try:
        done = ask_client(*argv)
    except EnvironmentMissing:
        return ""
    if must_answer and done.is_outage:
        raise SchedulerRefused(Problem("slurm", f'{argv[0]} did not answer: "{quote_words(done)}"'))
    return done.stdout if done.is_ok else ""


def quote_words(done: proc.Completed) -> str:
    return quote_answer(done, rf"^{re.escape(done.argv[0].rpartition('/')[2])}: (?:error: |fatal: )?")


def find_obstacle() -> str | None:
    """Return why nothing can be submitted from here (no clients, no configuration, no controller), or None."""
    try:
        ping = ask_client("scontrol", "ping")
        if not ping.is_ok:
            return f"no Slurm controller answers ({quote_words(ping)})"
    except EnvironmentMissing as error:
        return str(error)
    return None


def require_slurm() -> None:
    """Raise EnvironmentMissing if nothing can be submitted from here."""
    obstacle = find_obstacle()
    if obstacle is not None:
        show = "rlk-repro profile show generic-h200 > my-site.yaml"
        hint = f"log in to the cluster, or copy a shipped profile: {show}"
        raise EnvironmentMissing(Problem("slurm", obstacle, hint=hint))


def probe_config() -> dict[str, str]:
    """Return the settings of ``scontrol show config`` by name; empty if the controller does not answer."""
    done = ask_client("scontrol", "show", "config")
    pairs = (line.split(" = ", 1) for line in done.stdout.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, value in pairs} if done.is_ok else {}


def ask_queue(jobs: Collection[str]) -> dict[str, JobFacts]:
    """Ask slurmctld about jobs at once; slurmctld forgets an ended job after ``MinJobAge``.

    Raises:
        SchedulerRefused: slurmctld did not answer; the error quotes squeue's message.
    """
    if not jobs:
        return {}
    numbers = sorted(jobs)
    # squeue fails for a single unknown id; from a longer list it leaves out unknown ids
    listed = ",".join([*numbers, numbers[-1]])
    words = ("--noheader", "--states=all", f"--jobs={listed}", "--format=%A|%T|%r|%N|%S")
    done = ask_client("squeue", *words)
    if not done.is_ok:
        raise SchedulerRefused(Problem("slurm", f'squeue did not answer: "{quote_words(done)}"'))
    found: dict[str, JobFacts] = {}
    for number, state, reason, nodes, start in _split_rows(done.stdout, 5):
        word, known = parse_state(state)
        found[number] = JobFacts(word=word, state=known, reason=reason, nodes=nodes, start=start)
    return found


def ask_accounting(jobs: Collection[str]) -> dict[str, JobFacts]:
    """Ask slurmdbd about these jobs; return nothing if the cluster has no accounting.

    Raises:
        SchedulerRefused: slurmdbd did not answer, so the jobs may be known.
    """
    if not jobs:
        return {}
    words = ("--noheader", "--parsable2", "--allocations", f"--jobs={','.join(sorted(jobs))}")
    text = read_client("sacct", *words, "--format=JobIDRaw,State,NodeList", must_answer=True)
    found: dict[str, JobFacts] = {}
    for number, state, nodes in _split_rows(text, 3):
        word, known = parse_state(state)
        found[number] = JobFacts(word=word, state=known, nodes=nodes)
    return found


def dump_accounting(job: str) -> str:
    """Return a job's accounting record: a header line, then rows; empty without accounting."""
    words = ("--parsable2", "--allocations", "--duplicates", f"--jobs={job}")
    return read_client("sacct", *words, f"--format={SACCT_FIELDS}")


def list_nodes(states: str) -> list[str]:
    return read_client("sinfo", "--noheader", "--Node", f"--states={states}", "--format=%N").split()


def cancel(job: str, *, is_gentle: bool) -> proc.Completed:
    """Cancel a job.  With ``is_gentle``, only send SIGTERM to the job's batch shell, which then ends the agents."""
    gently = ("--batch", "--signal=TERM") if is_gentle else ()
    return run_client("scancel", *gently, job)


def _split_rows(text: str, num_fields: int) -> Iterator[list[str]]:
    """Yield rows with ``num_fields`` fields; a site's wrapper may print other lines."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == num_fields:
            yield ["" if field in _NOTHING else field for field in fields]
