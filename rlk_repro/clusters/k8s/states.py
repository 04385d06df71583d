"""Derive a job's state from the conditions of the job and its pods; the reason quotes the cluster's own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rlk_repro.clusters.api import JobState
from rlk_repro.clusters.k8s.tree import as_list, as_map

Object: TypeAlias = "Mapping[str, Any]"

INDEX: Final = "batch.kubernetes.io/job-completion-index"
# conditions of a Job; the first one with status True decides
CONDITIONS: Final[Mapping[str, JobState]] = {
    "Failed": JobState.FAILED,
    "FailureTarget": JobState.RUNNING,  # the job has failed, but its pods still end
    "Complete": JobState.DONE,
    "Suspended": JobState.PENDING,
}
SUSPENDED: Final = "held back by its queue, or suspended by hand"
# reasons on the way to a running container, and of ends that the exit code explains
_USUAL: Final = frozenset({"ContainersNotReady", "PodInitializing", "ContainerCreating", "Completed", "Error"})


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The state of a job; ``nodes`` are the nodes on which agents run, ``leader`` is the newest leading pod."""

    state: JobState
    reason: str
    leader: Object | None
    nodes: tuple[str, ...]


def judge(job: Object, pods: Sequence[Object], warnings: Sequence[Object] = ()) -> Judged:
    newest: dict[str, Object] = {}  # of each index
    for pod in sorted(pods, key=_age):
        newest[str(as_map(as_map(pod.get("metadata")).get("annotations")).get(INDEX, "0"))] = pod
    leader = newest.get("0")
    state, reasons = _judge_conditions(job)
    # the leading pod does not run yet, or a new pod will replace the evicted leading pod
    if state is JobState.RUNNING and (not has_begun(leader) or is_disrupted(leader)):
        state = JobState.PENDING
    if state is not JobState.DONE:
        told = [word for pod in newest.values() for word in explain_pod(pod)]
        if state is JobState.PENDING and not any(told):
            told = [explain_newest(warnings, pods)]
        reasons += told
    running = [as_map(pod.get("spec")).get("nodeName") for pod in newest.values() if is_running(pod)]
    reason = "; ".join(dict.fromkeys(word for word in reasons if word))
    return Judged(state=state, reason=reason, leader=leader, nodes=tuple(sorted(map(str, running))))


def explain_pod(pod: Object) -> list[str]:
    """Say why a pod does not run, or how it ended."""
    status, conditions = as_map(pod.get("status")), _read_conditions(pod)
    found = [_quote(conditions["DisruptionTarget"] if is_disrupted(pod) else status)]
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        found.append(_quote(scheduled))
    for container in list_containers(pod):
        state = as_map(container.get("state"))
        waiting, ended = as_map(state.get("waiting")), as_map(state.get("terminated"))
        if waiting.get("reason") not in _USUAL:
            found.append(_quote(waiting))
        if ended.get("exitCode"):
            reason = "" if ended.get("reason") in _USUAL else f" ({ended.get('reason')})"
            found.append(f"{as_map(pod.get('metadata')).get('name')} ended with code {ended['exitCode']}{reason}")
    return [words for words in found if words]


def explain_newest(warnings: Sequence[Object], pods: Sequence[Object]) -> str:
    """Quote the newest event, such as a claim that no node can mount; events of pods that are gone say nothing."""
    names = {as_map(pod.get("metadata")).get("name") for pod in pods}
    found: dict[str, Object] = {}
    for item in warnings:
        about = as_map(item.get("involvedObject"))
        if about.get("kind") != "Pod" or about.get("name") in names:
            found[str(item.get("lastTimestamp") or item.get("eventTime") or "")] = item
    return _quote(found[max(found)]) if found else ""


def list_containers(pod: Object) -> list[Object]:
    status = as_map(pod.get("status"))
    found = (*as_list(status.get("initContainerStatuses")), *as_list(status.get("containerStatuses")))
    return [as_map(item) for item in found]


def read_messages(pod: Object) -> list[str]:
    """Return what each container left in its termination log."""
    return [
        str(as_map(as_map(item.get("state")).get("terminated")).get("message", "")) for item in list_containers(pod)
    ]


def is_disrupted(pod: Object | None) -> bool:
    """Whether the cluster took the pod away: the pod was evicted or preempted, or its node is gone."""
    return pod is not None and _read_conditions(pod).get("DisruptionTarget", {}).get("status") == "True"


def is_running(pod: Object | None) -> bool:
    is_going = pod is None or as_map(pod.get("metadata")).get("deletionTimestamp")
    return not is_going and as_map(as_map(pod).get("status")).get("phase") == "Running"


def has_begun(pod: Object | None) -> bool:
    return as_map(as_map(pod).get("status")).get("phase") in {"Running", "Succeeded", "Failed"}


def _judge_conditions(job: Object) -> tuple[JobState, list[str]]:
    found = _read_conditions(job)
    for name, state in CONDITIONS.items():
        if found.get(name, {}).get("status") == "True":
            return state, [SUSPENDED if state is JobState.PENDING else _quote(found[name])]
    return (JobState.PENDING, [SUSPENDED]) if as_map(job.get("spec")).get("suspend") else (JobState.RUNNING, [])


def _age(pod: Object) -> tuple[str, bool]:
    """Return a sort key, oldest first: times are whole seconds, so at equal times a pod that ended is older."""
    is_over = as_map(pod.get("status")).get("phase") in {"Succeeded", "Failed"}
    return str(as_map(pod.get("metadata")).get("creationTimestamp", "")), not is_over


def _read_conditions(item: Object) -> dict[str, Object]:
    conditions = map(as_map, as_list(as_map(item.get("status")).get("conditions")))
    return {str(condition.get("type")): condition for condition in conditions}


def _quote(item: Object) -> str:
    words = (str(item.get("reason", "")), " ".join(str(item.get("message", "")).split()))
    return ": ".join(word for word in words if word)
