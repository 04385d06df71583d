"""Check a node's run directory, memory, other runs, limits and network, and what all nodes of a job must share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import GIB
from rlk_repro.probes.host import read_free_memory
from rlk_repro.probes.network import OPENS
from rlk_repro.rundir.manifest import ACTIVE, diff_manifests, list_ports
from rlk_repro.spec import Preflight

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


def check_room(facts: Facts) -> Iterator[Finding]:
    return find_little_room(facts.run_dir.root, facts.limits)


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
        yield wrong("host.other_runs", "no other run", found)


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    found = facts.fact("host", "dev_shm_gib")
    yield from _require_least("host.dev_shm_gib", found, MIN_SHARED_MEMORY_GIB)


def check_open_files(facts: Facts) -> Iterator[Finding]:
    """Check the hard limit, because the agent raises the soft limit up to it where it starts Ray."""
    limit = facts.mapping("host", "limits").get("nofile")
    found = limit.get("hard") if isinstance(limit, dict) else None
    yield from _require_least("host.limits.nofile.hard", found, MIN_OPEN_FILES)


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


def _require_least(where: str, value: Any, least: float) -> Iterator[Finding]:
    if isinstance(value, int | float) and value < least:
        yield wrong(where, f"at least {least:g}", f"{value:g}")
