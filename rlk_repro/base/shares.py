"""Share work among forked processes, which end with the process that forked them."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable

from rlk_repro.base.guard import PR_SET_PDEATHSIG


def run_shares(number: int, run_share: Callable[[int], int]) -> list[int]:
    """Run shares 0 to ``number`` - 1, the first one in this process; return their exit codes.

    A code below 0 is the negative number of the signal that ended a process.
    """
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=_run_forked, args=(run_share, share), daemon=True) for share in range(1, number)]
    for process in others:
        process.start()
    codes = [run_share(0)]
    for process in others:
        process.join()
        codes.append(process.exitcode or 0)
    return codes


def _run_forked(run_share: Callable[[int], int], share: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a daemon outlives a parent that is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    sys.exit(run_share(share))
