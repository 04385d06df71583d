"""Run the agent of a follower node until the leader ends."""

from __future__ import annotations

from functools import partial

from rlk_repro.agent.node import POLL_S, describe_node, has_ended, make_sampler, mark_ended, wait_for, write_preflight
from rlk_repro.agent.parts import NodePlace, Parts
from rlk_repro.agent.pulse import Listener, Pulse
from rlk_repro.agent.ray.follower import RayFollower
from rlk_repro.agent.ray.member import RayMember
from rlk_repro.agent.stop import Stop
from rlk_repro.agent.telemetry import Current
from rlk_repro.base.errors import EnvironmentMissing, Problem, code_after
from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_state


def follow_leader(plan: Plan, run_dir: RunDir, place: NodePlace, parts: Parts) -> int:
    """Follow the leader and return the exit code: 0, or 128 + n after signal n.

    Raises:
        EnvironmentMissing: the leader shows no sign of life.
    """
    stop = Stop()
    member = RayMember(plan=plan, run_dir=run_dir, place=place, parts=parts, stop=stop)
    with stop.installed():
        try:
            with Pulse(run_dir.pulse(place.node), parts.deadlines.pulse_s):
                shared = find_canary(run_dir, place, parts, stop)
                findings = describe_node(plan, run_dir, place, parts, stop, shared)
                with (
                    RayFollower(member) as ray,
                    make_sampler(plan, run_dir, place, partial(_find_current, run_dir, ray)),
                ):
                    silence_s = _follow(member, ray)
            if silence_s:
                _give_up(member, findings, silence_s)
        finally:
            mark_ended(run_dir, place)
    return code_after(stop.signal)


def find_canary(run_dir: RunDir, place: NodePlace, parts: Parts, stop: Stop) -> list[Finding]:
    """Return a blocking finding unless this node sees a file of the leader in the run directory."""
    leader, deadline_s = place.nodes[0], parts.deadlines.followers_s

    def is_there() -> bool:
        try:
            return run_dir.canary.read_text() == place.allocation
        except OSError:
            return False

    if wait_for(is_there, stop, deadline_s):
        return []
    expected = f"a file that node {leader} writes here within {deadline_s:g} s"
    return [Finding(Level.BLOCKING, "run directory", expected, "no file of this allocation")]


def _follow(member: RayMember, ray: RayFollower) -> float:
    """Return 0 after the leader's end or a signal; if the leader is lost, the seconds since its last sign of life."""
    run_dir, leader = member.run_dir, member.place.nodes[0]
    pulse = Listener(run_dir.pulse(leader))
    while not has_ended(run_dir, leader, member.place.allocation):
        ray.step()
        if (silence_s := pulse.measure_silence_s()) > member.parts.deadlines.lost_s:
            return silence_s
        if member.stop.wait(POLL_S):
            break
    return 0.0


def _give_up(member: RayMember, findings: list[Finding], silence_s: float) -> None:
    where, expected = f"nodes.{member.place.nodes[0]}", "a living agent"
    found = f"no sign of life for {silence_s:.0f} s"
    if not member.run_dir.is_sealed:
        write_preflight(member.run_dir, member.place, [*findings, Finding(Level.BLOCKING, where, expected, found)])
    raise EnvironmentMissing(Problem(where, found, expected=expected))


def _find_current(run_dir: RunDir, ray: RayFollower) -> Current:
    state = read_state(run_dir)
    return Current(trial=None if state is None else state.trial, session=ray.session)
