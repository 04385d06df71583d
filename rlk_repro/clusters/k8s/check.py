"""Check a profile for Kubernetes: the server's dry run of the job, and how many nodes can take one of its pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlk_repro.base.errors import Problem, SchedulerRefused
from rlk_repro.base.findings import Finding, Level, sort_findings
from rlk_repro.base.units import count
from rlk_repro.clusters.k8s.kubectl import Target, quote_words
from rlk_repro.clusters.k8s.nodes import REQUIRED, Object, parse_quantity
from rlk_repro.clusters.k8s.objects import dump_objects, render_objects
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import KubernetesSettings, Profile

NOT_READY = "not ready"
OTHER_LABELS = "other labels"
REPELLING = frozenset({"NoSchedule", "NoExecute"})


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    """Check the plan's job; without a plan, only that the cluster answers."""
    place = Target.of(profile.kubernetes or KubernetesSettings())
    place.require_server()
    if plan is None:
        return [Finding(Level.INFO, "run", "the name of a run, to check its job: --run RUN", "not given")]
    objects = render_objects(plan, RunDir(runs_root() / "check"))
    done = place.send("apply", dump_objects(objects).encode(), "--dry-run=server")
    level, answer = (Level.INFO, "accepted") if done.is_ok else (Level.BLOCKING, quote_words(done))
    found = [Finding(level, "kubectl apply --dry-run=server", "accepted", answer)]
    nodes, wanted = place.get_allowed("nodes"), plan.layout.num_nodes
    if nodes is None:
        found.append(Finding(Level.INFO, "nodes", "a list of them", "this user may not list nodes"))
        return found
    obstacles = _count_obstacles(nodes, objects[0])
    if obstacles[""] < wanted:
        shown = f"{obstacles['']} of {len(nodes)}: {_describe(obstacles)}"
        found.append(Finding(Level.BLOCKING, "nodes", f"{wanted} that fit", shown))
    return sort_findings(found)


def require_nodes(place: Target, job: Object) -> None:
    """Raise SchedulerRefused if the cluster has nodes of this kind, but none that could ever hold a pod of the job.

    Where no node has the labels, an autoscaler may still add one.
    """
    obstacles = _count_obstacles(place.get_allowed("nodes") or [], job)
    obstacles.pop(OTHER_LABELS, 0)
    if obstacles and not obstacles.keys() & {"", NOT_READY}:
        hint = "rlk-repro profile check shows all nodes; change the profile's sizes or tolerations"
        raise SchedulerRefused(Problem("nodes", f"none can hold a pod of this job: {_describe(obstacles)}", hint=hint))


def _count_obstacles(nodes: Sequence[Object], job: Object) -> Counter[str]:
    """Count the nodes by what keeps a pod of the job away (nothing: an empty text)."""
    return Counter(find_obstacle(node, job["spec"]["template"]["spec"]) for node in nodes)


def _describe(obstacles: Counter[str]) -> str:
    told = [f"{reason} ({count(num, 'node')})" for reason, num in obstacles.most_common() if reason]
    return "; ".join(told) or "no nodes"


def find_obstacle(node: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
    """Return why a node cannot take a pod, or an empty text; what other pods use now does not count."""
    if not is_ready(node):
        return NOT_READY
    if not _has_labels(node["metadata"].get("labels", {}), pod):
        return OTHER_LABELS
    for taint in list_taints(node):
        if not any(_tolerates(item, taint) for item in pod.get("tolerations", ())):
            return f"taint {taint['key']}"
    allocatable = node.get("status", {}).get("allocatable", {})
    for key, wanted in pod["containers"][0].get("resources", {}).get("requests", {}).items():
        there = allocatable.get(key, "0")
        if (parse_quantity(wanted) or 0) > (parse_quantity(there) or 0):
            return f"{key}: {there} of {wanted}"
    return ""


def is_ready(node: Mapping[str, Any]) -> bool:
    conditions = {item["type"]: item["status"] for item in node.get("status", {}).get("conditions", [])}
    return conditions.get("Ready", "True") == "True" and not node.get("spec", {}).get("unschedulable")


def list_taints(node: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the taints that keep pods away, as tolerations of a profile."""
    return [
        {key: str(taint[key]) for key in ("key", "value", "effect") if taint.get(key)}
        for taint in node.get("spec", {}).get("taints", [])
        if taint.get("effect") in REPELLING
    ]


def _has_labels(labels: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    required = pod.get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED, {})
    terms = required.get("nodeSelectorTerms", [])
    if not pod.get("nodeSelector", {}).items() <= labels.items():
        return False
    return not terms or any(_matches(labels, term) for term in terms)


def _matches(labels: Mapping[str, Any], term: Mapping[str, Any]) -> bool:
    """The scheduler judges other operators, which come from the user's overlay only."""
    rules = term.get("matchExpressions", [])
    return all(labels.get(rule["key"]) in rule["values"] for rule in rules if rule["operator"] == "In")


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Judge as Kubernetes does: no key or effect means any, and no value is an empty one."""
    for key in ("key", "effect"):
        if (toleration.get(key) or taint.get(key)) != taint.get(key):
            return False
    is_same = (toleration.get("value") or "") == (taint.get("value") or "")
    return is_same or toleration.get("operator") == "Exists"
