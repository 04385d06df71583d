"""Read the state of processes from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from rlk_repro.base.units import group

# Windows has neither sysconf nor /proc, but reads bundles with modules that import this one
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

_STAT_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStat:
    """``start_ticks`` counts from boot to the start of the process, and tells two processes with one pid apart."""

    state: str
    parent: int
    session: int
    cpu_ticks: int
    start_ticks: int
    rss_bytes: int

    @property
    def is_running(self) -> bool:
        return self.state not in "ZXx"


def read_stat(pid: int) -> ProcessStat | None:
    try:
        handle = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        data = os.read(handle, _STAT_BYTES)
    except ProcessLookupError:
        return None
    finally:
        os.close(handle)
    fields = data[data.rfind(b")") + 2 :].split()  # the program name may hold brackets, but ends at the last one
    return ProcessStat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
    )


def find_session(session: int) -> dict[int, ProcessStat]:
    return {pid: stat for pid, stat in _read_all().items() if stat.session == session and stat.is_running}


def find_descendants(ancestor: int) -> dict[int, ProcessStat]:
    everybody = _read_all()
    children = group((stat.parent, pid) for pid, stat in everybody.items())
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return {pid: everybody[pid] for pid in found[1:] if everybody[pid].is_running}


def _read_all() -> dict[int, ProcessStat]:
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    found = {pid: read_stat(pid) for pid in pids}
    return {pid: stat for pid, stat in found.items() if stat is not None}
