"""Propose a first profile for a Kubernetes cluster from what its nodes and its namespace say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlk_repro.base.units import count
from rlk_repro.clusters.k8s.check import is_ready, list_taints
from rlk_repro.clusters.k8s.kubectl import Target
from rlk_repro.clusters.k8s.nodes import GPU_RESOURCES, Object, name_node, parse_quantity
from rlk_repro.clusters.profiles import NONE, Ask, Proposal, make_name
from rlk_repro.spec import Hardware

# taints of nodes that are not ready, begin, end or are no workers, and those that every pod of a run tolerates
_AWAY: Final = (
    *("node.kubernetes.io/", "node-role.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "karpenter.sh/"),
    *("ToBeDeletedByClusterAutoscaler", "cloud.google.com/impending-node-termination", "node.cilium.io/"),
)
_TOLERATED: Final = frozenset({"nvidia.com/gpu", "amd.com/gpu", "kubernetes.io/arch"})
# share of a node's CPUs and memory for a pod; the system and daemon sets use the remaining share
USABLE: Final = 0.9


def propose_kubernetes(place: Target, hardware: Mapping[str, Hardware], ask: Ask) -> tuple[Proposal, str]:
    """Raise EnvironmentMissing if no cluster answers."""
    version = place.require_server()
    remarks: list[str] = []
    found = group_nodes(place.get_allowed("nodes") or [], hardware)
    name = _choose("hardware", sorted(found), ask, remarks)
    if not found:
        remarks.append("hardware: no usable node has a known label; see kubernetes.gpu_label")
    values: dict[str, Any] = {
        "schema": 1,
        "profile": make_name(place.context or place.namespace),
        "cluster": "k8s",
        "purpose": f"Namespace {place.namespace} of a Kubernetes {version} cluster.",
    }
    if name is not None:
        values["hardware"] = name
    alike = choose_alike(found.get(name or "", []), remarks)
    values["kubernetes"] = _list_settings(place, alike, ask, remarks)
    origin = f"namespace {place.namespace}, Kubernetes {version}"
    return Proposal(values=values, remarks=remarks), origin


def group_nodes(nodes: Sequence[Any], hardware: Mapping[str, Hardware]) -> dict[str, list[Any]]:
    """Return the usable nodes by hardware; a node whose labels name no hardware, or several, is left out."""
    found: dict[str, list[Any]] = {}
    for node in nodes:
        name = name_node(node["metadata"].get("labels", {}), hardware)
        is_away = any(taint["key"].startswith(_AWAY) for taint in list_taints(node))
        allocatable = node.get("status", {}).get("allocatable", {})
        has_gpus = any(parse_quantity(allocatable.get(key)) for key in GPU_RESOURCES.values())
        if name is not None and has_gpus and is_ready(node) and not is_away:
            found.setdefault(name, []).append(node)
    return found


def choose_alike(nodes: Sequence[Any], remarks: list[str]) -> list[Any]:
    """Return the nodes with the taints of the least tainted one, which the profile tolerates."""
    ordered = sorted(nodes, key=lambda node: len(list_taints(node)))
    chosen = [node for node in ordered if list_taints(node) == list_taints(ordered[0])]
    if num_others := len(nodes) - len(chosen):
        remarks.append(f"tolerations: {count(num_others, 'other node')} with other taints left out")
    return chosen


def _choose(key: str, names: Sequence[str], ask: Ask, remarks: list[str]) -> str | None:
    """Ask which of several names is meant; without an answer none is taken."""
    if len(names) < 2:
        return names[0] if names else None
    answer = ask(f"Which {key}?", [*names, NONE], NONE)
    remarks.append(f"{key}: the cluster has {', '.join(names)}; chosen: {answer}")
    return None if answer == NONE else answer


def _list_settings(place: Target, nodes: Sequence[Any], ask: Ask, remarks: list[str]) -> Object:
    values: Object = {"namespace": place.namespace}
    if place.context:
        values["context"] = place.context
    values |= list_sizes(nodes)
    claims = place.get_allowed("persistentvolumeclaims") or []
    shared = _names(item for item in claims if "ReadWriteMany" in item["spec"].get("accessModes", []))
    usable = shared or _names(claims)
    if claim := _choose("results.claim", usable, ask, remarks):
        values["results"] = {"claim": claim, "path": "/results"}
    elif not usable:
        remarks.append("results: the namespace has no volume claim; make one and name it in results.claim")
    if usable and not shared:
        remarks.append("results: no claim is ReadWriteMany; one that is ReadWriteOnce serves runs of one node")
    queues = _names(place.get_allowed("localqueues.kueue.x-k8s.io") or [])
    if queue := _choose("queue", queues, ask, remarks):
        values["queue"] = queue
    taints = list_taints(nodes[0]) if nodes else []  # all nodes have the same
    if tolerations := [taint for taint in taints if taint["key"] not in _TOLERATED]:
        values["tolerations"] = tolerations
        names = ", ".join(taint["key"] for taint in tolerations)
        remarks.append(f"tolerations: the nodes have taints ({names}); may you use these nodes?")
    return values


def list_sizes(nodes: Sequence[Any]) -> dict[str, str]:
    """Return 90 % of the smallest node's CPU and memory: pods are then Guaranteed and fit on every node."""
    if not nodes:
        return {}
    allocatable = [node["status"]["allocatable"] for node in nodes]
    num_cpus = min(parse_quantity(item["cpu"]) or 0 for item in allocatable)
    memory_bytes = min(parse_quantity(item["memory"]) or 0 for item in allocatable)
    memory_gib = int(memory_bytes * USABLE / 2**30)
    shm_gib = max(1, min(64, memory_gib // 4))
    return {"cpu": str(int(num_cpus * USABLE)), "memory": f"{memory_gib}Gi", "shm": f"{shm_gib}Gi"}


def _names(items: Any) -> list[str]:
    return sorted(str(item["metadata"]["name"]) for item in items)
