"""Render a plan as Kubernetes objects: a Job or a RayJob, and the objects that it needs."""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.clusters.api import SURROUNDINGS_MIN
from rlk_repro.clusters.k8s.base import load_base
from rlk_repro.clusters.k8s.naming import (
    AGENT,
    ID,
    LEADER,
    OVERWRITE_COMMAND,
    QUEUE,
    WORKER,
    make_annotations,
    make_claim_template_name,
    make_labels,
    make_name,
)
from rlk_repro.clusters.k8s.nodes import Object, find_node_problems, uses_compute_domain
from rlk_repro.clusters.k8s.overlay import find_gang_problems, overlay_job
from rlk_repro.clusters.k8s.pods import (
    INPUTS_PATH,
    find_pod_problems,
    kubernetes_settings,
    make_pod,
    pod_command,
    pod_words,
)
from rlk_repro.clusters.k8s.tree import parse_quantity
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import KubernetesSettings
from rlk_repro.spec.site import knows_tokens

DASHBOARD_PORT: Final = 8265
NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
_HEAD_PORTS: Final = (("gcs-server", 6379), ("dashboard", DASHBOARD_PORT), ("client", 10001))
# KubeRay's Helm chart and its plain manifests both set this label on the operator's pods
_OPERATOR: Final = {"app.kubernetes.io/component": "kuberay-operator"}
# Evicted and preempted pods are replaced, as often as backoffLimit says; a pod that failed by itself ends the job.
# Exit code 143 is SIGTERM: a suspended job's pods end with it, perhaps before the job's status shows the suspension.
_REPLACED: Final[Object] = {
    "rules": [
        {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # the schema of Kubernetes 1.28 requires onPodConditions in every rule
        {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0, 143]}, "onPodConditions": []},
    ]
}


def render_objects(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> list[Object]:
    """Render the objects, the job first; equal inputs give equal objects.

    Raises:
        SpecError: this kind of job cannot run the plan, or a controller would refuse the objects.
    """
    problems = [*_find_problems(plan, nodes)]
    if problems:
        raise SpecError(*problems)
    settings = kubernetes_settings(plan)
    objects = [overlay_job(_KINDS[settings.kind](plan, run_dir, nodes), settings)]
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
    if settings.kind == "rayjob" and settings.ray_version is not None and not knows_tokens(settings.ray_version):
        yield Problem(f"{where}.ray_version", "has no authentication by token, so anyone who reaches Ray could run "
        "any code",
                      got=settings.ray_version, expected="2.52.0 or later")  # fmt: skip
    pair_min = plan.group_limit_min
    if settings.max_time_min is not None and settings.max_time_min < pair_min:
        yield Problem(f"{where}.max_time_min", "is shorter than the time limit of one pair of trials",
                      got=settings.max_time_min, expected=f"at least {pair_min:g}")  # fmt: skip


def _find_store_bytes(settings: KubernetesSettings) -> str:
    """Return half of ``/dev/shm`` for Ray's object store; NCCL and vLLM need the other half."""
    return str(int((parse_quantity(settings.shm) or 0) / 2))


def _make_rayjob(plan: Plan, run_dir: RunDir, nodes: Sequence[str]) -> Object:
    settings = kubernetes_settings(plan)
    job = _start_job(plan, run_dir)
    job["metadata"]["annotations"][OVERWRITE_COMMAND] = "true"
    spec = job["spec"]
    spec["entrypoint"] = shlex.join(pod_words(plan, "wait", run_dir))
    _set_limits(plan, spec)
    spec["ttlSecondsAfterFinished"] = 0  # KubeRay frees the GPUs as soon as the job ends
    cluster = spec["rayClusterSpec"]
    if settings.ray_version is not None:
        cluster["rayVersion"] = settings.ray_version
    shares = {"num-gpus": str(plan.layout.gpus_per_node), "object-store-memory": _find_store_bytes(settings)}
    head = cluster["headGroupSpec"]
    head["rayStartParams"] |= shares
    head["template"] = _make_agent(plan, run_dir, LEADER, nodes)
    container = head["template"]["spec"]["containers"][0]
    container["ports"] = [{"name": name, "containerPort": port} for name, port in _HEAD_PORTS]
    num_workers = plan.layout.num_nodes - 1
    if num_workers:
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": num_workers,
                "minReplicas": num_workers,
                "maxReplicas": num_workers,
                "rayStartParams": {"disable-usage-stats": "true", **shares},
                "template": _make_agent(plan, run_dir, WORKER, nodes),
            }
        ]
    return job


def find_restarts(plan: Plan) -> int:
    """Return how many times evicted pods are replaced: 0 if results are on no volume and so are lost with the pod."""
    settings = kubernetes_settings(plan)
    return 0 if settings.results.claim is None else settings.restarts


def _make_job(plan: Plan, run_dir: RunDir, nodes: Sequence[str]) -> Object:
    job = _start_job(plan, run_dir)
    spec = job["spec"]
    _set_limits(plan, spec)
    spec["parallelism"] = spec["completions"] = plan.layout.num_nodes
    if num_restarts := find_restarts(plan):
        spec["backoffLimit"] = num_restarts * plan.layout.num_nodes  # each lost pod counts against this limit
        spec["podFailurePolicy"] = copy.deepcopy(_REPLACED)
    spec["template"] = _make_agent(plan, run_dir, AGENT, nodes)
    return job


_KINDS: Final[Mapping[str, Callable[[Plan, RunDir, Sequence[str]], Object]]] = {
    "rayjob": _make_rayjob,
    "job": _make_job,
}


_VERBS: Final = {LEADER: "lead", WORKER: "follow", AGENT: "take-part"}


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


def _start_job(plan: Plan, run_dir: RunDir) -> Object:
    settings = kubernetes_settings(plan)
    job = _start(plan, run_dir, settings.kind)
    if settings.queue is not None:
        job["metadata"]["labels"][QUEUE] = settings.queue
    return job


def _make_agent(plan: Plan, run_dir: RunDir, role: str, nodes: Sequence[str]) -> Object:
    settings = kubernetes_settings(plan)
    options = [f"--num-nodes={plan.layout.num_nodes}", f"--inputs={INPUTS_PATH}"]
    if settings.kind == "rayjob":
        options.append("--kuberay")
    if role != WORKER and settings.results.claim is None:
        options.append(f"--hold-min={settings.hold_min:g}")
    can_restart = plan.layout.num_nodes > 1 or (settings.kind == "rayjob" and role == LEADER)
    if can_restart and (num_restarts := find_restarts(plan)):
        options.append(f"--restarts={num_restarts}")
    return make_pod(plan, run_dir, role, pod_command(plan, _VERBS[role], run_dir, *options), nodes)


def _set_limits(plan: Plan, spec: Object) -> None:
    settings = kubernetes_settings(plan)
    spec["ttlSecondsAfterFinished"] = settings.ttl_s
    if settings.max_time_min is not None:
        spec["activeDeadlineSeconds"] = math.ceil(settings.max_time_min * 60)


def _make_compute_domain(plan: Plan, run_dir: RunDir) -> Object:
    domain = _start(plan, run_dir, "computedomain")
    domain["spec"]["channel"]["resourceClaimTemplate"]["name"] = make_claim_template_name(make_name(run_dir))
    return domain


def _make_network_policy(plan: Plan, run_dir: RunDir) -> Object:
    settings = kubernetes_settings(plan)
    policy = _start(plan, run_dir, "networkpolicy")
    own = {ID: make_name(run_dir)}
    rules = policy["spec"]["ingress"]
    policy["spec"]["podSelector"]["matchLabels"] = rules[0]["from"][0]["podSelector"]["matchLabels"] = own
    if settings.kind == "rayjob":
        # KubeRay starts the job's entrypoint through the head pod's dashboard
        operator: Object = {"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}}
        if settings.operator_namespace is not None:
            operator = {"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: settings.operator_namespace}}}
        rules.append({"from": [operator], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]})
    return policy
