"""Tell this rank's profiler which steps to record: nsys by CUDA's profiler calls, rocprofv3 by calls of ROCTX."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import torch

ROCTX: Final = "librocprofiler-sdk-roctx.so"


class ProfiledSteps:
    """Starts the profiler before the first profiled rollout, and stops it after the last one.

    ``steps`` is ``first:end``; rollout ``end`` is not included.  If ``steps`` is empty, no rollout is profiled.
    Rollout 0 is never profiled.
    """

    def __init__(self, steps: str, switch: Callable[[bool], None] | None = None) -> None:
        first, _, end = steps.partition(":")
        self._first, self._end = (int(first), int(end)) if steps else (0, 0)
        self._switch = switch or _switch

    def end_step(self, rollout_id: int) -> None:
        if rollout_id + 1 == self._first:
            self._switch(True)
        elif rollout_id + 1 == self._end:
            self._switch(False)


def _switch(is_on: bool) -> None:
    torch.cuda.synchronize()
    if torch.version.hip is None:
        (torch.cuda.profiler.start if is_on else torch.cuda.profiler.stop)()  # type: ignore[no-untyped-call]
        return
    library = ctypes.CDLL(ROCTX)
    (library.roctxProfilerResume if is_on else library.roctxProfilerPause)(0)
