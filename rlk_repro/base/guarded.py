"""Run a command under the guard: start, poll and end the command together with all its descendants."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base import proc, procfs

_GUARD: Final = Path(__file__).with_name("guard.py")
_STATUS_BYTES: Final = 64
_END_S: Final = 10.0


class Guarded:
    """A running command and its guard; ``pid`` is also the id of the command's process group and session."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], output_fd: int, *, cwd: Path | None = None) -> None:
        self.status: int | None = None
        self._socket, guards = socket.socketpair()
        try:
            command = [sys.executable, "-I", "-S", str(_GUARD), *argv]
            self._process = proc.start(command, output_fd=output_fd, stdin_fd=guards.fileno(), cwd=cwd, env=env)
        except BaseException:
            self._socket.close()
            raise
        finally:
            guards.close()
        self.pid = self._process.pid

    def fileno(self) -> int:
        """A file descriptor that becomes readable when the command has ended."""
        return self._socket.fileno()

    def poll(self, timeout_s: float = 0.0) -> int | None:
        if self.status is None and select.select([self], [], [], timeout_s)[0]:
            # A killed guard writes no status; when the guard dies, the kernel also kills the command.
            self.status = int(self._socket.recv(_STATUS_BYTES) or signal.SIGKILL)
        return self.status

    @property
    def code(self) -> int | None:
        status = self.poll()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def ask(self) -> None:
        proc.signal_group(self.pid, signal.SIGTERM)

    def ask_command(self) -> bool:
        """Send SIGTERM only to the command, and let it end its own children; return False if no command runs."""
        children = {pid: stat for pid, stat in procfs.find_descendants(self.pid).items() if stat.parent == self.pid}
        if self.poll() is not None or not children:
            return False
        # The guard first starts the command and later only adopts orphans, so its oldest child is the command.
        return proc.signal_process(min(children, key=lambda pid: children[pid].start_ticks), signal.SIGTERM)

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to the command, wait ``grace_s`` for its end, then kill its remaining processes."""
        self.ask_command()
        self.poll(grace_s)
        self.release()

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # the guard has ended already
            self._socket.shutdown(socket.SHUT_WR)

    def release(self) -> None:
        self.kill()
        if not proc.wait(self._process, _END_S):
            proc.signal_group(self.pid, signal.SIGKILL)
            self._process.wait()
        self._socket.close()


def run_shown(
    argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> int | None:
    """Run a long command, and show its output on standard error; return None after the time limit.

    All its processes end with this process, even a compiler that ninja starts in a process group of its own.
    """
    running = Guarded(argv, env, sys.stderr.fileno(), cwd=cwd)
    try:
        running.poll(timeout_s)
        return running.code
    finally:
        running.end(_END_S)
