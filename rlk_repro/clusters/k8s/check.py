"""Check a profile for Kubernetes: the server's dry run of the job, and how many nodes can take one of its pods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rlk_repro.base.errors import EnvironmentMissing, SchedulerRefused
from rlk_repro.base.findings import Finding, Level, sort_findings
from rlk_repro.base.units import count
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable, quote_words
from rlk_repro.clusters.k8s.objects import dump_objects, render_objects
from rlk_repro.clusters.k8s.pods import make_pod
from rlk_repro.clusters.k8s.tree import as_list, as_map, parse_quantity
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import KubernetesSettings, Profile

REPELLING = frozenset({"NoSchedule", "NoExecute"})


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    """Check the plan's job; without a plan, only that the cluster answers.

    Raises:
        EnvironmentMissing: no cluster answers.
    """
    settings = profile.kubernetes or KubernetesSettings()
    place = Target(namespace=settings.namespace, context=settings.context or "")
    place.require_server()
    if plan is None:
        return [Finding(Level.INFO, "run", "the name of a run, to check its job: --run RUN", "not given")]
    run_dir = RunDir(runs_root() / "check")
    done = place.send("apply", dump_objects(render_objects(plan, run_dir)).encode(), "--dry-run=server")
    level, answer = (Level.INFO, "accepted") if done.is_ok else (Level.BLOCKING, quote_words(done))
    pod = make_pod(plan, run_dir)["spec"]
    answered = Finding(level, "kubectl apply --dry-run=server", "accepted", answer)
    return sort_findings([answered, *_check_nodes(place, pod, plan.layout.num_nodes)])


def _check_nodes(place: Target, pod: Mapping[str, Any], num_nodes: int) -> Iterator[Finding]:
    try:
        nodes = place.get("nodes")
    except Unreachable as error:
        raise EnvironmentMissing(*error.problems) from None
    except SchedulerRefused:
        yield Finding(Level.INFO, "nodes", "a list of the nodes", "this user may not list nodes")
        return
    obstacles = Counter(find_obstacle(node, pod) for node in nodes)
    num_fitting = obstacles.pop("", 0)
    if num_fitting < num_nodes:
        reasons = "; ".join(f"{reason} ({count(number, 'node')})" for reason, number in obstacles.most_common())
        found = f"{num_fitting} of {len(nodes)}"
        yield Finding(Level.BLOCKING, "nodes", f"{num_nodes} that fit", f"{found}: {reasons}" if reasons else found)


def find_obstacle(node: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
    """Return why a node cannot take a pod, or an empty text; what other pods use now does not count."""
    spec, status = as_map(node.get("spec")), as_map(node.get("status"))
    labels = as_map(as_map(node.get("metadata")).get("labels"))
    if not is_ready(node):
        return "not ready"
    for taint in map(as_map, as_list(spec.get("taints"))):
        if taint.get("effect") in REPELLING and not any(_tolerates(item, taint) for item in pod.get("tolerations", ())):
            return f"taint {taint.get('key')}"
    if not has_labels(labels, pod):
        return "other labels"
    for key, wanted in as_map(pod["containers"][0].get("resources")).get("requests", {}).items():
        need, there = parse_quantity(str(wanted)), parse_quantity(as_map(status.get("allocatable")).get(key))
        if need is not None and need > (there or 0):
            return f"{key}: {there or 0} of {wanted}"
    return ""


def is_ready(node: Mapping[str, Any]) -> bool:
    conditions = {item["type"]: item["status"] for item in as_list(as_map(node.get("status")).get("conditions"))}
    return conditions.get("Ready", "True") == "True" and not as_map(node.get("spec")).get("unschedulable")


def has_labels(labels: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    affinity = as_map(as_map(pod.get("affinity")).get("nodeAffinity"))
    required = as_map(affinity.get("requiredDuringSchedulingIgnoredDuringExecution"))
    terms = as_list(required.get("nodeSelectorTerms"))
    is_chosen = all(labels.get(key) == value for key, value in as_map(pod.get("nodeSelector")).items())
    return is_chosen and (not terms or any(_matches(labels, term) for term in terms))


def _matches(labels: Mapping[str, Any], term: Mapping[str, Any]) -> bool:
    """Operators other than ``In`` come from the user's overlay only, and are left to the scheduler."""
    rules = as_list(term.get("matchExpressions"))
    return all(labels.get(rule["key"]) in rule["values"] for rule in rules if rule["operator"] == "In")


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    is_same = toleration.get("key") in {None, taint.get("key")}
    is_same = is_same and toleration.get("effect") in {None, taint.get("effect")}
    return is_same and (toleration.get("operator") == "Exists" or toleration.get("value") == taint.get("value"))
