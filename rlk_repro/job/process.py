"""Runs one trainer to its end under the guard: streams its output, keeps its time limit, ends its process group.

Knows nothing of trials, pairs or directories.  No process of the group is left when ``run_guarded`` returns or raises.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from rlk_repro import proc, procfs
from rlk_repro.job.stop import Stop

READ_BYTES: Final = 256 << 10
_GUARD: Final = Path(__file__).with_name("guard.py")
_DRAIN_S: Final = 5.0
_WHOLE_STEP_S: Final = 1.0


class Cause(StrEnum):
    """Why a process did not end by itself."""

    TIMEOUT = "timeout"
    INTERRUPT = "interrupt"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``grace_s`` passes between SIGTERM and SIGKILL."""

    time_limit_s: float
    grace_s: float = 20.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its ``code``, or the ``signal`` that killed it, and ``cause`` where the agent ended it.

    ``num_leftovers`` processes of its group outlived it and were killed.
    """

    code: int | None
    signal: signal.Signals | None
    cause: Cause | None
    num_leftovers: int
    duration_s: float


def run_guarded(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    limits: Limits,
    stop: Stop,
    see_output: Callable[[bytes], object],
    see_pid: Callable[[int], object] = lambda _: None,
) -> Ended:
    """Run ``argv`` until it ends, its time is over or ``stop`` is asked for.  To be called inside ``stop.installed()``.

    Args:
        see_output: called with standard output and error, merged, as they come.
        see_pid: called once with the pid of the process group, which is also its session.

    Raises:
        EnvironmentMissing: this Python cannot be started.
    """
    output_fd, output_writer = os.pipe()
    life_reader, life_writer = os.pipe()
    guarded = [sys.executable, "-I", "-S", str(_GUARD), *argv]
    try:
        try:
            process = proc.start(guarded, output_fd=output_writer, stdin_fd=life_reader, env=env)
        finally:
            os.close(output_writer)
            os.close(life_reader)
        try:
            see_pid(process.pid)
            return _Group(process.pid, output_fd, limits, stop, see_output).run(process.wait)
        finally:
            if process.returncode is None:
                proc.signal_group(process.pid, signal.SIGKILL)
                process.wait()
    finally:
        os.close(output_fd)
        os.close(life_writer)


class _Group:
    """One guarded process group while it runs."""

    def __init__(
        self, pid: int, output_fd: int, limits: Limits, stop: Stop, see_output: Callable[[bytes], object]
    ) -> None:
        self._pid = pid
        self._output_fd = output_fd
        self._grace_s = limits.grace_s
        self._stop = stop
        self._see_output = see_output
        self._started = time.monotonic()
        self._deadline = self._started + limits.time_limit_s
        self._cause: Cause | None = None
        self._has_output = True

    def run(self, wait: Callable[[], int]) -> Ended:
        while not self._has_ended():
            self._read(self._deadline)
            self._check_time()
        duration_s = time.monotonic() - self._started
        num_leftovers = len(procfs.find_session(self._pid))
        # the leader is dead but not yet waited for, so that its id cannot have gone to anybody else
        proc.signal_group(self._pid, signal.SIGKILL)
        self._drain()
        code = wait()
        killer = signal.Signals(-code) if code < 0 else None
        if killer in {signal.SIGTERM, signal.SIGINT} and self._cause is None and self._stop.wait(_WHOLE_STEP_S):
            self._cause = Cause.INTERRUPT  # schedulers signal all processes of a step, the trainer before us
        return Ended(code=code if killer is None else None, signal=killer, cause=self._cause,
                     num_leftovers=num_leftovers, duration_s=duration_s)  # fmt: skip

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _check_time(self) -> None:
        """SIGTERM when it is time to end, SIGKILL when the grace is over."""
        is_late = time.monotonic() >= self._deadline
        if self._cause is None and (is_late or self._stop.signal is not None):
            self._cause = Cause.TIMEOUT if self._stop.signal is None else Cause.INTERRUPT
            self._deadline = time.monotonic() + self._grace_s
            proc.signal_group(self._pid, signal.SIGTERM)
        elif is_late:
            self._deadline = math.inf
            proc.signal_group(self._pid, signal.SIGKILL)

    def _read(self, until: float) -> None:
        """Wait for output, a signal or the time, whichever comes first, and pass the output on."""
        watched = [self._stop.wake_fd, *([self._output_fd] if self._has_output else [])]
        timeout_s = None if until == math.inf else max(until - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if self._stop.wake_fd in ready:
            self._stop.clear()
        if self._output_fd in ready:
            data = os.read(self._output_fd, READ_BYTES)
            self._has_output = bool(data)
            if data:
                self._see_output(data)

    def _drain(self) -> None:
        """What is still in the pipe; a daemon that kept it open is not waited for."""
        until = time.monotonic() + _DRAIN_S
        while self._has_output and time.monotonic() < until:
            self._read(until)
