"""Render a plan as Kubernetes objects: an Indexed Job, what it needs, the site's additions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.clusters.k8s.naming import (
    ID,
    kubernetes_settings,
    load_base,
    make_labels,
    make_name,
    uses_compute_domain,
)
from rlk_repro.clusters.k8s.nodes import Object, find_node_problems
from rlk_repro.clusters.k8s.pods import CHANNEL, find_pod_problems, make_pod
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import KubernetesSettings
from rlk_repro.spec.kubernetes import Overlay

QUEUE: Final = "kueue.x-k8s.io/queue-name"
GANG_SCHEDULERS: Final = ("kai-scheduler", "volcano", "yunikorn", "koord-scheduler", "scheduler-plugins-scheduler")
NO_GANG: Final = "two jobs can each hold half of the nodes that they need, and wait forever"


def render_objects(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> list[Object]:
    """Render the objects, the job first; equal inputs give equal objects.

    Raises:
        SpecError: the job cannot run the plan, or a controller would refuse the objects.
    """
    problems = [*_find_problems(plan, nodes)]
    if problems:
        raise SpecError(*problems)
    objects = [_make_job(plan, run_dir, nodes)]
    if uses_compute_domain(plan):
        domain = _start(plan, run_dir, "computedomain")
        template = domain["spec"]["channel"]["resourceClaimTemplate"]
        template["name"] = f"{make_name(run_dir)}-{CHANNEL}"
        objects.append(domain)
    if kubernetes_settings(plan).network_policy:
        policy = _start(plan, run_dir, "networkpolicy")
        own = {"matchLabels": {ID: make_name(run_dir)}}
        policy["spec"]["podSelector"] = policy["spec"]["ingress"][0]["from"][0]["podSelector"] = own
        objects.append(policy)
    return objects


def dump_objects(objects: Sequence[Object]) -> str:
    import yaml

    # safe_dump would replace repeated values by YAML anchors, which are hard to read
    dumper = type("Dumper", (yaml.CSafeDumper,), {"ignore_aliases": lambda *_: True})
    return str(yaml.dump_all(objects, Dumper=dumper, sort_keys=False, allow_unicode=True, width=110))


def _find_problems(plan: Plan, nodes: Sequence[str]) -> Iterator[Problem]:
    settings, num_nodes = kubernetes_settings(plan), plan.layout.num_nodes
    yield from find_pod_problems(plan)
    yield from find_node_problems(plan, nodes)
    where = f"profile {plan.profile.profile}: kubernetes"
    if num_nodes > 1 and settings.gang == "required" and not has_gang(settings):
        schedulers = " or ".join(GANG_SCHEDULERS)
        yield Problem(
            f"{where}.queue",
            f"missing for a job of {num_nodes} nodes: {NO_GANG}",
            expected=f"a queue of Kueue, or as overlay.pod_spec.schedulerName {schedulers}",
            hint="or set kubernetes.gang: waived",
        )
    pair_min = plan.group_limit_min
    if settings.max_time_min is not None and settings.max_time_min < pair_min:
        yield Problem(f"{where}.max_time_min", "is shorter than the time limit of one pair of trials",
                      got=settings.max_time_min, expected=f"at least {pair_min:g}")  # fmt: skip


def has_gang(settings: KubernetesSettings) -> bool:
    """Whether the profile's queue or scheduler starts all pods of a job together or none."""
    overlay = settings.overlay or Overlay()
    labels, scheduler = overlay.metadata.get("labels"), overlay.pod_spec.get("schedulerName")
    has_queue = isinstance(labels, dict) and QUEUE in labels
    return has_queue or settings.queue is not None or scheduler in GANG_SCHEDULERS


def _make_job(plan: Plan, run_dir: RunDir, nodes: Sequence[str]) -> Object:
    settings = kubernetes_settings(plan)
    overlay = settings.overlay or Overlay()
    job = _start(plan, run_dir, "job")
    if settings.queue is not None:
        job["metadata"]["labels"][QUEUE] = settings.queue
    # of two values the job's own metadata wins, which identifies the job, and the site's spec
    job["metadata"] = _merge(overlay.metadata, job["metadata"])
    spec = job["spec"]
    spec["ttlSecondsAfterFinished"] = settings.ttl_s
    if settings.max_time_min is not None:
        spec["activeDeadlineSeconds"] = math.ceil(settings.max_time_min * 60)
    spec["parallelism"] = spec["completions"] = plan.layout.num_nodes
    spec["backoffLimit"] = settings.restarts * plan.layout.num_nodes  # each lost pod counts against this limit
    pod = make_pod(plan, run_dir, nodes)
    metadata = _merge(overlay.pod_metadata, pod["metadata"])
    spec["template"] = {"metadata": metadata, "spec": _merge(pod["spec"], overlay.pod_spec)}
    return job


def _start(plan: Plan, run_dir: RunDir, kind: str) -> Object:
    name = make_name(run_dir)
    item = load_base(kind)
    namespace = kubernetes_settings(plan).namespace
    item["metadata"] = {"name": name, "namespace": namespace, "labels": make_labels(plan, name)}
    return item


def _merge(first: Any, second: Any) -> Any:
    """Merge maps by key, lists of named items by name; join other lists; else ``second`` wins."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        merged = dict(first)
        for key, item in second.items():
            merged[key] = _merge(merged.get(key), item)
        return merged
    if not (isinstance(first, list) and isinstance(second, list)):
        return second
    items = {_identify(item) or str(number): item for number, item in enumerate(first)}
    for number, item in enumerate(second, start=len(first)):
        key = _identify(item) or str(number)
        items[key] = _merge(items.get(key), item)
    return list(items.values())


def _identify(item: Any) -> str:
    return str(item.get("mountPath") or item.get("name") or "") if isinstance(item, Mapping) else ""
