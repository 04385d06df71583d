"""How a trial ended, from its exit and the end of its log.  Out of memory is recognised, not guessed."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Final

from rlk_repro.job.process import Cause, Ended
from rlk_repro.results import TrialStatus
from rlk_repro.units import format_duration

# torch, the CUDA and HIP runtimes, and NCCL's and RCCL's way of passing them on
_DEVICE_OUT_OF_MEMORY: Final = re.compile(
    rb"OutOfMemoryError|(?i:CUDA|HIP) out of memory|(?i:CUDA|HIP) (?:error|failure)[^\n]{0,40} '?out of memory"
)
_VMSTAT: Final = Path("/proc/vmstat")
_EVENTS: Final = Path("/sys/fs/cgroup/memory.events")
_OOM_KILL: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


def count_oom_kills() -> int | None:
    """Processes killed so far for want of memory: in this control group, else on this machine; None where unknown."""
    for path in (_EVENTS, _VMSTAT):
        try:
            found = _OOM_KILL.search(path.read_bytes())
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return None


def judge(ended: Ended, tail: bytes, *, has_oom_kill: bool) -> tuple[TrialStatus, str]:
    """Status and reason; ``tail`` is the end of the log, ``has_oom_kill`` whether the kernel killed for memory.

    A trainer that answers SIGTERM with exit code 0 has not finished either.
    """
    how = f"exit code {ended.code}" if ended.signal is None else f"killed by {ended.signal.name}"
    match ended.cause:
        case Cause.INTERRUPT:
            return TrialStatus.INTERRUPTED, f"the node agent was asked to stop; {how}"
        case Cause.TIMEOUT:
            return TrialStatus.TIMEOUT, f"time limit reached after {format_duration(ended.duration_s)}; {how}"
        case None:
            pass
    if ended.code == 0:
        return TrialStatus.OK, ""
    found = _DEVICE_OUT_OF_MEMORY.search(tail)
    if found is not None:
        return TrialStatus.OUT_OF_MEMORY, f"device memory: {found[0].decode()}; {how}"
    if ended.signal is signal.SIGKILL and has_oom_kill:
        return TrialStatus.OUT_OF_MEMORY, f"host memory: the kernel's out-of-memory killer; {how}"
    return TrialStatus.FAILED, how
