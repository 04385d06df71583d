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

# Fields to ask sacct for. One unknown name makes sacct fail, so unknown names are left out.
SACCT_FIELDS: Final = (
    *("JobIDRaw", "JobName", "Cluster", "Account", "Partition", "QOS", "State", "ExitCode", "DerivedExitCode"),
    *("Submit", "Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw", "NodeList", "NNodes", "AllocTRES", "ReqTRES"),
    *("Restarts", "Reason", "Constraints", "Comment", "SubmitLine", "WorkDir", "FailedNode", "Reservation"),
    "ConsumedEnergyRaw",
)

_KEPT: Final = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
_CLIENT_VARIABLES: Final = ("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
_JOB_ID: Final = re.compile(r"([0-9]+)(?:;([A-Za-z0-9_.-]+))?")
_SLICE: Final = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)
_AWAY: Final = "down,drain,fail,maint,no_respond,reboot,unk"
_NOTHING: Final = frozenset({"", "None", "N/A", "(null)", "None assigned", "Unknown"})


@dataclass(frozen=True, order=True)
class JobId:
    """A job as ``sbatch --parsable`` names it: ``12``, or ``12;east`` on another cluster of a federation."""

    number: str
    cluster: str = ""

    def __str__(self) -> str:
        return f"{self.number};{self.cluster}" if self.cluster else self.number


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What Slurm reports about one job; ``word`` is Slurm's name of the state."""

    word: str
    state: JobState
    reason: str = ""
    nodes: str = ""
    start: str = ""


def parse_job_id(text: str) -> JobId | None:
    """Read the last line that ``sbatch --parsable`` prints; a filter of the site may print lines above that line."""
    lines = text.split()
    found = _JOB_ID.fullmatch(lines[-1]) if lines else None
    return None if found is None else JobId(found[1], found[2] or "")


def parse_state(text: str) -> tuple[str, JobState]:
    """Return Slurm's and rlk-repro's names of a state such as ``CANCELLED by 1000``; the second may be ``unknown``."""
    word = text.partition(" ")[0].rstrip("+")
    return word, STATES.get(word, JobState.UNKNOWN)


def clean_env(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without variables such as ``SBATCH_PARTITION``, which change a client's options."""
    source = os.environ if environ is None else environ
    return {
        name: value
        for name, value in source.items()
        if name in _KEPT or not name.startswith(_CLIENT_VARIABLES)
    }  # fmt: skip


def run_client(*argv: str) -> proc.Completed:
    return proc.run(argv, timeout_s=TIMEOUT_S, env=clean_env())


def read_client(*argv: str) -> str:
    """Return a client's output; empty if it fails, as sacct without accounting, or if this machine lacks the client."""
    try:
        done = run_client(*argv)
    except EnvironmentMissing:
        return ""
    return done.stdout if done.is_ok else ""


def quote_words(done: proc.Completed) -> str:
    return quote_answer(done, rf"^{re.escape(done.argv[0].rpartition('/')[2])}: (?:error: |fatal: )?")


def find_obstacle() -> str | None:
    """Return why nothing can be submitted from here (no clients, no configuration, no controller), or None."""
    try:
        version = run_client("sinfo", "--version")
        ping = run_client("scontrol", "ping") if version.is_ok else version
        if not ping.is_ok:
            return f"no Slurm controller answers ({quote_words(ping)})"
        for name in ("sbatch", "squeue", "scancel"):
            run_client(name, "--version")
    except EnvironmentMissing as error:
        return str(error)
    return None


def require_slurm() -> None:
    """Raise EnvironmentMissing if nothing can be submitted from here."""
    obstacle = find_obstacle()
    if obstacle is not None:
        copy = "rlk-repro profile show generic-h200 > my-site.yaml"
        hint = f"log in to the cluster, or copy a shipped profile: {copy}"
        raise EnvironmentMissing(Problem("slurm", obstacle, hint=hint))


def is_slice(gres: str) -> bool:
    """Whether GPUs of this type are slices, such as ``gpu:h200_3g.71gb``."""
    return _SLICE.search(gres) is not None


def probe_config() -> dict[str, str]:
    """Return the settings of ``scontrol show config`` by name; empty if the controller does not answer."""
    done = run_client("scontrol", "show", "config")
    pairs = (line.split(" = ", 1) for line in done.stdout.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, value in pairs} if done.is_ok else {}


def ask_queue(jobs: Collection[JobId]) -> dict[JobId, JobFacts]:
    """Ask slurmctld about jobs, once per cluster; slurmctld forgets an ended job after ``MinJobAge``.

    Raises:
        SchedulerRefused: slurmctld did not answer; the error quotes squeue's message.
    """
    found: dict[JobId, JobFacts] = {}
    for cluster, numbers in _by_cluster(jobs):
        # squeue fails for a single unknown id; from a longer list it leaves out unknown ids, so list one id twice.
        listed = ",".join([*numbers, numbers[-1]])
        done = run_client(
            "squeue", *_name_cluster(cluster), "--noheader", "--states=all", f"--jobs={listed}",
            "--format=%A|%T|%r|%N|%S",
        )  # fmt: skip
        if not done.is_ok:
            raise SchedulerRefused(Problem("slurm", f'squeue did not answer: "{quote_words(done)}"'))
        found |= {JobId(fields[0], cluster): _read_queue(fields) for fields in _split_rows(done.stdout, 5)}
    return found


def ask_accounting(jobs: Collection[JobId]) -> dict[JobId, JobFacts]:
    """Ask slurmdbd about these jobs; return nothing if the cluster has no accounting."""
    found: dict[JobId, JobFacts] = {}
    for cluster, numbers in _by_cluster(jobs):
        text = read_client(
            "sacct", *_name_cluster(cluster), "--noheader", "--parsable2", "--allocations",
            f"--jobs={','.join(numbers)}", "--format=JobIDRaw,State,NodeList",
        )  # fmt: skip
        found |= {JobId(fields[0], cluster): _read_accounting(fields) for fields in _split_rows(text, 3)}
    return found


def find_sacct_fields() -> list[str]:
    known = set(read_client("sacct", "--helpformat").split())
    return [name for name in SACCT_FIELDS if name in known]


def dump_accounting(job: JobId) -> str:
    """Return a job's accounting record: a header line, then rows; ``|`` separates fields.  Empty without accounting."""
    fields = find_sacct_fields()
    if not fields:
        return ""
    return read_client(
        "sacct", *_name_cluster(job.cluster), "--parsable2", "--allocations", "--duplicates", f"--jobs={job.number}",
        f"--format={','.join(fields)}",
    )  # fmt: skip


def has_missing_nodes() -> bool:
    """Whether nodes are down, drained, in maintenance or not responding: Slurm's own tests are then not reliable."""
    return bool(_list_nodes(_AWAY))


def find_down_nodes() -> set[str]:
    return set(_list_nodes("down,fail,no_respond"))


def _list_nodes(states: str) -> list[str]:
    return read_client("sinfo", "--noheader", "--Node", f"--states={states}", "--format=%N").split()


def cancel(job: JobId, *, is_gentle: bool) -> proc.Completed:
    """Cancel a job.  With ``is_gentle``, only send SIGTERM to the job's batch shell, which then ends the agents."""
    gently = ("--batch", "--signal=TERM") if is_gentle else ()
    return run_client("scancel", *_name_cluster(job.cluster), *gently, job.number)


def _by_cluster(jobs: Collection[JobId]) -> Iterator[tuple[str, list[str]]]:
    for cluster in sorted({job.cluster for job in jobs}):
        yield cluster, sorted(job.number for job in jobs if job.cluster == cluster)


def _name_cluster(cluster: str) -> tuple[str, ...]:
    return (f"--clusters={cluster}",) if cluster else ()


def _split_rows(text: str, num_fields: int) -> Iterator[list[str]]:
    """Yield rows with ``num_fields`` fields; with ``--clusters`` squeue prints another line above them."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == num_fields:
            yield ["" if field in _NOTHING else field for field in fields]


def _read_queue(fields: list[str]) -> JobFacts:
    word, state = parse_state(fields[1])
    return JobFacts(word=word, state=state, reason=fields[2], nodes=fields[3], start=fields[4])


def _read_accounting(fields: list[str]) -> JobFacts:
    word, state = parse_state(fields[1])
    return JobFacts(word=word, state=state, nodes=fields[2])
