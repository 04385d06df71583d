"""Check whether the ranks of a run on several nodes used the fast network of their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rlk_repro.base.files import load_record
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import count
from rlk_repro.plan import Plan
from rlk_repro.rundir.manifest import ACTIVE, Manifest, list_ports
from rlk_repro.rundir.paths import RunDir

SOCKET: Final = "Socket"


def find_fallbacks(plan: Plan, run_dir: RunDir, manifests: Sequence[Manifest]) -> Iterator[Finding]:
    """Yield a finding for each trial in which a rank used TCP although a node has an active port of a fast network."""
    devices = [manifest.sections.get("network", {}).get("rdma_devices") for manifest in manifests]
    num_active = sum(port.get("state") == ACTIVE for found in devices for _, port in list_ports(found))
    if plan.layout.num_nodes == 1 or not num_active:
        return
    for trial in plan.trials:
        files = sorted(run_dir.trial(trial.name).libraries_files().items())
        ranks = [str(rank) for rank, path in files if SOCKET in find_network(load_record(path)).split(", ")]
        if ranks:
            where = f"{trial.name}.libraries.transport"
            expected = f"RDMA over {count(num_active, 'active port')} of the nodes"
            yield Finding(Level.BLOCKING, where, expected, f"{SOCKET}, on rank {', '.join(ranks)}")


def find_network(record: Mapping[str, Any]) -> str:
    transport = record.get("transport")
    network = transport.get("network") if isinstance(transport, dict) else None
    return network if isinstance(network, str) and network != "none" else ""
