"""Share work among forked processes, which end with the process that forked them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from rlk_repro.base.guard import PR_SET_PDEATHSIG


def run_shares(number: int, run_share: Callable[[int], int]) -> list[int]:
    """Run shares 0 to ``number`` - 1, the first one in this process; return their exit codes.

    A code below 0 is the negative number of the signal that ended a process.
    """
    pids = []
    for share in range(1, number):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
            os._exit(run_share(share))
        pids.append(pid)
    return [run_share(0), *(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)]
