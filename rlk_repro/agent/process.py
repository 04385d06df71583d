"""Run one trainer to its end under the guard process."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import Final

from rlk_repro.agent.stop import Stop
from rlk_repro.base.guarded import Guarded

READ_BYTES: Final = 256 << 10
_DRAIN_S: Final = 5.0
_WHOLE_STEP_S: Final = 1.0
_TROUBLE_S: Final = 1.0


class Cause(StrEnum):
    TIMEOUT = "timeout"
    INTERRUPT = "interrupt"
    TROUBLE = "trouble"


@dataclass(frozen=True, kw_only=True)
class StopTimes:
    """The time limits of one process; ``grace_s`` is the time between SIGTERM and SIGKILL."""

    time_limit_s: float
    grace_s: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its exit ``code`` or the ``signal`` that killed it; ``cause`` is set if the agent ended it.

    ``num_leftovers`` descendants outlived the process and were killed.
    """

    code: int | None
    signal: signal.Signals | None
    cause: Cause | None
    num_leftovers: int
    duration_s: float
    trouble: str = ""


def no_trouble() -> str:
    return ""


def run_guarded(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    limits: StopTimes,
    stop: Stop,
    cwd: Path | None = None,
    see_output: Callable[[bytes], object],
    see_pid: Callable[[int], object] = lambda _: None,
    find_trouble: Callable[[], str] = no_trouble,
) -> Ended:
    """Run ``argv`` until it ends, its time limit passes, the agent must stop, or ``find_trouble`` gives a reason.

    No process that ``argv`` started is left when this function returns or raises.  ``see_pid`` gets the process group's
    pid; ``find_trouble`` is called about every second.

    Raises:
        EnvironmentMissing: the Python that runs the guard cannot be started.
    """
    output_fd, output_writer = os.pipe()
    with os.fdopen(output_fd, "rb", buffering=0) as output:
        try:
            guarded = Guarded(argv, env, output_writer, cwd=cwd)
        finally:
            os.close(output_writer)
        try:
            see_pid(guarded.pid)
            group = _Group(guarded=guarded, output=output, limits=limits, stop=stop, see_output=see_output,
                           find_trouble=find_trouble)  # fmt: skip
            return group.run()
        finally:
            guarded.release()


@dataclass(kw_only=True)
class _Group:
    guarded: Guarded
    output: FileIO
    limits: StopTimes
    stop: Stop
    see_output: Callable[[bytes], object]
    find_trouble: Callable[[], str]

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._deadline = self._started + self.limits.time_limit_s
        self._next_look = math.inf if self.find_trouble is no_trouble else self._started + _TROUBLE_S
        self._trouble = ""
        self._cause: Cause | None = None
        self._has_output = True

    def run(self) -> Ended:
        while self.guarded.status is None:
            self._read(min(self._deadline, self._next_look))
            self._check_time()
        duration_s = time.monotonic() - self._started
        num_leftovers = self.guarded.count_descendants()
        self.guarded.kill()
        self._drain()
        code = self.guarded.code
        killer = signal.Signals(-code) if code is not None and code < 0 else None
        if killer in {signal.SIGTERM, signal.SIGINT} and self._cause is None and self.stop.wait(_WHOLE_STEP_S):
            # schedulers signal all processes of a step, so the trainer gets the signal before this agent
            self._cause = Cause.INTERRUPT
        return Ended(
            code=code if killer is None else None,
            signal=killer,
            cause=self._cause,
            num_leftovers=num_leftovers,
            duration_s=duration_s,
            trouble=self._trouble,
        )

    def _check_time(self) -> None:
        if self.guarded.status is not None:
            return
        is_late = time.monotonic() >= self._deadline
        if self._cause is None and (cause := self._find_cause(is_late=is_late)) is not None:
            self._cause = cause
            self._deadline, self._next_look = time.monotonic() + self.limits.grace_s, math.inf
            self.guarded.ask()
        elif is_late:
            self._deadline = math.inf
            self.guarded.kill()

    def _find_cause(self, *, is_late: bool) -> Cause | None:
        if self.stop.signal is not None:
            return Cause.INTERRUPT
        if is_late:
            return Cause.TIMEOUT
        if time.monotonic() >= self._next_look:
            self._trouble = self.find_trouble()
            self._next_look = time.monotonic() + _TROUBLE_S
        return Cause.TROUBLE if self._trouble else None

    def _read(self, until: float) -> None:
        wake_fd, guard_fd, output_fd = self.stop.wake_fd, self.guarded.fileno(), self.output.fileno()
        watched = [wake_fd]
        watched += [guard_fd] if self.guarded.status is None else []
        watched += [output_fd] if self._has_output else []
        timeout_s = None if until == math.inf else max(until - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if wake_fd in ready:
            self.stop.clear()
        if guard_fd in ready:
            self.guarded.poll()
        if output_fd in ready:
            data = os.read(output_fd, READ_BYTES)
            self._has_output = bool(data)
            if data:
                self.see_output(data)

    def _drain(self) -> None:
        # A daemon may keep the pipe open, so the reading has a deadline.
        until = time.monotonic() + _DRAIN_S
        while self._has_output and time.monotonic() < until:
            self._read(until)
