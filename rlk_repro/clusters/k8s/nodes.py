"""Select the nodes that may run a pod: by labels, architecture, taints and other pods on the node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.asking import NOT_WHOLE, find_count_problems
from rlk_repro.clusters.k8s.naming import ID
from rlk_repro.plan import Plan
from rlk_repro.spec import OCI_ARCHITECTURES, Hardware, KubernetesSettings

Object: TypeAlias = "dict[str, Any]"

NVIDIA_PRODUCT: Final = "nvidia.com/gpu.product"
AMD_PRODUCT: Final = "amd.com/gpu.product-name"
ARCH: Final = "kubernetes.io/arch"
CLIQUE: Final = "nvidia.com/gpu.clique"
GPU_RESOURCES: Final = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}


def gpu_resource(plan: Plan, settings: KubernetesSettings) -> str:
    return settings.gpu_resource or GPU_RESOURCES.get(plan.hardware.platform, "")


def list_products(hardware: Hardware, settings: KubernetesSettings) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return label keys and the values that identify the hardware; a node needs to match only one key."""
    if hardware.platform == "cpu":
        return ()
    if settings.gpu_products:
        return ((NVIDIA_PRODUCT if hardware.platform == "cuda" else AMD_PRODUCT, settings.gpu_products),)
    return sorted(hardware.node_labels.items())


def find_node_problems(plan: Plan, settings: KubernetesSettings, nodes: Sequence[str]) -> Iterator[Problem]:
    where = f"profile {plan.profile.profile}: kubernetes"
    named = {f"node_labels[{key}]": values for key, values in settings.node_labels.items() if "product" in key}
    refused = [part.lower() for part in ("MIG", "SHARED", *plan.hardware.refused_name_parts)]
    for key, products in {"gpu_products": settings.gpu_products, **named}.items():
        for product in products:
            if any(part in product.lower() for part in refused):
                yield Problem(f"{where}.{key}", NOT_WHOLE, got=product, expected="whole GPUs")
    resource = gpu_resource(plan, settings)
    if plan.num_gpus and _is_partial(resource):
        yield Problem(f"{where}.gpu_resource", NOT_WHOLE, got=resource, expected="whole GPUs")
    own = GPU_RESOURCES.get(plan.hardware.platform, resource)
    if resource != own and resource in GPU_RESOURCES.values():
        yield Problem(f"{where}.gpu_resource", "is a GPU of another vendor", got=resource, expected=own)
    device = "/rdma" if settings.rdma is None else settings.rdma.resource
    if "/" not in device or device == resource or device.endswith("/gpu") or _is_partial(device):
        what = "is not an RDMA device; pods get IPC_LOCK for RDMA only"
        yield Problem(f"{where}.rdma.resource", what, got=device, expected="an RDMA device, such as rdma/ib")
    if settings.compute_domain and plan.hardware.platform != "cuda":
        yield Problem(f"{where}.compute_domain", "true, but this hardware has no compute domains", expected="false")
    yield from find_count_problems(plan, nodes)


def _is_partial(resource: str) -> bool:
    return "mig-" in resource or resource.endswith(".shared")


def make_affinity(plan: Plan, settings: KubernetesSettings, name: str, nodes: Sequence[str]) -> Object:
    """Return the pod's affinity; every term is required, because results from other nodes are not comparable."""
    affinity: Object = {}
    terms = make_node_terms(plan, settings, nodes)
    if terms:
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    if uses_compute_domain(plan, settings):
        same_rack = {"labelSelector": {"matchLabels": {ID: name}}, "topologyKey": CLIQUE}
        affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [same_rack]}
    return affinity


def make_node_terms(plan: Plan, settings: KubernetesSettings, nodes: Sequence[str]) -> list[Object]:
    """Return the node selector terms: the terms are alternatives, and all expressions of one term must match."""
    common = [_is_in(key, values) for key, values in sorted(settings.node_labels.items())]
    if plan.hardware.machine in OCI_ARCHITECTURES:
        common.insert(0, _is_in(ARCH, [OCI_ARCHITECTURES[plan.hardware.machine]]))
    products = list_products(plan.hardware, settings) if plan.num_gpus else ()
    terms = [[*common, _is_in(key, values)] for key, values in products] or [common]
    if not nodes:
        return [{"matchExpressions": term} for term in terms if term]
    # a nodeSelectorTerm can name only one node
    return [
        {
            **({"matchExpressions": term} if term else {}),
            "matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}],
        }
        for node in nodes
        for term in terms
    ]


def make_tolerations(plan: Plan, settings: KubernetesSettings) -> list[Object]:
    tolerations: list[Object] = []
    if plan.num_gpus:
        key = gpu_resource(plan, settings)
        tolerations.append({"key": key, "operator": "Exists", "effect": "NoSchedule"})
    if plan.hardware.machine == "aarch64":
        tolerations.append({"key": ARCH, "operator": "Equal", "value": "arm64", "effect": "NoSchedule"})
    for item in settings.tolerations:
        value = {"operator": "Exists"} if item.value is None else {"operator": "Equal", "value": item.value}
        tolerations.append({"key": item.key, **value, "effect": item.effect})
    return tolerations


def uses_compute_domain(plan: Plan, settings: KubernetesSettings) -> bool:
    """Whether the job needs a ComputeDomain: within one node, NVLink works without a domain."""
    return settings.compute_domain and plan.layout.num_nodes > 1


def _is_in(key: str, values: Sequence[str]) -> Object:
    return {"key": key, "operator": "In", "values": list(values)}
