"""Measure named wall-clock phases, logged and summed as vime's timer does.

Unlike in vime, a phase includes all its GPU work: the device is synchronised at the phase's start and end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Timer:
    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._started: dict[str, float] = {}
        self._elapsed_s: dict[str, float] = {}

    def start(self, name: str) -> None:
        assert name not in self._started, f"timer {name} is already running"
        self._synchronize()
        self._started[name] = time.perf_counter()
        logger.info("Timer %s start", name)

    def end(self, name: str) -> None:
        self._synchronize()
        elapsed_s = time.perf_counter() - self._started.pop(name)
        self._elapsed_s[name] = self._elapsed_s.get(name, 0.0) + elapsed_s
        logger.info("Timer %s end (elapsed: %.1fs)", name, elapsed_s)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.end(name)

    def pop_elapsed(self) -> dict[str, float]:
        elapsed_s, self._elapsed_s = self._elapsed_s, {}
        return elapsed_s
