"""Define functions that several backends share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.clusters.api import JobState, JobStatus
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import FromEnv

NOT_WHOLE: Final = "a partition or a share of a GPU is not comparable with a whole GPU"
NO_REPORT: Final = "the agent ended without a report"
# Words of a reason, and the next step; the first row that matches counts.
NEXT_STEPS: Final[tuple[tuple[str, str], ...]] = (
    # Slurm: https://slurm.schedmd.com/job_reason_codes.html
    (r"TimeLimit|MaxWall|WallDuration", "shorten each job (--max-job-time), or name a partition"),
    (r"PartitionNodeLimit|(?:Max|Min|Grp)Node", "ask for fewer nodes, or name another partition"),
    (r"Invalid(?:Account|QOS)|NotAllowed", "list yours: sacctmgr show assoc user=$USER"),
    (r"(?:QOS|Assoc)\w*(?:Max|Min|Grp|Limit)|Max\w+Per", "wait for the account's other jobs"),
    (r"JobHeldAdmin", "an administrator holds the job: ask the site"),
    (r"JobHeldUser|requeued.* held", "read the job's output, then: scontrol release JOB"),
    (r"NotAvail|DOWN, DRAINED|NodeDown|UnavailableNodes", "sinfo --list-reasons says why"),
    (r"Partition(?:Down|Inactive)", "the partition is closed: name one that sinfo shows as up"),
    (r"Constraints|node configuration", "no node has what the job asks: sinfo -o '%N %G %f'"),
    (r"Reservation", "scontrol show reservation says what is reserved, and for how long"),
    (r"Dependency", "a job that never can start: rlk-repro cancel, then submit --resume"),
    (r"\.log says: ", "mend what it says on that node or in the profile, then submit --resume"),
    (r"BeginTime|requeued after", "wait: Slurm starts the job again, and complete pairs are kept"),
    # Kubernetes, its nodes and autoscalers, and Kueue
    (r"Inadmissible|LocalQueue", "name a queue of the namespace: kubectl get localqueues"),
    (r"> maximum capacity", "the quota can never hold the job: ask for fewer GPUs, or for quota"),
    (r"exceed.* quota", "the job waits for quota, now used up: kubectl describe quota"),
    (r"insufficient .*quota|assign flavors", "the job waits for quota: kubectl get clusterqueues"),
    (r"ScaleUp|out of resources", "the cloud has no such node now: wait, or name another zone"),
    (r"FailedPrepareDynamicResources", "the node lacks the driver: ask the cluster's operator"),
    (r"Sandbox|NetworkNotReady|UnexpectedAdmission", "the node starts no pods: ask the operator"),
    (r"FailedMount|AttachVolume|VolumeClaim", "kubectl describe pvc says what results.claim lacks"),
    (r"ImagePull|InvalidImageName", "check the image's name and pull secret: skopeo inspect"),
    (r"CreateContainerConfigError", "create the Secret or ConfigMap that the profile names"),
    (r"OOMKilled|OUT_OF_MEMORY", "the host's memory ran out: ask for whole nodes, or for more"),
    (r"untolerated taint", "name the taint in kubernetes.tolerations, if you may use these"),
    (r"Unschedulable|Insufficient", "kubectl describe nodes; profile check counts those that fit"),
    (r"Evict|Preempt|TaintManager|lost node", "wait; after its end: rlk-repro submit --resume"),
    (r"held back by its queue", "kubectl describe workloads says why"),
)  # fmt: skip


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


def find_next_step(reason: str) -> str:
    for pattern, step in NEXT_STEPS:
        if re.search(pattern, reason, re.IGNORECASE):
            return step
    return ""
