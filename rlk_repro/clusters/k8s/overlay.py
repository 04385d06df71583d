"""Add the site's own settings to the rendered objects: scheduler, annotations, devices, claims, host paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.k8s.naming import QUEUE
from rlk_repro.clusters.k8s.nodes import Object
from rlk_repro.images.unpublished import image_remarks
from rlk_repro.plan import Plan
from rlk_repro.spec import KubernetesSettings
from rlk_repro.spec.values import list_leaves

GANG_SCHEDULERS: Final = ("kai-scheduler", "volcano", "yunikorn", "koord-scheduler", "scheduler-plugins-scheduler")
NO_GANG: Final = "two jobs can each hold half of the nodes that they need, and wait forever"


def overlay_job(job: Object, settings: KubernetesSettings) -> Object:
    """Add the site's labels and annotations to the job; the job's own values have priority: they identify it."""
    metadata = {"metadata": _merge(settings.overlay.metadata, job["metadata"])} if settings.overlay else {}
    return {**job, **metadata}


def overlay_pod(pod: Object, settings: KubernetesSettings) -> Object:
    """Add the site's values to a pod template; if both set a key, the template's metadata and the site's spec win."""
    if settings.overlay is None:
        return pod
    metadata, spec = settings.overlay.pod_metadata, settings.overlay.pod_spec
    return {**pod, "metadata": _merge(metadata, pod["metadata"]), "spec": _merge(pod["spec"], spec)}


def find_gang_problems(plan: Plan, settings: KubernetesSettings) -> Iterator[Problem]:
    """Yield a problem if the pods of a multi-node job may start one by one and the profile does not allow that."""
    num_nodes = plan.layout.num_nodes
    if num_nodes > 1 and settings.gang == "required" and not has_gang(settings):
        yield Problem(
            f"profile {plan.profile.profile}: kubernetes.queue",
            f"missing for a job of {num_nodes} nodes: {NO_GANG}",
            expected=f"a queue of Kueue, or schedulerName {' or '.join(GANG_SCHEDULERS)} in overlay.pod_spec",
            hint="or set kubernetes.gang: waived",
        )


def has_gang(settings: KubernetesSettings) -> bool:
    """Whether the profile's queue or scheduler starts either all pods of a job together or no pod."""
    overlay = settings.overlay
    if settings.queue is not None or overlay is None:
        return settings.queue is not None
    labels = overlay.metadata.get("labels")
    has_queue = isinstance(labels, dict) and QUEUE in labels
    return has_queue or overlay.pod_spec.get("schedulerName") in GANG_SCHEDULERS


def find_remarks(plan: Plan, settings: KubernetesSettings) -> Iterator[str]:
    num_nodes, overlay = plan.layout.num_nodes, settings.overlay
    yield from image_remarks(plan)
    if num_nodes > 1 and not has_gang(settings):
        yield f"{num_nodes} nodes, and gang scheduling is waived: {NO_GANG}"
    if overlay is not None:
        paths = [".".join(path) for path in list_leaves(overlay.model_dump()) if path[1:]]
        yield f"the profile's overlay is merged unchanged and not checked: {', '.join(paths)}"


def _merge(first: Any, second: Any) -> Any:
    """Merge maps by key and lists of named items by name; join other lists; take any other value from ``second``."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return {**first, **{key: _merge(first[key], item) if key in first else item for key, item in second.items()}}
    if not (isinstance(first, list) and isinstance(second, list)):
        return second
    merged = {_identify(item) or str(number): item for number, item in enumerate(first)}
    for number, item in enumerate(second, start=len(first)):
        key = _identify(item) or str(number)
        merged[key] = _merge(merged[key], item) if key in merged else item
    return list(merged.values())


def _identify(item: Any) -> str:
    return str(item.get("mountPath") or item.get("name") or "") if isinstance(item, Mapping) else ""
