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

from rlk_repro.base.guarded import Guarded
from rlk_repro.base.stop import Stop

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
    """A process ended with an exit ``code`` or by a ``signal``; ``cause`` is set if the agent ended it."""

    code: int | None
    signal: signal.Signals | None
    cause: Cause | None
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
            return _Group(guarded, output, stop, see_output).run(limits, find_trouble)
        finally:
            guarded.release()


class _Group:
    """The processes of one command, whose output goes to ``see_output``."""

    def __init__(self, guarded: Guarded, output: FileIO, stop: Stop, see_output: Callable[[bytes], object]) -> None:
        self._guarded = guarded
        self._output = output
        self._stop = stop
        self._see_output = see_output
        self._has_output = True

    def run(self, limits: StopTimes, find_trouble: Callable[[], str]) -> Ended:
        started = time.monotonic()
        cause, trouble = self._watch(started + limits.time_limit_s, find_trouble)
        if cause is not None:
            self._guarded.ask()
            self._read_until(time.monotonic() + limits.grace_s)
            self._guarded.kill()
            self._read_until(math.inf)
        return self._conclude(time.monotonic() - started, cause, trouble)

    def _watch(self, deadline: float, find_trouble: Callable[[], str]) -> tuple[Cause | None, str]:
        """Read output until the process ends (None), or until there is a cause to end it."""
        next_look = time.monotonic() + _TROUBLE_S
        while self._guarded.status is None:
            self._read(min(deadline, next_look))
            if self._guarded.status is not None:
                break
            if self._stop.signal is not None:
                return Cause.INTERRUPT, ""
            if time.monotonic() >= deadline:
                return Cause.TIMEOUT, ""
            if time.monotonic() >= next_look:
                if trouble := find_trouble():
                    return Cause.TROUBLE, trouble
                next_look = time.monotonic() + _TROUBLE_S
        return None, ""

    def _read_until(self, deadline: float) -> None:
        while self._guarded.status is None and time.monotonic() < deadline:
            self._read(deadline)

    def _conclude(self, duration_s: float, cause: Cause | None, trouble: str) -> Ended:
        self._guarded.kill()
        self._drain()
        code = self._guarded.code
        killer = signal.Signals(-code) if code is not None and code < 0 else None
        if killer in {signal.SIGTERM, signal.SIGINT} and cause is None and self._stop.wait(_WHOLE_STEP_S):
            # schedulers signal all processes of a step, so the trainer gets the signal before this agent
            cause = Cause.INTERRUPT
        code = code if killer is None else None
        return Ended(code=code, signal=killer, cause=cause, duration_s=duration_s, trouble=trouble)

    def _read(self, until: float) -> None:
        wake_fd, guard_fd, output_fd = self._stop.wake_fd, self._guarded.fileno(), self._output.fileno()
        watched = [wake_fd]
        watched += [guard_fd] if self._guarded.status is None else []
        watched += [output_fd] if self._has_output else []
        timeout_s = None if until == math.inf else max(until - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if wake_fd in ready:
            self._stop.clear()
        if guard_fd in ready:
            self._guarded.poll()
        if output_fd in ready:
            data = os.read(output_fd, READ_BYTES)
            self._has_output = bool(data)
            if data:
                self._see_output(data)

    def _drain(self) -> None:
        # A daemon may keep the pipe open, so the reading has a deadline.
        until = time.monotonic() + _DRAIN_S
        while self._has_output and time.monotonic() < until:
            self._read(until)
