"""Check what a run needs on its nodes: files, modules, sources, room, network and equal nodes."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.analysis.transport import SOCKET, find_network
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import GIB
from rlk_repro.images.running import find_pinned, load_record, match_pins
from rlk_repro.prepare.contents import check_parts
from rlk_repro.probes.host import read_free_memory
from rlk_repro.probes.installed import serves
from rlk_repro.probes.network import OPENS
from rlk_repro.rundir.manifest import ACTIVE, OTHER_RUNS, Unknown, diff_manifests, list_ports
from rlk_repro.rundir.paths import RolloutDir
from rlk_repro.sources import RL_KERNEL
from rlk_repro.spec import Preflight
from rlk_repro.switches import COMMITS
from rlk_repro.workloads import list_run_folders
from rlk_repro.workloads.checkouts import find_missing_checkouts, find_missing_commits, is_found, try_imports
from rlk_repro.workloads.environment import find_trainer_path

MIN_SHARED_MEMORY_GIB: Final = 1.0
MIN_OPEN_FILES: Final = 8192


def check_writable(facts: Facts) -> Iterator[Finding]:
    trials = facts.run_dir.trials
    try:
        trials.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=trials, prefix=".partial-") as stream:
            stream.write(b"\0")
            stream.flush()
    except OSError as error:
        yield wrong("run directory", "writable", error.strerror)


def check_modules(facts: Facts) -> Iterator[Finding]:
    workload = facts.plan.run.workload
    absent = [name for name in workload.modules if not is_found(name, find_trainer_path(facts.plan))]
    for where, module, folder in find_missing_checkouts(facts.plan):
        yield wrong(where, f"a folder with {module}/", folder)
    for name in absent:
        how = "installed: python -m pip install 'rlk-repro[local]'" if name == "torch" else "installed"
        yield wrong(f"python module {name}", how, "missing")
    if not absent:
        yield from try_imports(facts.plan)


def check_prepared(facts: Facts) -> Iterator[Finding]:
    """Check that this node can read the prepared files that ``submit`` recorded."""
    plan, run_dir = facts.plan, facts.run_dir
    rollouts = [RolloutDir(Path()).file(number).name for number in range(plan.run.measure.num_stored)]
    return check_parts(run_dir.prepared, list_run_folders(plan, run_dir), rollouts)


def check_rl_kernel(facts: Facts) -> Iterator[Finding]:
    """Check that the enabled variant's trainer will find RL-Kernel; this check does not import RL-Kernel."""
    plan = facts.plan
    if not plan.needs_rl_kernel:
        return
    if plan.run.rl_kernel.commits is not None:
        for commit in find_missing_commits(plan):
            yield wrong(f"{COMMITS}/{commit}", f"a folder with {RL_KERNEL.module}/", "missing")
        return
    if is_found(RL_KERNEL.module, find_trainer_path(plan)):
        return
    where = f"python module {RL_KERNEL.module}"
    if plan.run.rl_kernel.mode == "require":
        yield wrong(where, "installed (rl_kernel.mode is require)", "missing")
    else:
        yield Finding(Level.INFO, where, "installed", "missing: the enabled variant uses the trainer's own functions")


def check_pins(facts: Facts) -> Iterator[Finding]:
    plan = facts.plan
    return match_pins(find_pinned(plan), facts.manifest, load_record(), plan.run.workload.patched_pins)


def check_architecture(facts: Facts) -> Iterator[Finding]:
    """Check that RL-Kernel's extension has code for these GPUs; otherwise calls fail or use no compiled kernel."""
    built = facts.mapping("code", "rl_kernel").get("extension_architectures")
    is_unused = facts.staged is not None and not facts.plan.needs_rl_kernel
    if is_unused or not isinstance(built, list):
        return
    for capability in sorted({str(device.get("compute_capability")) for device in facts.devices}):
        if re.fullmatch(r"\d+\.\d", capability) and not any(serves(name, capability) for name in built):
            expected = f"code for compute capability {capability}"
            yield wrong("code.rl_kernel.extension_architectures", expected, ", ".join(map(str, built)))


def find_little_room(folder: Path, limits: Preflight) -> Iterator[Finding]:
    yield from require_room("disk", shutil.disk_usage(folder).free, limits.min_free_disk_gib)
    yield from require_room("memory", read_free_memory(), limits.min_free_memory_gib)


def require_room(what: str, free_bytes: int | None, min_gib: float) -> Iterator[Finding]:
    expected = f"{min_gib:g} GiB free"
    if free_bytes is None:
        yield Finding(Level.WARNING, what, expected, f"an unknown amount of free {what}")
    elif free_bytes < min_gib * GIB:
        yield wrong(what, expected, f"{free_bytes / GIB:.1f} GiB")


def check_other_runs(facts: Facts) -> Iterator[Finding]:
    runs = facts.fact("host", "other_runs")
    if isinstance(runs, list) and runs:
        found = f"other runs: {', '.join(map(str, runs))}"
        yield wrong(OTHER_RUNS, "no other run", found)


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    found = facts.fact("host", "dev_shm_gib")
    if isinstance(found, int | float) and found < MIN_SHARED_MEMORY_GIB:
        yield wrong("host.dev_shm_gib", f"at least {MIN_SHARED_MEMORY_GIB:g}", f"{found:g}")


def check_open_files(facts: Facts) -> Iterator[Finding]:
    """Check the hard limit, to which the agent raises the soft limit where it starts Ray."""
    limit = facts.mapping("host", "limits").get("nofile")
    found = limit.get("hard") if isinstance(limit, dict) else None
    if isinstance(found, int) and found < MIN_OPEN_FILES:
        yield wrong("host.limits.nofile.hard", f"at least {MIN_OPEN_FILES}", found)


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


def check_transports(facts: Facts) -> Iterator[Finding]:
    """Compare what NCCL really uses with what the hardware has: NVLink or xGMI, and between nodes RDMA or NVLink."""
    told = {rank: value for rank, value in facts.transports.items() if isinstance(value, dict) and "paths" in value}
    for expected, is_wrong in (
        ("NVLink between the nodes (MNNVL)", _lacks_fabric),
        ("NVLink or xGMI inside a node (P2P)", _lacks_links),
        ("RDMA between the nodes", _lacks_rdma),
    ):
        ranks = [rank for rank, value in told.items() if is_wrong(facts, value)]
        if ranks:
            used = {text for rank in ranks for text in (*told[rank]["paths"], f"network {told[rank].get('network')}")}
            yield wrong("libraries.transport", expected, f"{', '.join(sorted(used))}, on rank {', '.join(ranks)}")


def _lacks_fabric(facts: Facts, transport: Mapping[str, Any]) -> bool:
    is_slow = transport.get("mnnvl") is False or any(path.startswith("NET") for path in transport["paths"])
    return is_slow and facts.plan.spans_nvlink and _share_clique(facts)


def _share_clique(facts: Facts) -> bool:
    """Whether NVLink connects all nodes; nodes whose driver does not tell count as connected."""
    fabrics = [manifest.sections.get("gpu", {}).get("fabric") for manifest in facts.nodes]
    keys = [(item.get("cluster_uuid"), item.get("clique_id")) for item in fabrics if isinstance(item, dict)]
    return len({str(key) for key in keys if not any(isinstance(part, Unknown) for part in key)}) <= 1


def _lacks_links(facts: Facts, transport: Mapping[str, Any]) -> bool:
    slow = ("SHM",) if facts.layout.num_nodes > 1 else ("SHM", "NET")
    is_linked = facts.hardware.links_per_gpu > 0 and facts.layout.gpus_per_node > 1
    return is_linked and any(path.startswith(slow) for path in transport["paths"])


def _lacks_rdma(facts: Facts, transport: Mapping[str, Any]) -> bool:
    devices = [manifest.sections.get("network", {}).get("rdma_devices") for manifest in facts.nodes]
    ports = [port for found in devices for _, port in list_ports(found)]
    is_used = SOCKET in find_network({"transport": transport}).split(", ")
    return is_used and facts.layout.num_nodes > 1 and any(port.get("state") == ACTIVE for port in ports)
