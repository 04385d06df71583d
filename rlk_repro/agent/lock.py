"""Allow one leading agent per run directory.  Linux frees the lock when the process ends, even by SIGKILL."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rlk_repro.base.disk import writing
from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.rundir.paths import RunDir


@contextmanager
def locked(run_dir: RunDir, holder: str) -> Iterator[None]:
    """Hold the run directory's lock in a ``with`` block; ``holder`` names this agent in another agent's error message.

    Raises:
        SpecError: another agent runs in this directory.
        EnvironmentMissing: the file system does not support locks.
    """
    with writing(run_dir.lock):
        handle = os.open(run_dir.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _explain(run_dir, handle, error) from None
        with writing(run_dir.lock):
            os.truncate(handle, 0)
            os.write(handle, holder.encode())
        yield
    finally:
        os.close(handle)


def _explain(run_dir: RunDir, handle: int, error: OSError) -> Exception:
    where = str(run_dir.root)
    if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
        other = os.pread(handle, 4096, 0).decode(errors="replace") or "unknown"
        return SpecError(Problem(where, f"another agent runs here ({other})", hint="wait for that agent, or cancel it"))
    return EnvironmentMissing(
        Problem(where, f"cannot be locked ({error.strerror})", expected="a file system with flock")
    )
