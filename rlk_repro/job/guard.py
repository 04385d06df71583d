"""Stands between the node agent and a trainer, so that nothing of a trial outlives its agent.  A script, stdlib only.

``python -I -S guard.py PROGRAM ARGUMENT…`` leads the trainer's process group.  Standard input is a socket to the agent:
the guard writes the trainer's wait status into it and stays.  Its end means that the agent is gone or done, and the
whole group is killed, the guard with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from typing import NoReturn

AGENT = 0
PR_SET_PDEATHSIG = 1
CANNOT_START = 127


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN, which the trainer would inherit
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.set_wakeup_fd(wake_writer)
    guard = os.getpid()
    trainer = os.fork()
    if trainer == 0:
        _become_trainer(guard, sys.argv[1:])
    status = _wait(trainer, wake_reader)
    if status is not None:
        with contextlib.suppress(OSError):
            os.write(AGENT, b"%d\n" % status)
            os.read(AGENT, 1)
    os.killpg(guard, signal.SIGKILL)


def _wait(trainer: int, wake_reader: int) -> int | None:
    """The wait status of the trainer, or None when the agent is gone before."""
    while True:
        ready, _, _ = select.select([AGENT, wake_reader], [], [])
        if AGENT in ready:
            return None
        os.read(wake_reader, select.PIPE_BUF)
        ended, status = os.waitpid(trainer, os.WNOHANG)
        if ended:
            return status


def _become_trainer(guard: int, argv: list[str]) -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before it could be watched
        os._exit(CANNOT_START)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # this Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 (an argument list, no shell)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(CANNOT_START)


if __name__ == "__main__":
    main()
