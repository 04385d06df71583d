"""Run the agent of a node that does not lead: describe the node, then take part in the leader's steps."""

from __future__ import annotations

from dataclasses import replace

from rlk_repro.agent.lock import Listener
from rlk_repro.agent.node import describe_node, find_late_busy, make_sampler, write_preflight
from rlk_repro.agent.parts import POLL_S, Agent
from rlk_repro.agent.ray.node import RayNode, make_ray_node
from rlk_repro.agent.step import Report, Stage, Step, read_step, write_report
from rlk_repro.base.errors import EnvironmentMissing, Problem, code_after
from rlk_repro.base.findings import Finding, Level
from rlk_repro.probes.telemetry import Current
from rlk_repro.rundir.state import read_state


class Follower:
    """Takes part in one step after the other, until the leader ends or is silent for too long."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._report = Report(allocation=agent.place.allocation, is_over=True)
        self._ray: RayNode | None = None
        self._leader = Listener(agent.run_dir.lock)
        self._findings: list[Finding] = []

    def run(self) -> int:
        """Follow the leader and return the exit code: 0, or 128 + n after signal n.

        Raises:
            EnvironmentMissing: the leader shows no sign of life, or this node does not share its run directory.
        """
        agent, deadline_s = self._agent, self._agent.deadlines.followers_s
        try:
            agent.wait_for(lambda: self._read_step() is not None, deadline_s)
            step = self._read_step()
            if step is not None:
                self._findings = describe_node(agent)
                with make_sampler(agent, self._find_current):
                    self._follow(step)
            elif agent.stop.signal is None:
                expected = f"a file that node {agent.place.nodes[0]} writes there within {deadline_s:g} s"
                raise EnvironmentMissing(
                    Problem(str(agent.run_dir.root), "holds no file of this allocation", expected=expected,
                            hint="is this a folder that all nodes of the job share?")
                )  # fmt: skip
        finally:
            self._tell(has_left=True)
        return code_after(agent.stop.signal)

    def _read_step(self) -> Step | None:
        return read_step(self._agent.run_dir, self._agent.place.allocation)

    def _find_current(self) -> Current:
        state = read_state(self._agent.run_dir)
        session = None if self._ray is None else self._ray.session
        return Current(trial=None if state is None else state.trial, session=session)

    def _follow(self, step: Step) -> None:
        while step.stage is not Stage.ENDED and self._agent.stop.signal is None:
            self._take_part(step)
            self._require_life(step)
            self._agent.stop.wait(POLL_S)
            found = self._read_step()
            if found is None:  # a later allocation of this job leads now
                break
            step = found
        if self._agent.stop.signal is not None:  # told before Ray ends here: the loss, not the trial, is the cause
            self._tell(has_left=True)
        self._leave(step)

    def _take_part(self, step: Step) -> None:
        """Run Ray on this node until the step is over; report the end even if Ray never started here."""
        if step.number > self._report.number:
            self._report = replace(self._report, number=step.number, is_over=False, reason="")
            self._ray = make_ray_node(self._agent, step)
        if step.stage is Stage.OVER:
            self._leave(step)
        elif self._ray is not None:
            self._ray.keep(is_joining=step.stage is Stage.JOINING)
            self._tell(reason="" if self._ray.is_up else self._ray.reason)

    def _leave(self, step: Step) -> None:
        if self._report.is_over:
            return
        if self._ray is not None:
            self._ray.put_away(step)
            self._ray = None
            self._note(find_late_busy(self._agent, step.use))
        if not self._report.has_left:
            self._tell(is_over=True)

    def _require_life(self, step: Step) -> None:
        silence_s = self._leader.measure_silence_s()
        if silence_s <= self._agent.deadlines.lost_s:
            return
        self._leave(step)
        problem = Problem(f"nodes.{self._agent.place.nodes[0]}", f"no sign of life for {silence_s:.0f} s",
                          expected="a living agent")  # fmt: skip
        self._note([Finding(Level.BLOCKING, problem.where, str(problem.expected), problem.what)])
        raise EnvironmentMissing(problem)

    def _note(self, findings: list[Finding]) -> None:
        if findings and not self._agent.run_dir.is_sealed:
            self._findings += findings
            write_preflight(self._agent.run_dir, self._agent.place, self._findings)

    def _tell(self, **changes: object) -> None:
        report = replace(self._report, **changes)  # type: ignore[arg-type]
        if report != self._report:
            self._report = report
            write_report(self._agent.run_dir, self._agent.place.node, report)
