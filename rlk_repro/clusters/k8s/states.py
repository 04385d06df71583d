"""Derive a job's state, and the reason in plain words, from the job's objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rlk_repro.clusters.api import JobState
from rlk_repro.clusters.k8s.naming import AGENT, COLLECTOR, INDEX, LEADER, ROLE
from rlk_repro.clusters.k8s.tree import as_list, as_map

Pod = TypeVar("Pod", bound=Mapping[str, Any])
# KubeRay's jobDeploymentStatus
RAYJOB_STATES: Final[Mapping[str, JobState]] = {
    "": JobState.PENDING,
    "Complete": JobState.DONE,
    "Running": JobState.RUNNING,
    **dict.fromkeys(("Failed", "ValidationFailed"), JobState.FAILED),
    **dict.fromkeys(("New", "Initializing", "Waiting", "Scheduled", "Scheduling"), JobState.PENDING),
    **dict.fromkeys(("Suspending", "Suspended", "Retrying"), JobState.PENDING),
}
# KubeRay's jobStatus, once jobDeploymentStatus is Complete
RAY_ENDS: Final[Mapping[str, JobState]] = {
    "SUCCEEDED": JobState.DONE,
    "FAILED": JobState.FAILED,
    "STOPPED": JobState.CANCELLED,
}
# conditions of a Job; the first one with status True decides
CONDITIONS: Final[tuple[tuple[str, JobState], ...]] = (
    ("Failed", JobState.FAILED),
    ("FailureTarget", JobState.FAILED),
    ("Complete", JobState.DONE),
    ("Suspended", JobState.PENDING),
)
WORDS: Final[Mapping[str, str]] = {
    "BackoffLimitExceeded": "a pod failed",
    "ContainerCannotRun": "the container cannot be started",
    "ContainerCreating": "the container is being created",
    "ContainersNotReady": "the pod's containers are not ready",
    "CrashLoopBackOff": "the container ends soon after every start",
    "CreateContainerConfigError": "a secret or ConfigMap that the pod names is missing",
    "CreateContainerError": "the container cannot be created",
    "DeadlineExceeded": "the job took longer than max_time_min",
    "DeletionByTaintManager": "the node got a taint that the pod does not tolerate",
    "DeletionByPodGC": "the node is gone",
    "ErrImageNeverPull": "the image is not on the node, and pulling is not allowed",
    "ErrImagePull": "the image cannot be pulled",
    "Error": "the agent failed",
    "Evicted": "evicted: the node ran out of a resource",
    "EvictionByEvictionAPI": "evicted because the node is drained",
    "FailedAttachVolume": "a volume cannot be attached",
    "FailedCreate": "a pod may not be created (quota or admission)",
    "FailedMount": "a volume cannot be mounted",
    "FailedScheduling": "no node fits",
    "ImageInspectError": "the image cannot be read",
    "ImagePullBackOff": "the image cannot be pulled",
    "InvalidImageName": "the image's name is wrong",
    "JobSuspended": "suspended by its queue or by hand",
    "NodeAffinity": "the node's labels changed",
    "NodeLost": "the node does not answer",
    "NodeShutdown": "the node was shut down",
    "OOMKilled": "out of memory: the container used more than its limit",
    "OutOfcpu": "the node had no CPU left",
    "OutOfmemory": "the node had no memory left",
    "PodFailurePolicy": "a pod failed, or was evicted or preempted",
    "PodInitializing": "the container is being created",
    "Preempted": "preempted by a job of higher priority",
    "PreemptionByScheduler": "preempted by a job of higher priority",
    "PreemptionByKubeScheduler": "preempted by a job of higher priority",
    "RegistryUnavailable": "the registry does not answer",
    "SchedulingGated": "held back by its queue",
    "Terminated": "ended because the node shut down",
    "TerminationByKubelet": "the node ended the pod",
    "UnexpectedAdmissionError": "the node's device plugin refused the pod",
    "Unschedulable": "no node fits",
}
TELLING_EVENTS: Final = frozenset(
    {"FailedScheduling", "FailedMount", "FailedAttachVolume", "FailedCreate", "Failed", "BackOff", "InvalidRayJobSpec",
     "FailedToCreateRayCluster", "Preempted", "Evicted", "FailedResourceClaimCreation"}
)  # fmt: skip
DISRUPTED: Final = "DisruptionTarget"
_NOT_A_REASON: Final = frozenset({"ContainersNotReady", "PodInitializing", "ContainerCreating", "Completed", "Error"})


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The state of a job; ``nodes`` are the nodes on which agents run.

    ``leader`` is the name of the running leading pod, and ``leader_uid`` its unique id, because KubeRay reuses names.
    """

    state: JobState
    reason: str
    leader: str = ""
    leader_uid: str = ""
    nodes: tuple[str, ...] = ()


def judge(
    job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()
) -> Judged:
    agents = find_latest([pod for pod in pods if role_of(pod) != COLLECTOR])
    state, reason = judge_job(job)
    leader = next((pod for pod in agents if role_of(pod) == LEADER), None)
    # the leading pod does not run yet, or a new pod will replace the evicted leading pod
    if state is JobState.RUNNING and (not has_begun(leader) or is_disrupted(leader)):
        state = JobState.PENDING
    elif state is JobState.PENDING and is_running(leader):
        state = JobState.RUNNING  # KubeRay reports "running" only when Ray answers
    reasons = [reason] if state.is_final else []
    if state is not JobState.DONE:
        reasons += dict.fromkeys(word for pod in agents for word in explain_pod(pod))
    if not any(reasons) and state is not JobState.RUNNING:
        reasons = [reason, *explain_events(_leave_out_gone(events, pods))]
    running = as_map(leader.get("metadata")) if leader is not None and is_running(leader) else {}
    return Judged(
        state=state,
        reason="; ".join(dict.fromkeys(word for word in reasons if word)),
        leader=str(running.get("name", "")),
        leader_uid=str(running.get("uid", "")),
        nodes=tuple(sorted(str(as_map(pod.get("spec")).get("nodeName")) for pod in agents if is_running(pod))),
    )


def find_latest(pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods; if several pods of a Job have the same index, return only the newest of them."""
    latest: dict[str, Pod] = {}
    for pod in sorted(pods, key=_age):
        metadata = as_map(pod.get("metadata"))
        index = as_map(metadata.get("annotations")).get(INDEX)
        latest[str(metadata.get("name")) if index is None else f"index {index}"] = pod
    return list(latest.values())


def _age(pod: Mapping[str, Any]) -> tuple[str, bool]:
    """Return a sort key, oldest pod first: by creation time in whole seconds; at equal times, an ended pod first."""
    has_ended = as_map(pod.get("status")).get("phase") in {"Succeeded", "Failed"}
    return str(as_map(pod.get("metadata")).get("creationTimestamp", "")), not has_ended


def judge_job(job: Mapping[str, Any]) -> tuple[JobState, str]:
    status, spec = as_map(job.get("status")), as_map(job.get("spec"))
    if job.get("kind") == "RayJob":
        word = str(status.get("jobDeploymentStatus", ""))
        state = RAYJOB_STATES.get(word, JobState.UNKNOWN)
        if word == "Complete":
            state = RAY_ENDS.get(str(status.get("jobStatus", "")), JobState.DONE)
        return state, _explain(status) or ("held back by its queue" if word == "Suspended" else "")
    conditions = _read_conditions(job)
    for name, state in CONDITIONS:
        found = conditions.get(name, {})
        if found.get("status") == "True":
            return state, _explain(found)
    if spec.get("suspend"):
        return JobState.PENDING, "held back by its queue"
    return JobState.RUNNING, ""


def explain_pod(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a pod does not run, or how it ended."""
    status, conditions = as_map(pod.get("status")), _read_conditions(pod)
    if is_disrupted(pod):
        yield _explain(conditions[DISRUPTED])
    elif status.get("reason"):
        yield _explain(status)
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        yield _explain(scheduled)
    for container in (*as_list(status.get("initContainerStatuses")), *as_list(status.get("containerStatuses"))):
        for kind in ("waiting", "terminated"):
            found = as_map(as_map(as_map(container).get("state")).get(kind))
            reason = str(found.get("reason", ""))
            if reason and reason not in _NOT_A_REASON:
                yield _explain(found)
            elif found.get("exitCode"):
                ended = f"the agent of {as_map(pod.get('metadata')).get('name')} ended with code {found['exitCode']}"
                # the last two lines of this tool's errors name the problem and the next step
                last = str(found.get("message", "")).splitlines()[-2:]
                words = "; ".join(" ".join(line.split()) for line in last)
                yield ": ".join(part for part in (ended, words) if part)


def explain_events(events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    telling = [event for event in events if event.get("reason") in TELLING_EVENTS and event.get("type") == "Warning"]
    for event in sorted(telling, key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or ""))[-1:]:
        yield _explain(event)


def _leave_out_gone(events: Iterable[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    names = {as_map(pod.get("metadata")).get("name") for pod in pods}
    objects = [(event, as_map(event.get("involvedObject"))) for event in events]
    return [event for event, item in objects if item.get("kind") != "Pod" or item.get("name") in names]


def is_disrupted(pod: Mapping[str, Any] | None) -> bool:
    """Whether the cluster took the pod away: the pod was evicted or preempted, or its node is gone."""
    return pod is not None and _read_conditions(pod).get(DISRUPTED, {}).get("status") == "True"


def is_running(pod: Mapping[str, Any] | None) -> bool:
    if pod is None or as_map(pod.get("metadata")).get("deletionTimestamp"):
        return False
    return as_map(pod.get("status")).get("phase") == "Running"


def has_begun(pod: Mapping[str, Any] | None) -> bool:
    return pod is not None and as_map(pod.get("status")).get("phase") in {"Running", "Succeeded", "Failed"}


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether the pod's containers run; they may need another moment before they answer."""
    states = [as_map(item).get("state") for item in as_list(as_map(pod.get("status")).get("containerStatuses"))]
    return is_running(pod) and all("running" in as_map(state) for state in states)


def role_of(pod: Mapping[str, Any]) -> str:
    """Return a pod's role by its label; in a Job, whose pods have equal labels, the pod with index 0 leads."""
    metadata = as_map(pod.get("metadata"))
    role = str(as_map(metadata.get("labels")).get(ROLE, ""))
    return LEADER if role == AGENT and as_map(metadata.get("annotations")).get(INDEX) == "0" else role


def list_images(pods: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return each pod's images with the names and digests that the container runtime reports.

    If the pod names the digest of a list of images, the runtime may report the digest of one image of the list.
    """
    return [
        {
            "pod": str(as_map(pod.get("metadata")).get("name", "")),
            "node": str(as_map(pod.get("spec")).get("nodeName", "")),
            "image": str(as_map(item).get("image", "")),
            "image_id": str(as_map(item).get("imageID", "")),
        }
        for pod in pods
        for item in as_list(as_map(pod.get("status")).get("containerStatuses"))
    ]


def _read_conditions(item: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    conditions = map(as_map, as_list(as_map(item.get("status")).get("conditions")))
    return {str(condition.get("type")): condition for condition in conditions}


def _explain(item: Mapping[str, Any]) -> str:
    """Put a reason into plain words, as in: ``the image cannot be pulled (ErrImagePull: manifest unknown)``."""
    reason, message = str(item.get("reason", "")), " ".join(str(item.get("message", "")).split())
    words = WORDS.get(reason, "")
    detail = ": ".join(part for part in (reason, message) if part)
    return f"{words} ({detail})" if words and detail else words or detail
