"""Derive a job's state from the conditions of the job and its pods; the reason quotes the cluster's own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rlk_repro.clusters.api import JobState

Object: TypeAlias = "Mapping[str, Any]"

INDEX: Final = "batch.kubernetes.io/job-completion-index"
# conditions of a Job; the first one with status True decides
CONDITIONS: Final[Mapping[str, JobState]] = {
    "Failed": JobState.FAILED,
    "FailureTarget": JobState.RUNNING,  # the job has failed, but its pods still end
    "Complete": JobState.DONE,
}
SUSPENDED: Final = "held back by its queue, or suspended by hand"
SCALING: Final = frozenset({"FailedScaleUp", "NotTriggerScaleUp"})
# events that are no warning and still say why a job waits
TELLING: Final = SCALING | {"TriggeredScaleUp", "Pulling", "Pending"}
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
        newest[pod["metadata"].get("annotations", {}).get(INDEX, "0")] = pod
    leader = newest.get("0")
    state, reasons = _judge_conditions(job)
    # the leading pod does not run yet, or a new pod will replace the evicted leading pod
    if state is JobState.RUNNING and (not has_begun(leader) or is_disrupted(leader)):
        state = JobState.PENDING
    if state is not JobState.DONE:
        told = [word for pod in newest.values() for word in explain_pod(pod)]
        # where the pods say why they wait, only an autoscaler's event says more; events of gone pods say nothing
        names = {pod["metadata"]["name"] for pod in pods}
        events = []
        for item in warnings:
            subject = item["involvedObject"]
            is_gone = subject.get("kind") == "Pod" and subject["name"] not in names
            if not is_gone and (not told or item["reason"] in SCALING):
                events.append(item)
        reasons += told
        if events:
            reasons.append(_quote(max(events, key=_when)))
    nodes = sorted(pod["spec"]["nodeName"] for pod in newest.values() if is_running(pod))
    reason = "; ".join(dict.fromkeys(word for word in reasons if word))
    return Judged(state=state, reason=reason, leader=leader, nodes=tuple(nodes))


def explain_pod(pod: Object) -> list[str]:
    """Say why a pod does not run, or how it ended."""
    status, conditions = pod.get("status", {}), _read_conditions(pod)
    found = [_quote(conditions["DisruptionTarget"] if is_disrupted(pod) else status)]
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        found.append(_quote(scheduled))
    for state in _list_states(pod):
        waiting, ended = state.get("waiting", {}), state.get("terminated", {})
        if waiting.get("reason") not in _USUAL:
            found.append(_quote(waiting))
        if ended.get("exitCode"):
            reason = "" if ended.get("reason") in _USUAL else f" ({ended.get('reason')})"
            found.append(f"{pod['metadata']['name']} ended with code {ended['exitCode']}{reason}")
    return [words for words in found if words]


def read_message(pod: Object) -> str:
    """Return what the agent's container, the last one, left in its termination log."""
    message = ""
    for state in _list_states(pod):
        message = str(state.get("terminated", {}).get("message", ""))
    return message


def is_disrupted(pod: Object | None) -> bool:
    """Whether the cluster took the pod away: the pod was evicted or preempted, or its node is gone."""
    return pod is not None and _read_conditions(pod).get("DisruptionTarget", {}).get("status") == "True"


def is_running(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod.get("status", {}).get("phase") == "Running"


def has_begun(pod: Object | None) -> bool:
    return pod is not None and pod.get("status", {}).get("phase") in {"Running", "Succeeded", "Failed"}


def _judge_conditions(job: Object) -> tuple[JobState, list[str]]:
    found = _read_conditions(job)
    for name, state in CONDITIONS.items():
        if found.get(name, {}).get("status") == "True":
            return state, [_quote(found[name])]
    if job.get("spec", {}).get("suspend"):
        return JobState.PENDING, [SUSPENDED]
    return JobState.RUNNING, []


def _age(pod: Object) -> tuple[str, bool]:
    """Return a sort key, oldest first: times are whole seconds, so at equal times a pod that ended is older."""
    is_over = pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}
    return pod["metadata"].get("creationTimestamp", ""), not is_over


def _when(event: Object) -> str:
    last = event.get("series", {}).get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(last or "")


def _list_states(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    containers = (*status.get("initContainerStatuses", []), *status.get("containerStatuses", []))
    return [item.get("state", {}) for item in containers]


def _read_conditions(item: Object) -> dict[str, Object]:
    return {condition["type"]: condition for condition in item.get("status", {}).get("conditions", [])}


def _quote(item: Object) -> str:
    words = (item.get("reason", ""), " ".join(item.get("message", "").split()))
    return ": ".join(word for word in words if word)
