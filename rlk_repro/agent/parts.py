"""Define an agent: its plan, its place among the nodes, its time limits, and the functions that it calls."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.secrets import Scrubber
from rlk_repro.base.stop import Stop
from rlk_repro.plan import Plan
from rlk_repro.probes.address import find_address
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads.api import Workload
from rlk_repro.workloads.environment import profile_env

POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """The place of one agent among a job's ``nodes``, of which the first is the leader.

    The leader runs the trials; a follower describes and watches its node.  The last pair must end by ``until`` (Unix
    seconds); 0 means no limit.
    """

    node: str
    nodes: tuple[str, ...]
    allocation: str
    until: float = 0.0

    @property
    def is_leader(self) -> bool:
        return self.node == self.nodes[0]

    @property
    def followers(self) -> tuple[str, ...]:
        return self.nodes[1:]


def make_place(node: str, nodes: tuple[str, ...], allocation: str | None, until: float = 0.0) -> NodePlace:
    """Check an agent's arguments, and return them as a ``NodePlace``; a job with one node needs no ``allocation``.

    Raises:
        SpecError: a name cannot be that of a folder, or ``node`` is not in ``nodes``.
    """
    for name in nodes:
        if not name or "/" in name or name.startswith("."):
            raise SpecError(Problem("--nodes", "is not a node name", got=name, expected="a name without a slash"))
    if node not in nodes:
        raise SpecError(Problem("--node", "not among --nodes", got=node, expected=f"one of {', '.join(nodes)}"))
    return NodePlace(node=node, nodes=nodes, allocation=allocation or uuid.uuid4().hex, until=until)


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """The agent's time limits in seconds.

    The leader changes its lock file every ``pulse_s``.  To another agent that wants to lead, it counts as ended after
    ``silent_s`` without a change.  ``handover_s``: how long an agent waits for one of an earlier allocation.
    ``shared_s`` stands for ``idle_s`` where runs share GPUs.
    """

    grace_s: float = 20.0
    idle_s: float = 120.0
    shared_s: float = 5.0
    followers_s: float = 1800.0
    followers_end_s: float = 60.0
    pulse_s: float = 5.0
    silent_s: float = 30.0
    handover_s: float = 900.0
    ray_up_s: float = 300.0
    ray_retry_s: float = 10.0
    ray_down_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The functions that an agent calls; tests replace them."""

    workload: Workload
    probe_node: Callable[[str], Manifest]
    busy_gpus: Callable[[], list[GpuUse] | Unknown]
    analyse: Callable[[RunDir], dict[str, Any]]
    seal: Callable[[RunDir], object]
    pack: Callable[[RunDir], Path]
    find_address: Callable[[str, Sequence[str], str | None], str] = find_address
    find_runs: Callable[[], tuple[list[str], list[str]]] = lambda: ([], [])
    deadlines: Deadlines = Deadlines()


def real_parts(workload: Workload) -> Parts:
    from rlk_repro.bundle.seal import pack, seal
    from rlk_repro.probes.gpu import busy_gpus
    from rlk_repro.probes.host import find_runs
    from rlk_repro.probes.node import probe_node

    return Parts(
        workload=workload,
        probe_node=probe_node,
        busy_gpus=busy_gpus,
        analyse=_analyse,
        seal=seal,
        pack=pack,
        find_runs=lambda: find_runs(Path("/"), os.getpid()),
    )


def _analyse(run_dir: RunDir) -> dict[str, Any]:
    from rlk_repro.analysis.analyse import analyse

    return analyse(run_dir).to_json()


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One node's agent: what it runs, where, and with which parts; ``stop`` receives the signals."""

    plan: Plan
    run_dir: RunDir
    place: NodePlace
    parts: Parts
    stop: Stop

    @property
    def deadlines(self) -> Deadlines:
        return self.parts.deadlines

    def make_scrubber(self) -> Scrubber:
        return Scrubber.from_environment(named=profile_env(self.plan)[1].values())

    def wait_for(self, is_there: Callable[[], bool], deadline_s: float) -> bool:
        """Poll until ``is_there`` returns true, the deadline passes or a signal asks the agent to stop."""
        until = time.monotonic() + deadline_s
        while not is_there():
            if time.monotonic() >= until or self.stop.wait(POLL_S):
                return False
        return True
