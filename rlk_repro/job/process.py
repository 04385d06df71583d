"""Runs one trainer to its end under the guard: streams its output, keeps its time limit, ends its process group.

Knows nothing of trials, pairs or directories.  No process of the group is left when ``run_guarded`` returns or raises.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import Final

from rlk_repro import proc, procfs
from rlk_repro.job.stop import Stop

READ_BYTES: Final = 256 << 10
_GUARD: Final = Path(__file__).with_name("guard.py")
_STATUS_BYTES: Final = 64
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
    """Run ``argv`` until it ends, its time is over or ``stop`` is asked for.

    Args:
        see_output: called with standard output and error, merged, as they come.
        see_pid: called once with the pid of the process group, which is also its session.

    Raises:
        EnvironmentMissing: this Python cannot be started.
    """
    output_fd, output_writer = os.pipe()
    ours, guards = socket.socketpair()
    with ours, os.fdopen(output_fd, "rb", buffering=0) as output:
        try:
            process = proc.start(
                [sys.executable, "-I", "-S", str(_GUARD), *argv],
                output_fd=output_writer,
                stdin_fd=guards.fileno(),
                env=env,
            )
        finally:
            os.close(output_writer)
            guards.close()
        try:
            see_pid(process.pid)
            return _Group(process.pid, ours, output, limits, stop, see_output).run()
        finally:
            # not waited for before, so that its id cannot have gone to anybody else
            proc.signal_group(process.pid, signal.SIGKILL)
            process.wait()


class _Group:
    """One guarded process group while it runs."""

    def __init__(
        self,
        pid: int,
        guard: socket.socket,
        output: FileIO,
        limits: Limits,
        stop: Stop,
        see_output: Callable[[bytes], object],
    ) -> None:
        self._pid = pid
        self._guard = guard
        self._output = output
        self._grace_s = limits.grace_s
        self._stop = stop
        self._see_output = see_output
        self._started = time.monotonic()
        self._deadline = self._started + limits.time_limit_s
        self._cause: Cause | None = None
        self._status: int | None = None
        self._has_output = True

    def run(self) -> Ended:
        while self._status is None:
            self._read(self._deadline)
            self._check_time()
        duration_s = time.monotonic() - self._started
        num_leftovers = len(procfs.find_session(self._pid).keys() - {self._pid})
        proc.signal_group(self._pid, signal.SIGKILL)
        self._drain()
        code = os.waitstatus_to_exitcode(self._status)
        killer = signal.Signals(-code) if code < 0 else None
        if killer in {signal.SIGTERM, signal.SIGINT} and self._cause is None and self._stop.wait(_WHOLE_STEP_S):
            self._cause = Cause.INTERRUPT  # schedulers signal all processes of a step, the trainer before us
        return Ended(
            code=code if killer is None else None,
            signal=killer,
            cause=self._cause,
            num_leftovers=num_leftovers,
            duration_s=duration_s,
        )

    def _check_time(self) -> None:
        """SIGTERM when it is time to end, SIGKILL when the grace is over."""
        if self._status is not None:
            return
        is_late = time.monotonic() >= self._deadline
        if self._cause is None and (is_late or self._stop.signal is not None):
            self._cause = Cause.TIMEOUT if self._stop.signal is None else Cause.INTERRUPT
            self._deadline = time.monotonic() + self._grace_s
            proc.signal_group(self._pid, signal.SIGTERM)
        elif is_late:
            self._deadline = math.inf
            proc.signal_group(self._pid, signal.SIGKILL)

    def _read(self, until: float) -> None:
        """Wait for output, the guard's word, a signal or the time, whichever comes first."""
        wake_fd, guard_fd, output_fd = self._stop.wake_fd, self._guard.fileno(), self._output.fileno()
        watched = [wake_fd]
        watched += [guard_fd] if self._status is None else []
        watched += [output_fd] if self._has_output else []
        timeout_s = None if until == math.inf else max(until - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if wake_fd in ready:
            self._stop.clear()
        if guard_fd in ready:
            # a guard that was killed says nothing; its trainer was killed with it
            self._status = int(self._guard.recv(_STATUS_BYTES) or signal.SIGKILL)
        if output_fd in ready:
            data = os.read(output_fd, READ_BYTES)
            self._has_output = bool(data)
            if data:
                self._see_output(data)

    def _drain(self) -> None:
        """What is still in the pipe; a daemon that keeps it open is not waited for."""
        until = time.monotonic() + _DRAIN_S
        while self._has_output and time.monotonic() < until:
            self._read(until)
