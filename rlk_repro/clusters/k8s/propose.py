"""Propose a first profile for a Kubernetes cluster from what its nodes and its namespace say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlk_repro.base.errors import EnvironmentMissing, SchedulerRefused
from rlk_repro.clusters.k8s.check import REPELLING, is_ready
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable
from rlk_repro.clusters.k8s.nodes import CLIQUE
from rlk_repro.clusters.k8s.sent import COMPUTE_DOMAINS
from rlk_repro.clusters.k8s.tree import as_list, as_map, parse_quantity
from rlk_repro.clusters.profiles import Ask, Proposal, make_name
from rlk_repro.spec import Hardware

QUEUES: Final = "localqueues.kueue.x-k8s.io"
SECURITY_LABEL: Final = "pod-security.kubernetes.io/enforce"
# taints that Kubernetes itself sets on nodes that are not ready, and those that every pod of a run tolerates
_OWN_TAINTS: Final = "node.kubernetes.io/"
_TOLERATED: Final = frozenset({"nvidia.com/gpu", "amd.com/gpu", "kubernetes.io/arch"})
# share of a node's CPUs and memory for a pod; the system and daemon sets use the remaining share
USABLE: Final = 0.9


def propose_kubernetes(place: Target, hardware: Mapping[str, Hardware], ask: Ask) -> tuple[Proposal, str]:
    """Raise EnvironmentMissing if no cluster answers."""
    version = place.require_server()
    remarks: list[str] = []
    found = group_nodes(_ask(place, "nodes"), hardware)
    ordered = sorted(found, key=lambda name: len(found[name]), reverse=True)
    name = ordered[0] if ordered else None
    if len(ordered) > 1:
        name = ask("Which hardware?", ordered, ordered[0])
    if name is None:
        remarks.append("hardware: no usable node has a known product label; set hardware, or kubernetes.gpu_products")
    values: dict[str, Any] = {
        "schema": 1,
        "profile": make_name(place.context or place.namespace),
        "cluster": "k8s",
        "purpose": f"Namespace {place.namespace} of a Kubernetes {version} cluster.",
        "hardware": name,
        "kubernetes": _list_settings(place, found.get(name or "", []), ask, remarks),
    }
    origin = f"namespace {place.namespace}, Kubernetes {version}"
    return Proposal(values={key: value for key, value in values.items() if value is not None}, remarks=remarks), origin


def group_nodes(nodes: Sequence[Any], hardware: Mapping[str, Hardware]) -> dict[str, list[Any]]:
    """Return the usable nodes by hardware; a node whose labels name no hardware, or several, is left out."""
    found: dict[str, list[Any]] = {}
    for node in nodes:
        labels = as_map(as_map(node.get("metadata")).get("labels"))
        names = [
            name
            for name, model in hardware.items()
            if any(labels.get(key) in values for key, values in model.node_labels.items())
        ]
        is_away = any(taint["key"].startswith(_OWN_TAINTS) for taint in list_taints(node))
        if len(names) == 1 and is_ready(node) and not is_away:
            found.setdefault(names[0], []).append(node)
    return found


def list_taints(node: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the taints that keep pods away, as tolerations of a profile."""
    taints = [as_map(taint) for taint in as_list(as_map(node.get("spec")).get("taints"))]
    return [
        {key: str(taint[key]) for key in ("key", "value", "effect") if taint.get(key)}
        for taint in taints
        if taint.get("effect") in REPELLING
    ]


def _list_settings(place: Target, nodes: Sequence[Any], ask: Ask, remarks: list[str]) -> dict[str, Any]:
    resources = place.run("api-resources", "--output=name").stdout.split()
    values: dict[str, Any] = {"namespace": place.namespace}
    if place.context:
        values["context"] = place.context
    values |= list_sizes(nodes)
    claims = _ask(place, "persistentvolumeclaims")
    shared = _names(item for item in claims if _is_shared(item))
    usable = shared or _names(claims)
    if usable:
        values["results"] = {"claim": ask("Where do results go?", usable, usable[0]), "path": "/results"}
    else:
        remarks.append("results: the namespace has no volume claim; make one and name it in results.claim")
    if usable and not shared:
        remarks.append("results: no claim is ReadWriteMany; one that is ReadWriteOnce serves runs of one node")
    queues = _names(_ask(place, QUEUES)) if QUEUES in resources else []
    if queues:
        values["queue"] = ask("Which queue?", queues, queues[0])
    elif shared:
        remarks.append("queue: the namespace has no queue; a run of several nodes needs a queue, a gang scheduler in "
                       "overlay.pod_spec.schedulerName, or gang: waived")  # fmt: skip
    (namespace,) = _ask(place, "namespace", place.namespace) or [{}]
    if as_map(as_map(namespace.get("metadata")).get("labels")).get(SECURITY_LABEL) == "restricted":
        values["run_as"] = {"user": 1000, "group": 1000}
        remarks.append("run_as: the namespace is restricted; the image must work as a user other than root")
    if COMPUTE_DOMAINS in resources and any(CLIQUE in as_map(node["metadata"].get("labels")) for node in nodes):
        values["compute_domain"] = True
    taints = [taint for node in nodes for taint in list_taints(node) if taint["key"] not in _TOLERATED]
    if tolerations := [taint for number, taint in enumerate(taints) if taint not in taints[:number]]:
        values["tolerations"] = tolerations
        names = ", ".join(dict.fromkeys(taint["key"] for taint in tolerations))
        remarks.append(f"tolerations: the nodes have taints ({names}); may you use these nodes?")
    return values


def list_sizes(nodes: Sequence[Any]) -> dict[str, str]:
    """Return 90 % of the smallest node's CPU and memory: pods are then Guaranteed and fit on every node."""
    allocatable = [as_map(as_map(node.get("status")).get("allocatable")) for node in nodes]
    cpus = [parse_quantity(item.get("cpu")) for item in allocatable]
    memories = [parse_quantity(item.get("memory")) for item in allocatable]
    num_cpus = min((float(value) for value in cpus if value is not None), default=None)
    memory_bytes = min((float(value) for value in memories if value is not None), default=None)
    if num_cpus is None or memory_bytes is None:
        return {}
    memory_gib = int(memory_bytes * USABLE / 2**30)
    shm_gib = max(1, min(64, memory_gib // 4))
    return {"cpu": str(int(num_cpus * USABLE)), "memory": f"{memory_gib}Gi", "shm": f"{shm_gib}Gi"}


def _is_shared(claim: Mapping[str, Any]) -> bool:
    return "ReadWriteMany" in as_list(as_map(claim.get("spec")).get("accessModes"))


def _names(items: Any) -> list[str]:
    return sorted(str(as_map(item.get("metadata")).get("name")) for item in items)


def _ask(place: Target, kinds: str, *words: str) -> list[dict[str, Any]]:
    """Return the objects; none if this user may not list them."""
    try:
        return place.get(kinds, *words)
    except Unreachable as error:
        raise EnvironmentMissing(*error.problems) from None
    except SchedulerRefused:
        return []
