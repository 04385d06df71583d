"""Decide how a trial ended: by its exit code, the end of its log, and the kernel's count of out-of-memory kills."""

from __future__ import annotations

import re
import signal
from typing import Final

from rlk_repro.agent.process import Cause, Ended
from rlk_repro.base.escapes import quote_end
from rlk_repro.base.units import format_duration
from rlk_repro.plan import Plan
from rlk_repro.rundir.results import TrialStatus

# messages of torch, of the CUDA and HIP runtimes, and of NCCL and RCCL
_DEVICE_OUT_OF_MEMORY: Final = re.compile(
    rb"OutOfMemoryError|(?i:CUDA|HIP) out of memory|(?i:CUDA|HIP) (?:error|failure)[^\n]{0,40} '?out of memory"
)


def is_good_end(plan: Plan, status: TrialStatus) -> bool:
    """Tell whether a trial ended as its run intends: well, or out of memory in a run that fills the GPU's memory."""
    is_full = plan.run.workload.fills_memory and status is TrialStatus.OUT_OF_MEMORY
    return status is TrialStatus.OK or is_full


def judge(ended: Ended, tail: bytes, *, has_oom_kill: bool) -> tuple[TrialStatus, str]:
    """Return a trial's status and the reason for it; ``tail`` is the end of the trial's log.

    A trainer that exits with 0 after SIGTERM has not finished its trial.
    """
    how = f"exit code {ended.code}" if ended.signal is None else f"killed by {ended.signal.name}"
    match ended.cause:
        case Cause.INTERRUPT:
            return TrialStatus.INTERRUPTED, f"the node agent was asked to stop; {how}"
        case Cause.TIMEOUT:
            return TrialStatus.TIMEOUT, f"time limit reached after {format_duration(ended.duration_s)}; {how}"
        case Cause.TROUBLE:
            return TrialStatus.FAILED, f"{ended.trouble}; {how}"
        case None:
            pass
    if ended.code == 0:
        return TrialStatus.OK, ""
    found = _DEVICE_OUT_OF_MEMORY.search(tail)
    if found is not None:
        return TrialStatus.OUT_OF_MEMORY, f"device memory ran out ({found[0].decode()}); {how}"
    if ended.signal is signal.SIGKILL and has_oom_kill:
        return TrialStatus.OUT_OF_MEMORY, f"host memory ran out (the kernel's out-of-memory killer); {how}"
    quote = quote_end(tail) if ended.signal is None else ""
    return TrialStatus.FAILED, f"{how}; its log ends: {quote}" if quote else how
