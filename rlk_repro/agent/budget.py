"""Decide whether an allocation has time left for the next pair, and whether the time limit ended the work."""

from __future__ import annotations

import time
from typing import Final

from rlk_repro.base.errors import Problem, RlkReproError
from rlk_repro.base.units import format_duration

SAFETY: Final = 1.1
"""The next pair begins only if the remaining time is at least this multiple of the longest pair's duration."""
EARLY_S: Final = 90.0
"""Work that stops in an allocation's last 90 s counts as out of time: Slurm sends its signal up to 60 s early."""


class OutOfTime(RlkReproError):
    exit_code = 75
    title = "out of time"


class Budget:
    """The time left in an allocation: the last pair must end by ``until`` (Unix seconds); 0 means no limit."""

    def __init__(self, until: float) -> None:
        self._until = until or float("inf")
        self._pair = ""
        self._since = 0.0
        self._longest_s = 0.0
        self._is_out = False

    def begin(self, pair: str) -> None:
        """Begin a pair; the first pair always begins, because a short allocation would otherwise run no pair.

        Raises:
            OutOfTime: too little time is left for a new pair.
        """
        if pair == self._pair:
            return
        now = time.time()
        if self._pair:
            self._longest_s = max(self._longest_s, now - self._since)
            left_s, wanted_s = self._until - now, SAFETY * self._longest_s
            if left_s < wanted_s:
                self._is_out = True
                left, least = format_duration(max(left_s, 0.0)), f"at least {format_duration(wanted_s)}"
                raise OutOfTime(Problem(pair, "not begun, because too little time is left", got=left, expected=least))
        self._pair, self._since = pair, now

    @property
    def is_over(self) -> bool:
        return self._is_out or time.time() >= self._until - EARLY_S
