"""Check the network between nodes, and the facts that all nodes of a job must share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rlk_repro.agent.preflight.base import Check, Complaint, Scope, Situation, find_level
from rlk_repro.agent.preflight.host import FOLDER
from rlk_repro.base.findings import Finding, Level
from rlk_repro.probes import gpu_nvidia, network
from rlk_repro.probes.network import ACTIVE, OPENS
from rlk_repro.rundir.manifest import Manifest, Unknown, diff_manifests
from rlk_repro.spec import Preflight

# Ray's fixed ports are lower than this port
FIRST_FREE_PORT: Final = 9000
NO_CLUSTER: Final = "00000000-0000-0000-0000-000000000000"
PEER_MODULES: Final = ("nvidia_peermem", "nv_peer_mem")


def check_rdma_active(situation: Situation) -> Iterator[Complaint]:
    """Check that an RDMA adapter is up; otherwise NCCL would use the management network."""
    ports = dict(list_ports(situation))
    if ports and not any(port.get("state") == ACTIVE for port in ports.values()):
        yield Complaint("network.rdma_devices", "at least one active port", f"0 of {len(ports)} ports active")


def check_rdma_opens(situation: Situation) -> Iterator[Complaint]:
    """Check that this process can open an RDMA device with an active port; otherwise NCCL silently uses TCP."""
    verbs = situation.mapping("network", "rdma_verbs")
    active = {name.partition(".ports.")[0] for name, port in list_ports(situation) if port.get("state") == ACTIVE}
    answers = {name: str(answer) for name, answer in verbs.items() if name in active}
    if answers and OPENS not in answers.values():
        yield Complaint("network.rdma_verbs", "a device with an active port that this process can open",
                        "; ".join(sorted(set(answers.values()))))  # fmt: skip


def check_rdma_ports(situation: Situation) -> Iterator[Complaint]:
    """Check that every port is up and that all active ports run at one speed."""
    rates: set[str] = set()
    for name, port in list_ports(situation):
        state, rate = port.get("state"), port.get("rate")
        if isinstance(state, str) and state != ACTIVE:
            yield Complaint(f"network.rdma_devices.{name}.state", ACTIVE, state)
        elif isinstance(rate, str):
            rates.add(rate)
    if len(rates) > 1:
        yield Complaint(
            "network.rdma_devices.ports.rate", "the same rate on all active ports", ", ".join(sorted(rates))
        )


def list_ports(situation: Situation) -> Iterator[tuple[str, dict[str, Any]]]:
    return network.list_ports(situation.mapping("network", "rdma_devices"))


def check_gpudirect(situation: Situation) -> Iterator[Complaint]:
    """Check GPUDirect: it needs nvidia_peermem, or dma-buf with NVIDIA's open kernel module."""
    kernel_module = situation.fact("gpu", "kernel_module")
    modules = situation.mapping("network", "modules")
    is_nvidia = situation.fact("gpu", "vendor") == gpu_nvidia.VENDOR
    if not is_nvidia or not isinstance(kernel_module, str) or not dict(list_ports(situation)):
        return
    if "Open Kernel Module" not in kernel_module and all(modules.get(name) == "absent" for name in PEER_MODULES):
        expected = "nvidia_peermem or NVIDIA's open kernel module"
        yield Complaint("network.modules.nvidia_peermem", expected, "neither")


def check_ephemeral_ports(situation: Situation) -> Iterator[Complaint]:
    """Check that the range of the kernel's ephemeral ports does not include Ray's fixed ports."""
    ports = situation.fact("network", "ephemeral_ports")
    first = ports.partition("-")[0] if isinstance(ports, str) else ""
    if first.isdigit() and int(first) < FIRST_FREE_PORT:
        yield Complaint("network.ephemeral_ports", f"first port {FIRST_FREE_PORT} or higher", str(ports))


def compare_nodes(manifests: Sequence[Manifest], limits: Preflight) -> list[Finding]:
    """Find the facts that all nodes of a job must share and that differ between a node and the first (leading) node."""
    found = [finding for other in manifests[1:] for finding in _compare(manifests[0], other, limits)]
    return [*found, *_check_imex(manifests, limits)]


def _compare(first: Manifest, other: Manifest, limits: Preflight) -> Iterator[Finding]:
    where = f"nodes.{other.node}"
    for item in diff_manifests(first, other):
        if item.level is Level.BLOCKING:
            level = find_level("nodes_alike", limits)
            yield Finding(level, f"{where}.{item.where}", f"the same as on {first.node}: {item.expected}", item.found)
    ours, theirs = find_domain(first), find_domain(other)
    if ours and theirs and ours != theirs and _has_channels(first) and _has_channels(other):
        yield Finding(find_level("nvlink_domain", limits), f"{where}.gpu.fabric", ours, theirs)
    skews = [manifest.sections.get(FOLDER, {}).get("clock_skew_s") for manifest in (first, other)]
    known = [float(skew) for skew in skews if isinstance(skew, int | float)]
    if len(known) == 2 and abs(known[1] - known[0]) > limits.max_clock_skew_s:
        found = f"a difference of {known[0] - known[1]:+.1f} s"
        yield Finding(find_level("clock_skew", limits), f"{where}.clock", f"the same time as on {first.node}", found)


def _check_imex(manifests: Sequence[Manifest], limits: Preflight) -> Iterator[Finding]:
    """A node of an NVLink domain needs an IMEX channel to reach the memory of the other nodes."""
    domains = Counter(filter(None, map(find_domain, manifests)))
    for manifest in manifests:
        domain = find_domain(manifest)
        if domain is not None and domains[domain] > 1 and not _has_channels(manifest):
            found = str(manifest.sections["gpu"].get("imex_channels", Unknown("not recorded")))
            where = f"nodes.{manifest.node}.gpu.imex_channels"
            yield Finding(find_level("imex", limits), where, "an IMEX channel for this job", found)


def find_domain(manifest: Manifest) -> str | None:
    """Return a node's NVLink domain (cluster and clique); None if the cluster id is zero (no domain) or unknown."""
    fabric = manifest.sections.get("gpu", {}).get("fabric")
    known = fabric if isinstance(fabric, dict) else {}
    cluster, clique = known.get("cluster_uuid"), known.get("clique_id")
    is_known = isinstance(cluster, str) and cluster != NO_CLUSTER and isinstance(clique, int | str)
    return f"{cluster}.{clique}" if is_known else None


def _has_channels(manifest: Manifest) -> bool:
    return isinstance(manifest.sections.get("gpu", {}).get("imex_channels"), int)


CHECKS: Final = (
    Check(name="rdma_active", scope=Scope.NODES, policy="fail", judge=check_rdma_active),
    Check(name="rdma_opens", scope=Scope.NODES, policy="fail", judge=check_rdma_opens),
    Check(name="rdma_ports", scope=Scope.NODES, policy="warn", judge=check_rdma_ports),
    Check(name="gpudirect_rdma", scope=Scope.NODES, policy="warn", judge=check_gpudirect),
    Check(name="ephemeral_ports", scope=Scope.NODES, policy="warn", judge=check_ephemeral_ports),
)
