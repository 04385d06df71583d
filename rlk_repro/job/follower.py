"""The agent of a node that does not lead: describe the node, watch it, and end when the leader does."""

from __future__ import annotations

import math

from rlk_repro.job.node import describe_node, has_ended, make_sampler, mark_ended, wait_for
from rlk_repro.job.parts import Parts, Place
from rlk_repro.job.progress import read_state
from rlk_repro.job.stop import Stop
from rlk_repro.job.telemetry import Current
from rlk_repro.plan import Plan
from rlk_repro.rundir import RunDir


def follow_leader(plan: Plan, run_dir: RunDir, place: Place, parts: Parts) -> int:
    """Exit code: 0, or 128 + n after signal n.  The leader judges this node's findings."""
    stop = Stop()
    leader = place.nodes[0]
    with stop.installed():
        try:
            describe_node(plan, run_dir, place, parts, stop)
            with make_sampler(plan, run_dir, place, lambda: _find_current(run_dir)):
                wait_for(lambda: has_ended(run_dir, leader, place.allocation), stop, math.inf)
        finally:
            mark_ended(run_dir, place)
    return 0 if stop.signal is None else 128 + stop.signal


def _find_current(run_dir: RunDir) -> Current:
    state = read_state(run_dir)
    return Current(trial=None if state is None else state.trial)
