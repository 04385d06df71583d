"""Check the network between nodes, and the facts that all nodes of a job must share."""

from __future__ import annotations

from collections.abc import Iterator

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.base.findings import Finding, Level
from rlk_repro.probes.network import OPENS
from rlk_repro.rundir.manifest import ACTIVE, diff_manifests, list_ports


def check_rdma(facts: Facts) -> Iterator[Finding]:
    """Check that an RDMA port is up, and that this process can open the device of an active port."""
    ports = dict(list_ports(facts.mapping("network", "rdma_devices")))
    active = {name.partition(".ports.")[0] for name, port in ports.items() if port.get("state") == ACTIVE}
    if ports and not active:
        found = f"0 of {len(ports)} ports active"
        yield wrong("network.rdma_devices", "at least one active port", found)
    verbs = facts.mapping("network", "rdma_verbs")
    answers = {str(answer) for name, answer in verbs.items() if name in active}
    if answers and OPENS not in answers:
        expected = "a device with an active port that this process can open"
        yield wrong("network.rdma_verbs", expected, "; ".join(sorted(answers)))


def compare_nodes(facts: Facts) -> Iterator[Finding]:
    """Find what would block a comparison of two bundles, between each node and the first (leading) node."""
    first = facts.nodes[0]
    for other in facts.nodes[1:]:
        for item in diff_manifests(first, other):
            if item.level is Level.BLOCKING:
                expected = f"the same as on {first.node}: {item.expected}"
                yield wrong(f"nodes.{other.node}.{item.where}", expected, item.found)
