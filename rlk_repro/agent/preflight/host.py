"""Check a node's run directory, memory, other runs and limits."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import GIB
from rlk_repro.probes.host import parse_meminfo

MIN_SHARED_MEMORY_GIB: Final = 1.0
MIN_OPEN_FILES: Final = 8192
_MEMINFO: Final = Path("/proc/meminfo")


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
    free_bytes = shutil.disk_usage(facts.run_dir.root).free
    yield from require_room("disk", free_bytes, facts.limits.min_free_disk_gib)
    yield from require_room("memory", read_free_memory(), facts.limits.min_free_memory_gib)


def require_room(what: str, free_bytes: int | None, min_gib: float) -> Iterator[Finding]:
    expected = f"{min_gib:g} GiB free"
    if free_bytes is None:
        yield Finding(Level.WARNING, what, expected, f"an unknown amount of free {what}")
    elif free_bytes < min_gib * GIB:
        yield wrong(what, expected, f"{free_bytes / GIB:.1f} GiB")


def read_free_memory(path: Path = _MEMINFO) -> int | None:
    """Return how many bytes of memory the kernel can give without swapping."""
    try:
        return parse_meminfo(path.read_text()).get("MemAvailable")
    except OSError:
        return None


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


def _require_least(where: str, value: Any, least: float) -> Iterator[Finding]:
    if isinstance(value, int | float) and value < least:
        yield wrong(where, f"at least {least:g}", f"{value:g}")
