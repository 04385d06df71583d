"""Start the trainer for the node agent, and end the trial when the agent dies.  This script imports only the stdlib.

``python -I -S guard.py PROGRAM ARGUMENT…`` leads the trainer's process group.  Standard input is a socket to the agent:
the guard writes the trainer's wait status into the socket and continues to run.  When the socket closes, the agent has
died or finished.  The guard then kills every descendant of the trainer, in any process group or session, and itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from typing import NoReturn

AGENT = 0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_S = 5.0
CANNOT_START = 127


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # no SIG_IGN here: the trainer would inherit it
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt orphaned processes, to find them later
    guard = os.getpid()
    trainer = os.fork()
    if trainer == 0:
        _become_trainer(guard, sys.argv[1:])
    status = _wait(trainer, wake_reader)
    if status is not None:
        with contextlib.suppress(OSError):
            os.write(AGENT, b"%d\n" % status)
            os.read(AGENT, 1)
    _end_descendants(guard)
    os.killpg(guard, signal.SIGKILL)


def _wait(trainer: int, wake_reader: int) -> int | None:
    """Return the trainer's wait status, or None when the agent ends first."""
    while True:
        ready, _, _ = select.select([AGENT, wake_reader], [], [])
        if AGENT in ready:
            return None
        os.read(wake_reader, select.PIPE_BUF)
        for ended, status in _reap():
            if ended == trainer:
                return status


def _reap() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            found.append(child)
    return found


def _end_descendants(guard: int) -> None:
    """Kill repeatedly, because a process may fork meanwhile."""
    until = time.monotonic() + END_S
    while (found := _find_descendants(guard)) and time.monotonic() < until:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        _reap()


def _find_descendants(guard: int) -> list[int]:
    children: dict[int, list[int]] = {}
    ended = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208 (pathlib takes as long to import as this script)
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stream:  # noqa: PTH123
            state, parent = stream.read().rpartition(b") ")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(name))
            if state in b"ZX":
                ended.add(int(name))
    found = [guard]
    for pid in found:
        found += children.get(pid, [])
    return [pid for pid in found[1:] if pid not in ended]


def _become_trainer(guard: int, argv: list[str]) -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # the guard died before the call of prctl
        os._exit(CANNOT_START)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals; the trainer should not
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 (an argument list, no shell)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(CANNOT_START)


if __name__ == "__main__":
    main()
