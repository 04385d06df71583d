"""Select the nodes that may run a pod: by labels, architecture, taints and other pods on the node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.asking import NOT_WHOLE, find_count_problems
from rlk_repro.clusters.k8s.naming import ID, kubernetes_settings, uses_compute_domain
from rlk_repro.clusters.profiles import name_gpus
from rlk_repro.plan import Plan
from rlk_repro.spec import OCI_ARCHITECTURES, Hardware

Object: TypeAlias = "dict[str, Any]"

PRODUCTS: Final = {"cuda": "nvidia.com/gpu.product", "rocm": "amd.com/gpu.product-name"}
GPU_RESOURCES: Final = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
MEMORY_LABELS_GIB: Final = {
    "nvidia.com/gpu.memory": 2.0**-10,
    "eks.amazonaws.com/instance-gpu-memory": 2.0**-10,
    "karpenter.k8s.aws/instance-gpu-memory": 2.0**-10,
    "gpu.nvidia.com/vram": 1.0,
}
"""Labels of a GPU's memory, and their units."""
ARCH: Final = "kubernetes.io/arch"
REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
CLIQUE: Final = "nvidia.com/gpu.clique"
_DECIMAL: Final = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS: Final = {**_DECIMAL, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def parse_quantity(value: object) -> float | None:
    """Read a quantity such as ``64Gi`` as a number; None for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-zA-Z]*)", str(value))
    if found is None or found[2] not in _UNITS:
        return None
    return float(found[1]) * _UNITS[found[2]]


def gpu_resource(plan: Plan) -> str:
    return kubernetes_settings(plan).gpu_resource or GPU_RESOURCES.get(plan.hardware.platform, "")


def name_node(labels: Mapping[str, str], hardware: Mapping[str, Hardware]) -> str | None:
    """Return the one hardware that has one of a node's labels.

    None if another label of hardware files names other GPUs, a slice, a share or a refused variant,
    or a label says another memory.
    """
    named: set[str | None] = set()
    keys: set[str] = set()
    for name, model in hardware.items():
        keys |= model.node_labels.keys()
        if any(labels.get(key) in values for key, values in model.node_labels.items()):
            named.add(name)
    if named:
        named |= name_gpus([labels[key] for key in keys & labels.keys()], hardware)
    if len(named) != 1 or None in named:
        return None
    name = str(named.pop())
    return None if _has_other_memory(labels, hardware[name]) else name


def _has_other_memory(labels: Mapping[str, str], model: Hardware) -> bool:
    for key, unit_gib in MEMORY_LABELS_GIB.items():
        size_gib = (parse_quantity(labels.get(key)) or 0) * unit_gib
        if size_gib and abs(size_gib - model.gpu_memory_gib) > 0.1 * model.gpu_memory_gib:
            return True
    return False


def find_node_problems(plan: Plan, nodes: Sequence[str]) -> Iterator[Problem]:
    settings, where = kubernetes_settings(plan), f"profile {plan.profile.profile}: kubernetes"
    words = {"gpu_products": settings.gpu_products}
    for key, values in settings.node_labels.items():
        if "product" in key:
            words[f"node_labels[{key}]"] = values
    for key, products in words.items():
        for product in products:
            if None in name_gpus([product], {plan.hardware.hardware: plan.hardware}):
                yield Problem(f"{where}.{key}", NOT_WHOLE, got=product, expected="whole GPUs")
    if settings.gpu_label and not settings.gpu_products:
        expected = f"values of the label {settings.gpu_label}"
        yield Problem(f"{where}.gpu_products", "missing", expected=expected)
    resource = gpu_resource(plan)
    if plan.num_gpus and ("mig-" in resource or resource.endswith(".shared")):
        yield Problem(f"{where}.gpu_resource", NOT_WHOLE, got=resource, expected="whole GPUs")
    yield from find_count_problems(plan, nodes)


def make_affinity(plan: Plan, name: str, nodes: Sequence[str]) -> Object:
    """Return the pod's affinity; every term is required, because results from other nodes are not comparable."""
    affinity: Object = {}
    terms = _make_node_terms(plan, nodes)
    if terms:
        affinity["nodeAffinity"] = {REQUIRED: {"nodeSelectorTerms": terms}}
    if uses_compute_domain(plan):
        same_rack = {"labelSelector": {"matchLabels": {ID: name}}, "topologyKey": CLIQUE}
        affinity["podAffinity"] = {REQUIRED: [same_rack]}
    return affinity


def _make_node_terms(plan: Plan, nodes: Sequence[str]) -> list[Object]:
    """Return the node selector terms: the terms are alternatives, and all expressions of one term must match."""
    labels = kubernetes_settings(plan).node_labels
    common = [_is_in(key, values) for key, values in sorted(labels.items())]
    if plan.hardware.machine in OCI_ARCHITECTURES:
        common.insert(0, _is_in(ARCH, [OCI_ARCHITECTURES[plan.hardware.machine]]))
    terms = [[*common, product] for product in _list_products(plan)] or [common]
    if not nodes:
        return [{"matchExpressions": term} for term in terms if term]
    found: list[Object] = []
    for node in nodes:  # a term can name only one node
        own = [_is_in("metadata.name", [node])]
        found += [{"matchExpressions": term, "matchFields": own} for term in terms]
    return found


def _list_products(plan: Plan) -> list[Object]:
    """Return expressions that identify the hardware; a node needs to match only one of them."""
    settings, platform = kubernetes_settings(plan), plan.hardware.platform
    if platform == "cpu" or not plan.num_gpus:
        return []
    if settings.gpu_products:
        return [_is_in(settings.gpu_label or PRODUCTS[platform], settings.gpu_products)]
    return [_is_in(key, values) for key, values in sorted(plan.hardware.node_labels.items())]


def make_tolerations(plan: Plan) -> list[Object]:
    tolerations: list[Object] = []
    if plan.num_gpus:
        key = gpu_resource(plan)
        tolerations.append({"key": key, "operator": "Exists", "effect": "NoSchedule"})
    if plan.hardware.machine == "aarch64":
        tolerations.append({"key": ARCH, "operator": "Equal", "value": "arm64", "effect": "NoSchedule"})
    for item in kubernetes_settings(plan).tolerations:
        value = {"operator": "Exists"}
        if item.value is not None:
            value = {"operator": "Equal", "value": item.value}
        tolerations.append({"key": item.key, **value, "effect": item.effect})
    return tolerations


def _is_in(key: str, values: Sequence[str]) -> Object:
    return {"key": key, "operator": "In", "values": list(values)}
