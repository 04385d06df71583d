"""Render a plan as Kubernetes objects: an Indexed Job, one pod per node, and the objects that it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.clusters.api import SURROUNDINGS_MIN
from rlk_repro.clusters.k8s.naming import ID, QUEUE, make_annotations, make_labels, make_name
from rlk_repro.clusters.k8s.nodes import Object, find_node_problems, uses_compute_domain
from rlk_repro.clusters.k8s.overlay import find_gang_problems, overlay_job
from rlk_repro.clusters.k8s.pods import CHANNEL, find_pod_problems, kubernetes_settings, make_pod
from rlk_repro.clusters.k8s.tree import load_base
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir


def render_objects(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> list[Object]:
    """Render the objects, the job first; equal inputs give equal objects.

    Raises:
        SpecError: the job cannot run the plan, or a controller would refuse the objects.
    """
    problems = [*_find_problems(plan, nodes)]
    if problems:
        raise SpecError(*problems)
    settings = kubernetes_settings(plan)
    objects = [overlay_job(_make_job(plan, run_dir, nodes), settings)]
    if uses_compute_domain(plan, settings):
        objects.append(_make_compute_domain(plan, run_dir))
    if settings.network_policy:
        objects.append(_make_network_policy(plan, run_dir))
    return objects


def dump_objects(objects: Sequence[Object]) -> str:
    import yaml

    # safe_dump would replace repeated values by YAML anchors, which are hard to read
    dumper = type("Dumper", (yaml.CSafeDumper,), {"ignore_aliases": lambda *_: True})
    return str(yaml.dump_all(objects, Dumper=dumper, sort_keys=False, allow_unicode=True, width=110))


def time_limit_min(plan: Plan) -> int:
    """Return the job's limit in minutes: all trials and the work around them, at most the profile's limit."""
    needed_min = plan.all_limits_min + SURROUNDINGS_MIN
    limit = kubernetes_settings(plan).max_time_min
    return math.ceil(needed_min if limit is None else min(needed_min, limit))


def _find_problems(plan: Plan, nodes: Sequence[str]) -> Iterator[Problem]:
    settings = kubernetes_settings(plan)
    yield from find_pod_problems(plan)
    yield from find_node_problems(plan, settings, nodes)
    yield from find_gang_problems(plan, settings)
    where = f"profile {plan.profile.profile}: kubernetes"
    pair_min = plan.group_limit_min
    if settings.max_time_min is not None and settings.max_time_min < pair_min:
        yield Problem(f"{where}.max_time_min", "is shorter than the time limit of one pair of trials",
                      got=settings.max_time_min, expected=f"at least {pair_min:g}")  # fmt: skip


def _make_job(plan: Plan, run_dir: RunDir, nodes: Sequence[str]) -> Object:
    settings = kubernetes_settings(plan)
    job = _start(plan, run_dir, "job")
    if settings.queue is not None:
        job["metadata"]["labels"][QUEUE] = settings.queue
    spec = job["spec"]
    spec["ttlSecondsAfterFinished"] = settings.ttl_s
    if settings.max_time_min is not None:
        spec["activeDeadlineSeconds"] = math.ceil(settings.max_time_min * 60)
    spec["parallelism"] = spec["completions"] = plan.layout.num_nodes
    spec["backoffLimit"] = settings.restarts * plan.layout.num_nodes  # each lost pod counts against this limit
    spec["template"] = make_pod(plan, run_dir, nodes)
    return job


def _start(plan: Plan, run_dir: RunDir, kind: str) -> Object:
    name = make_name(run_dir)
    item = load_base(kind)
    item["metadata"] = {
        "name": name,
        "namespace": kubernetes_settings(plan).namespace,
        "labels": make_labels(plan, name),
        "annotations": make_annotations(plan, run_dir),
    }
    return item


def _make_compute_domain(plan: Plan, run_dir: RunDir) -> Object:
    domain = _start(plan, run_dir, "computedomain")
    domain["spec"]["channel"]["resourceClaimTemplate"]["name"] = f"{make_name(run_dir)}-{CHANNEL}"
    return domain


def _make_network_policy(plan: Plan, run_dir: RunDir) -> Object:
    policy = _start(plan, run_dir, "networkpolicy")
    own = {ID: make_name(run_dir)}
    policy["spec"]["podSelector"]["matchLabels"] = own
    policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"] = own
    return policy
