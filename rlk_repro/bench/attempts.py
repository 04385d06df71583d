"""Run an implementation on a device; an error becomes a status with a reason, so the next implementation still runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.integration.route.errors import find_failures
from rlk_repro.rundir.operator_results import OperatorStatus

MAX_REASON: Final = 300
OOM_WORDS: Final = ("out of memory", "can't allocate memory")
R = TypeVar("R")


@dataclass(frozen=True)
class Failure:
    status: OperatorStatus
    reason: str


class Attempts:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._failures = find_failures()

    def attempt(self, action: Callable[[], R]) -> R | Failure:
        """Run ``action`` and return its result; if ``action`` raises an error, return a failure.

        Raises:
            CheckFailed: the device is in an error state, in which every later call would fail.
        """
        try:
            return action()
        except self._failures as error:
            text = shorten_line(f"{type(error).__name__}: {error}")
            is_oom = isinstance(error, MemoryError) or any(words in str(error).lower() for words in OOM_WORDS)
        self.release()
        return Failure(OperatorStatus.OOM if is_oom else OperatorStatus.FAILED, text)

    def release(self) -> None:
        """Free memory, so that every cell starts with an empty allocator."""
        gc.collect()
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise CheckFailed(Problem("device", "is unusable after this cell", got=shorten_line(str(error)))) from error


def shorten_line(text: str) -> str:
    return " ".join(text.split())[:MAX_REASON]
