"""Run one node's agent, as leader or follower."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rlk_repro.agent.follower import follow_leader
from rlk_repro.agent.leader import Leader
from rlk_repro.agent.node import write_preflight
from rlk_repro.agent.parts import NodePlace, Parts, real_parts
from rlk_repro.base.disk import writing
from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads import WORKLOADS


def run_agent(run_dir: RunDir, place: NodePlace, *, is_resuming: bool, parts: Parts | None = None) -> int:
    """Run this node's agent to its end and return its exit code.

    Raises:
        BundleUnreadable: no plan can be read.
        SpecError: the directory is sealed, another agent runs in it, or it holds trials and ``is_resuming`` is false.
        EnvironmentMissing: the directory cannot be locked.
    """
    plan = _load_plan(run_dir, place)
    parts = real_parts(WORKLOADS[plan.run.workload.kind]) if parts is None else parts
    if not place.is_leader:
        return follow_leader(plan, run_dir, place, parts)
    with locked(run_dir, f"node {place.node}, allocation {place.allocation}"):
        _check_unfinished(run_dir, is_resuming=is_resuming)
        return Leader(plan, run_dir, place, parts).run()


@contextmanager
def locked(run_dir: RunDir, holder: str) -> Iterator[None]:
    """Hold the run directory's lock in a ``with`` block; ``holder`` names this agent in another agent's error message.

    Linux frees the lock when the process ends, even by SIGKILL.

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
            raise _explain_lock(run_dir, handle, error) from None
        with writing(run_dir.lock):
            os.truncate(handle, 0)
            os.write(handle, holder.encode())
        yield
    finally:
        os.close(handle)


def _explain_lock(run_dir: RunDir, handle: int, error: OSError) -> Exception:
    where = str(run_dir.root)
    if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
        other = os.pread(handle, 4096, 0).decode(errors="replace") or "unknown"
        return SpecError(Problem(where, f"another agent runs here ({other})", hint="wait for that agent, or cancel it"))
    return EnvironmentMissing(
        Problem(where, f"cannot be locked ({error.strerror})", expected="a file system with flock")
    )


def _load_plan(run_dir: RunDir, place: NodePlace) -> Plan:
    try:
        return Plan.load(run_dir.plan)
    except BundleUnreadable as error:
        if run_dir.root.is_dir() and not run_dir.is_sealed:
            write_preflight(run_dir, place, [Finding(Level.BLOCKING, "plan", "readable", error.problems[0].what)])
        raise


def _check_unfinished(run_dir: RunDir, *, is_resuming: bool) -> None:
    if run_dir.is_sealed:
        raise SpecError(Problem(str(run_dir.root), "is already complete and sealed", hint="submit a new run"))
    if not is_resuming and run_dir.trial_dirs():
        raise SpecError(
            Problem(str(run_dir.root), "holds trials of an earlier agent", expected="a new run directory",
                    hint="add --resume to run incomplete pairs again")
        )  # fmt: skip
