"""Stands between the node agent and a trainer, so that no trainer outlives its agent.  Runs as a script, stdlib only.

``python -I -S guard.py PROGRAM ARGUMENT…`` leads the trainer's process group.  Standard input is a pipe of the agent's
that is never written: its end means the agent is gone, and the whole group is killed.  The guard ends exactly as the
trainer did, signal included.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
CANNOT_START = 127


def main() -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # a handler, not SIG_IGN, which the trainer would inherit
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    guard = os.getpid()
    trainer = os.fork()
    if trainer == 0:
        _become_trainer(guard, sys.argv[1:])
    while True:
        ready, _, _ = select.select([0, reader], [], [])
        if 0 in ready:
            os.killpg(guard, signal.SIGKILL)
        os.read(reader, select.PIPE_BUF)
        ended, status = os.waitpid(trainer, os.WNOHANG)
        if ended:
            _end_as(status)


def _become_trainer(guard: int, argv: list[str]) -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before it could be watched
        os._exit(CANNOT_START)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 (an argument list; the door that started us cannot wait for two things)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(CANNOT_START)


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is the trainer's, not a second of ours
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
