"""Questions to Slurm's clients, 22.05 and later, and the table of its job states.  Fixed fields, never human text.

Nothing is submitted here; that is the backend's.  Every client gets a clean environment: variables such as
``SBATCH_PARTITION`` or those of an enclosing job would silently change what it does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.clusters.api import JobState

TIMEOUT_S: Final = 60.0

# Every word that squeue and sacct have, and what it means for a submission.
STATES: Final[Mapping[str, JobState]] = MappingProxyType(
    {
        "BOOT_FAIL": JobState.FAILED,
        "CANCELLED": JobState.CANCELLED,
        "COMPLETED": JobState.DONE,
        "COMPLETING": JobState.RUNNING,
        "CONFIGURING": JobState.PENDING,
        "DEADLINE": JobState.FAILED,
        "EXPEDITING": JobState.PENDING,
        "FAILED": JobState.FAILED,
        "LAUNCH_FAILED": JobState.FAILED,
        "NODE_FAIL": JobState.FAILED,
        "OUT_OF_MEMORY": JobState.FAILED,
        "PENDING": JobState.PENDING,
        "POWER_UP_NODE": JobState.PENDING,
        "PREEMPTED": JobState.FAILED,
        "RECONFIG_FAIL": JobState.FAILED,
        "REQUEUED": JobState.PENDING,
        "REQUEUE_FED": JobState.PENDING,
        "REQUEUE_HOLD": JobState.PENDING,
        "RESIZING": JobState.RUNNING,
        "RESV_DEL_HOLD": JobState.PENDING,
        "REVOKED": JobState.UNKNOWN,  # a sibling of a federation took the job
        "RUNNING": JobState.RUNNING,
        "SIGNALING": JobState.RUNNING,
        "SPECIAL_EXIT": JobState.PENDING,
        "STAGE_OUT": JobState.RUNNING,
        "STOPPED": JobState.RUNNING,
        "SUSPENDED": JobState.RUNNING,
        "TIMEOUT": JobState.FAILED,
        "UPDATE_DB": JobState.RUNNING,
    }
)

# What sacct is asked for where it knows it: a single unknown name makes it fail as a whole.
SACCT_FIELDS: Final = (
    *("JobIDRaw", "JobName", "Cluster", "Account", "Partition", "QOS", "State", "ExitCode", "DerivedExitCode"),
    *("Submit", "Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw", "NodeList", "NNodes", "AllocTRES", "ReqTRES"),
    *("Restarts", "Reason", "Constraints", "Comment", "SubmitLine", "WorkDir", "FailedNode", "Reservation"),
    "ConsumedEnergyRaw",
)

_KEPT: Final = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
_CLIENT_VARIABLES: Final = ("SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
_JOB_ID: Final = re.compile(r"([0-9]+)(?:;([A-Za-z0-9_.-]+))?")
_VERSION: Final = re.compile(r"([0-9]+)\.([0-9]+)")
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
    """What Slurm says of one job: its word for the state, ours for that, and details where it has them."""

    word: str
    state: JobState
    reason: str = ""
    nodes: str = ""
    start: str = ""
    exit_code: str = ""


def parse_job_id(text: str) -> JobId | None:
    """The last line of what ``sbatch --parsable`` prints; sites let their filters print above it."""
    lines = text.split()
    found = _JOB_ID.fullmatch(lines[-1]) if lines else None
    return None if found is None else JobId(found[1], found[2] or "")


def parse_state(text: str) -> tuple[str, JobState]:
    """Slurm's word and ours, from ``CANCELLED by 1000`` or ``RUNNING``; ``unknown`` for a word of a later version."""
    word = text.partition(" ")[0].rstrip("+")
    return word, STATES.get(word, JobState.UNKNOWN)


def parse_version(text: str) -> tuple[int, int] | None:
    """``(22, 5)`` from ``slurm-wlm 22.05.8`` or ``slurm 24.11.5``."""
    found = _VERSION.search(text)
    return None if found is None else (int(found[1]), int(found[2]))


def clean_env(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what steers Slurm's clients, but for where the cluster is."""
    source = os.environ if environ is None else environ
    return {
        name: value
        for name, value in source.items()
        if name in _KEPT or not name.startswith(_CLIENT_VARIABLES)
    }  # fmt: skip


def run_client(*argv: str, timeout_s: float = TIMEOUT_S) -> proc.Completed:
    """Raises EnvironmentMissing where the client is not installed."""
    return proc.run(argv, timeout_s=timeout_s, env=clean_env())


def quote_words(done: proc.Completed) -> str:
    """What a client said when it refused, on one line, each sentence once, without its own name in front."""
    if done.is_timeout:
        return "no answer in time"
    lines = (done.stderr or done.stdout).splitlines()
    prefix = re.compile(rf"^{re.escape(done.argv[0].rpartition('/')[2])}: (?:error: |fatal: )?")
    words = dict.fromkeys(prefix.sub("", line.strip()) for line in lines)
    return "; ".join(word for word in words if word) or f"exit code {done.returncode}"


def find_obstacle() -> str | None:
    """Why nothing can be submitted from here: no clients, no configuration, no controller; or None."""
    try:
        version = run_client("sinfo", "--version")
        ping = run_client("scontrol", "ping") if version.is_ok else version
        return f"no Slurm controller answers ({quote_words(ping)})" if not ping.is_ok else _find_absent()
    except EnvironmentMissing as error:
        return str(error)


def probe_version() -> str:
    """The version as Slurm writes it, ``22.05.8``.

    Raises:
        EnvironmentMissing: no Slurm is configured on this machine.
    """
    done = run_client("sinfo", "--version")
    if not done.is_ok:
        raise EnvironmentMissing(Problem("slurm", f"not usable here ({quote_words(done)})"))
    return done.stdout.split()[-1] if done.stdout.split() else ""


def probe_config() -> dict[str, str]:
    """``scontrol show config`` by name; empty where the controller does not answer."""
    done = run_client("scontrol", "show", "config")
    pairs = (line.split(" = ", 1) for line in done.stdout.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, value in pairs} if done.is_ok else {}


def ask_queue(jobs: Collection[JobId]) -> dict[JobId, JobFacts]:
    """What slurmctld knows of these jobs, one question per cluster; ended ones are forgotten after ``MinJobAge``.

    Raises:
        SchedulerRefused: it did not answer; its words are quoted.
    """
    found: dict[JobId, JobFacts] = {}
    for cluster, numbers in _by_cluster(jobs):
        # A single number that is unknown is an error to squeue; in a list of two it is merely absent.
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
    """What slurmdbd remembers of these jobs; nothing on a cluster without accounting."""
    found: dict[JobId, JobFacts] = {}
    for cluster, numbers in _by_cluster(jobs):
        done = run_client(
            "sacct", *_name_cluster(cluster), "--noheader", "--parsable2", "--allocations",
            f"--jobs={','.join(numbers)}", "--format=JobIDRaw,State,ExitCode,NodeList",
        )  # fmt: skip
        if done.is_ok:
            found |= {JobId(fields[0], cluster): _read_accounting(fields) for fields in _split_rows(done.stdout, 4)}
    return found


def find_sacct_fields() -> list[str]:
    """The SACCT_FIELDS that this Slurm knows; empty without accounting."""
    done = run_client("sacct", "--helpformat")
    known = set(done.stdout.split()) if done.is_ok else set()
    return [name for name in SACCT_FIELDS if name in known]


def dump_accounting(job: JobId) -> str:
    """The accounting record of a job with a header line, ``|`` between fields; empty without accounting."""
    fields = find_sacct_fields()
    if not fields:
        return ""
    done = run_client(
        "sacct", *_name_cluster(job.cluster), "--parsable2", "--allocations", "--duplicates", f"--jobs={job.number}",
        f"--format={','.join(fields)}",
    )  # fmt: skip
    return done.stdout if done.is_ok else ""


def has_missing_nodes() -> bool:
    """Whether nodes are down, drained, in maintenance or silent just now: Slurm's own tests say too little then."""
    done = run_client("sinfo", "--noheader", f"--states={_AWAY}", "--format=%n")
    return done.is_ok and bool(done.stdout.strip())


def cancel(job: JobId, *, is_gentle: bool) -> proc.Completed:
    """``is_gentle`` signals the batch shell alone, whose trap lets the agents end; else Slurm ends the job."""
    gently = ("--batch", "--signal=TERM") if is_gentle else ()
    return run_client("scancel", *_name_cluster(job.cluster), *gently, job.number)


def dump_topology() -> str:
    """Dump the topology; empty where the cluster has none."""
    done = run_client("scontrol", "show", "topology")
    return done.stdout if done.is_ok else ""


def _find_absent() -> str | None:
    """Clients that are only needed later; asking for their version starts nothing."""
    for name in ("sbatch", "squeue", "scancel"):
        try:
            run_client(name, "--version")
        except EnvironmentMissing as error:
            return str(error)
    return None


def _by_cluster(jobs: Collection[JobId]) -> Iterator[tuple[str, list[str]]]:
    for cluster in sorted({job.cluster for job in jobs}):
        yield cluster, sorted(job.number for job in jobs if job.cluster == cluster)


def _name_cluster(cluster: str) -> tuple[str, ...]:
    return (f"--clusters={cluster}",) if cluster else ()


def _split_rows(text: str, num_fields: int) -> Iterator[list[str]]:
    """Rows with that many fields; with ``--clusters`` squeue prints a line of its own above them."""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == num_fields:
            yield ["" if field in _NOTHING else field for field in fields]


def _read_queue(fields: list[str]) -> JobFacts:
    word, state = parse_state(fields[1])
    return JobFacts(word=word, state=state, reason=fields[2], nodes=fields[3], start=fields[4])


def _read_accounting(fields: list[str]) -> JobFacts:
    word, state = parse_state(fields[1])
    return JobFacts(word=word, state=state, exit_code=fields[2], nodes=fields[3])
