"""Run the agent of a node that does not lead: describe the node, then take part in the leader's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlk_repro.agent.lock import Listener
from rlk_repro.agent.node import POLL_S, describe_node, make_sampler, wait_for, write_preflight
from rlk_repro.agent.parts import NodePlace, Parts
from rlk_repro.agent.ray.member import RayMember
from rlk_repro.agent.step import Report, Stage, Step, read_step, write_report
from rlk_repro.agent.stop import Stop
from rlk_repro.agent.telemetry import Current
from rlk_repro.base.errors import EnvironmentMissing, Problem, code_after
from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_state


def follow_leader(plan: Plan, run_dir: RunDir, place: NodePlace, parts: Parts, stop: Stop) -> int:
    """Follow the leader and return the exit code: 0, or 128 + n after signal n.

    Raises:
        EnvironmentMissing: the leader shows no sign of life.
    """
    member = RayMember(plan=plan, run_dir=run_dir, place=place, parts=parts, stop=stop)
    follower = Follower(member)
    try:
        shared = _require_shared_folder(member)
        findings = describe_node(plan, run_dir, place, parts, stop, shared)
        with make_sampler(plan, run_dir, place, follower.find_current):
            silence_s = follower.run()
        if silence_s:
            _give_up(member, findings, silence_s)
    finally:
        follower.report(has_left=True)
    return code_after(stop.signal)


def _require_shared_folder(member: RayMember) -> list[Finding]:
    """Return a blocking finding unless this node sees the leader's file in the run directory."""
    place, deadline_s = member.place, member.parts.deadlines.followers_s
    if wait_for(lambda: _find_step(member) is not None, member.stop, deadline_s):
        return []
    expected = f"a file that node {place.nodes[0]} writes here within {deadline_s:g} s"
    return [Finding(Level.BLOCKING, "run directory", expected, "no file of this allocation")]


def _find_step(member: RayMember) -> Step | None:
    step = read_step(member.run_dir)
    return step if step is not None and step.allocation == member.place.allocation else None


def _give_up(member: RayMember, findings: list[Finding], silence_s: float) -> None:
    where, expected = f"nodes.{member.place.nodes[0]}", "a living agent"
    found = f"no sign of life for {silence_s:.0f} s"
    if not member.run_dir.is_sealed:
        last = Finding(Level.BLOCKING, where, expected, found)
        write_preflight(member.run_dir, member.place, [*findings, last])
    raise EnvironmentMissing(Problem(where, found, expected=expected))


class Follower:
    """Takes part in one step after the other, until the leader ends or is silent for too long."""

    def __init__(self, member: RayMember) -> None:
        self._member = member
        self._report = Report(allocation=member.place.allocation)
        self._session: int | None = None
        self._leader = Listener(member.run_dir.lock)
        self._has_led = False

    def run(self) -> float:
        """Return 0 after the leader's end or a signal, or else the seconds since the leader's last sign of life."""
        while self._member.stop.signal is None:
            step = _find_step(self._member)
            self._has_led = self._has_led or step is not None
            # a later allocation of this job leads now
            is_replaced = step is None and self._has_led
            if is_replaced or (step is not None and step.stage is Stage.ENDED):
                return 0.0
            if step is not None and step.number > self._report.number:
                self._take_part(step)
            elif self._is_silent():
                return self._leader.measure_silence_s()
            self._member.stop.wait(POLL_S)
        return 0.0

    def find_current(self) -> Current:
        state = read_state(self._member.run_dir)
        return Current(trial=None if state is None else state.trial, session=self._session)

    def report(self, **changes: object) -> None:
        report = replace(self._report, **changes)  # type: ignore[arg-type]
        if report != self._report:
            self._report = report
            write_report(self._member.run_dir, self._member.place.node, report)

    def _take_part(self, step: Step) -> None:
        """Run Ray on this node until the step is over; report the end even if Ray never started here."""
        self._report = Report(allocation=step.allocation, number=step.number)
        if not step.head:  # Ray is kept up by somebody else
            self._stay(step, lambda _: None)
            self.report(is_over=True)
            return
        node = self._member.make_node(step)

        def keep(now: Step) -> None:
            node.keep(is_joining=now.stage is Stage.JOINING)
            self._session = node.session
            self.report(reason="" if node.is_up else node.reason)

        last = self._stay(step, keep)
        self._session = None
        busy = self._member.put_away(node, last)
        self.report(is_over=True, busy=busy)

    def _stay(self, step: Step, keep: Callable[[Step], None]) -> Step:
        """Call ``keep`` until the step is over, and return the step as the leader left it."""
        while True:
            now = _find_step(self._member)
            if now is None or now.number != step.number:
                return step
            if now.stage in {Stage.OVER, Stage.ENDED}:
                return now
            keep(now)
            if self._is_silent() or self._member.stop.wait(POLL_S):
                return step

    def _is_silent(self) -> bool:
        return self._leader.measure_silence_s() > self._member.parts.deadlines.lost_s
