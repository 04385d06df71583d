"""Describe which processes use a GPU now: before the first trial (preflight) and between two trials (node agent)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlk_repro.rundir.manifest import Unknown

# An idle driver itself uses several hundred MiB: MI300X about 300, H200 with a helper process about 500.
IDLE_MEMORY_MIB: Final = 1024


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """In a container, some processes may be missing or may have the host's process ids."""

    index: int
    memory_used_mib: float | Unknown
    pids: tuple[int, ...] = ()

    @property
    def is_busy(self) -> bool:
        used = self.memory_used_mib
        return bool(self.pids) or (not isinstance(used, Unknown) and used > IDLE_MEMORY_MIB)

    def __str__(self) -> str:
        pids = ", ".join(map(str, self.pids)) or "none visible"
        used = self.memory_used_mib
        memory = str(used) if isinstance(used, Unknown) else f"{used:.0f} MiB"
        return f"GPU {self.index}: {memory} in use, processes: {pids}"
