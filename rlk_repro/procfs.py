"""What /proc says about processes.  Reading only; starting and signalling is proc's business."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")

_STAT_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStat:
    """One line of /proc/<pid>/stat.  ``start_ticks`` (since boot) tells a process from a later one with its pid."""

    state: str
    session: int
    cpu_ticks: int
    start_ticks: int
    rss_bytes: int

    @property
    def is_running(self) -> bool:
        return self.state not in "ZXx"


def read_stat(pid: int) -> ProcessStat | None:
    """None where there is no such process."""
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
    fields = data[data.rfind(b")") + 2 :].split()  # the name before may hold spaces and brackets
    return ProcessStat(
        state=fields[0].decode(),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * PAGE_BYTES,
    )


def find_session(session: int) -> dict[int, ProcessStat]:
    """The processes of a session by pid, zombies left out.  Reads every process of the machine."""
    found = {}
    with os.scandir("/proc") as entries:
        for pid in (int(entry.name) for entry in entries if entry.name.isdecimal()):
            stat = read_stat(pid)
            if stat is not None and stat.session == session and stat.is_running:
                found[pid] = stat
    return found
