"""Let one agent at a time lead in a run directory, also where a file system's locks hold on one node only.

The lock file names its holder, who changes it every few seconds.  An agent that finds the lock held by an earlier
allocation of its own job (Slurm requeued the job, but the agent of a node that it believes dead still runs) claims the
lock: the holder sees the claim, learns that its allocation is gone, and ends itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from rlk_repro.agent.parts import Agent
from rlk_repro.base.disk import writing
from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import write_text

LOOK_S: Final = 1.0
MAX_BYTES: Final = 4096
# flock's answers if another process holds the lock
_HELD: Final = frozenset({errno.EWOULDBLOCK, errno.EACCES})


@dataclass(frozen=True)
class Holder:
    node: str
    allocation: str

    def __str__(self) -> str:
        return f"node {self.node}, allocation {self.allocation}"

    def comes_after(self, other: Holder) -> bool:
        """Tell whether this is a later allocation of the other one's job, such as ``12.1`` after ``12.0``."""
        (job, number), (other_job, other_number) = self._split(), other._split()
        return job == other_job and number > other_number

    def _split(self) -> tuple[str, int]:
        job, _, number = self.allocation.partition(".")
        return job, int(number) if number.isdecimal() else 0


def read_holder(path: Path) -> Holder | None:
    lines = _read(path).decode(errors="replace").splitlines()
    return Holder(lines[0], lines[1]) if len(lines) >= 2 else None


class RunLock:
    """Held inside its ``with`` block; ``is_taken`` is false if a signal ended the waiting for it.

    Linux frees a lock when its process ends, even by SIGKILL.

    Raises (from ``__enter__``):
        SpecError: an agent of another job leads here, or the earlier agent did not end in time.
        EnvironmentMissing: the file system does not support locks.
    """

    def __init__(self, agent: Agent, tell: Callable[[str], object]) -> None:
        self.is_taken = False
        self._is_ending = False
        self._agent = agent
        self._path, self._claim = agent.run_dir.lock, agent.run_dir.claim
        self._own = Holder(agent.place.node, agent.place.allocation)
        self._tell = tell
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="lock", daemon=True)

    def __enter__(self) -> Self:
        with writing(self._path):
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            self.is_taken = self._wait()
            if self.is_taken:
                with writing(self._path):
                    self._write(0)
                self._thread.start()
        except BaseException:
            os.close(self._handle)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_taken:
            self._is_over.set()
            self._thread.join()
            if read_holder(self._path) == self._own:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, 0)
        os.close(self._handle)

    def _wait(self) -> bool:
        stop = self._agent.stop
        until = time.monotonic() + self._agent.deadlines.handover_s
        while (other := self._find_holder()) is not None:
            hint = ""
            if not self._own.comes_after(other):
                hint = "wait for that agent, or cancel its job"
            elif time.monotonic() >= until:
                hint = f"end the agent on node {other.node} by hand; the scheduler no longer reaches it"
            if hint:
                what = f"another agent runs here ({other})"
                raise SpecError(Problem(str(self._agent.run_dir.root), what, hint=hint))
            # the claim is written again and again, in case an even earlier agent has claimed as well
            write_text(self._claim, f"{self._own.node}\n{self._own.allocation}\n")
            self._tell(f"waits until the agent of {other} has ended")
            if stop.wait(LOOK_S):
                return False
        return stop.signal is None

    def _find_holder(self) -> Holder | None:
        """Return who holds the lock; if nobody does, this process holds it now."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return read_holder(self._path) or Holder("unknown", "unknown")
            what, where = f"cannot be locked ({error.strerror})", str(self._agent.run_dir.root)
            raise EnvironmentMissing(Problem(where, what, expected="a file system with flock")) from None
        other = read_holder(self._path)
        if other is None or other.node == self._own.node or not self._is_alive(other):
            return None
        # Two nodes hold the lock: the file system's locks are local to a node, and only the holder's changes count
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        return other

    def _is_alive(self, other: Holder) -> bool:
        """Watch whether the holder on another node still changes the file, by this machine's clock alone."""
        deadlines, before = self._agent.deadlines, _read(self._path)
        self._tell(f"looks whether the agent of {other} still runs")
        until = time.monotonic() + deadlines.silent_s
        while _read(self._path) == before:
            if time.monotonic() >= until:
                return False
            if self._agent.stop.wait(min(LOOK_S, deadlines.pulse_s)):
                return True
        return read_holder(self._path) is not None

    def _keep_alive(self) -> None:
        """Change the file until the ``with`` block ends, also while this agent ends itself: others wait for that."""
        number = 0
        while not self._is_over.wait(self._agent.deadlines.pulse_s):
            number += 1
            with contextlib.suppress(OSError):
                holder, claim = read_holder(self._path), read_holder(self._claim)
                if holder is not None and holder != self._own:
                    self._end(f"{holder} has taken the lock of this run")
                    return
                if claim is not None and claim.comes_after(self._own):
                    self._end(f"this allocation is gone: {claim} has begun")
                self._write(number)

    def _end(self, reason: str) -> None:
        if not self._is_ending:
            self._is_ending = True
            sys.stderr.write(f"{self._own}: {reason}; this agent ends\n")
            os.kill(os.getpid(), signal.SIGTERM)

    def _write(self, number: int) -> None:
        # few bytes in place: a full disk must not look like a dead agent
        text = f"{self._own.node}\n{self._own.allocation}\n{number:20}\n"
        written = os.pwrite(self._handle, text.encode(), 0)
        os.ftruncate(self._handle, written)


def _read(path: Path) -> bytes:
    # opened anew each time, because NFS looks for another node's changes when a file is opened
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES)
    except OSError:
        return b""
