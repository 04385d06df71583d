"""Describe which processes use a GPU now, and select the GPUs that a job was given.

NVML shows all GPUs of the machine; ``CUDA_VISIBLE_DEVICES`` names those of the job.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from rlk_repro.rundir.manifest import Unknown

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
# An idle driver itself uses MiB too: MI300X about 300, H200 with a helper process about 500.
IDLE_MEMORY_MIB: Final = 1024
_NUMBER: Final = re.compile(r"\d{1,4}")
_UUID: Final = re.compile(r"GPU-[0-9a-f-]{1,36}", re.IGNORECASE)

Gpu = TypeVar("Gpu")


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


def select_given(gpus: Sequence[Gpu], identify: Callable[[Gpu], tuple[object, object]]) -> list[Gpu]:
    """Return the ``gpus`` of this job; ``identify`` returns the number and the uuid of a GPU.

    As in CUDA, an entry that is neither number nor uuid ends the list, and a uuid may be shortened.
    If the list names none of the machine's GPUs, all GPUs are selected.  GPUs and their numbers
    follow the driver's order, which is CUDA's order if all GPUs of a node are the same model.
    """
    listed = os.environ.get(VISIBLE)
    if listed is None:
        return list(gpus)
    given = [gpu for gpu in gpus if _is_listed(listed, *identify(gpu))]
    return given or list(gpus)


def _is_listed(listed: str, index: object, uuid: object) -> bool:
    for entry in map(str.strip, listed.split(",")):
        if _NUMBER.fullmatch(entry):
            if int(entry) == index:
                return True
        elif not _UUID.fullmatch(entry):
            return False
        elif str(uuid).lower().startswith(entry.lower()):
            return True
    return False
