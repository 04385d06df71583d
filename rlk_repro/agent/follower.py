"""Run the agent of a node that does not lead: describe the node, then take part in the leader's steps."""

from __future__ import annotations

from dataclasses import replace

from rlk_repro.agent.node import describe_node, find_late_busy, make_sampler, write_preflight
from rlk_repro.agent.parts import POLL_S, Agent
from rlk_repro.agent.ray.node import RayNode
from rlk_repro.agent.step import Report, Stage, Step, read_step, write_report
from rlk_repro.base.errors import EnvironmentMissing, Problem, code_after
from rlk_repro.base.findings import Finding
from rlk_repro.probes.telemetry import Current
from rlk_repro.rundir.state import read_state


class Follower:
    """Takes part in one step after the other, until the leader ends or a later allocation leads.

    A leader that is lost is the scheduler's business: it ends this agent too, or starts another allocation.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._report = Report(allocation=agent.place.allocation, is_over=True)
        self._ray: RayNode | None = None
        self._findings: list[Finding] = []

    def run(self) -> int:
        """Follow the leader and return the exit code: 0, or 128 + n after signal n.

        Raises:
            EnvironmentMissing: this node does not share its run directory with the leader.
        """
        agent, deadline_s = self._agent, self._agent.deadlines.followers_s
        try:
            if agent.wait_for(lambda: self._read_step() is not None, deadline_s):
                self._follow()
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
        """Return the leader's present step; None once a later allocation of this job leads."""
        return read_step(self._agent.run_dir, self._agent.place.allocation)

    def _find_current(self) -> Current:
        state = read_state(self._agent.run_dir)
        session = None if self._ray is None else self._ray.session
        return Current(trial=None if state is None else state.trial, session=session)

    def _follow(self) -> None:
        self._findings = describe_node(self._agent)
        with make_sampler(self._agent, self._find_current):
            while (step := self._read_step()) is not None and step.stage is not Stage.ENDED:
                self._take_part(step)
                if self._agent.stop.wait(POLL_S):
                    # told before Ray ends here: the loss, not the trial, is the cause
                    self._tell(has_left=True)
                    break
            self._leave()

    def _take_part(self, step: Step) -> None:
        """Run Ray on this node until the step is over; report the end even if Ray never started here."""
        if step.number > self._report.number:
            self._report = replace(self._report, number=step.number, is_over=False, reason="")
            self._ray = RayNode(self._agent, step)
        if step.stage is Stage.OVER:
            self._leave(keeps_logs=step.keeps_logs)
        elif self._ray is not None:
            self._ray.keep(is_joining=step.stage is Stage.JOINING)
            self._tell(reason="" if self._ray.is_up else self._ray.reason)

    def _leave(self, *, keeps_logs: bool = True) -> None:
        if self._ray is None:
            return
        self._ray.put_away(keeps_logs=keeps_logs)
        busy, self._ray = find_late_busy(self._agent, self._ray.use), None
        if busy and not self._agent.run_dir.is_sealed:
            self._findings += busy
            write_preflight(self._agent.run_dir, self._agent.place, self._findings)
        if not self._report.has_left:
            self._tell(is_over=True)

    def _tell(self, **changes: object) -> None:
        report = replace(self._report, **changes)  # type: ignore[arg-type]
        if report != self._report:
            self._report = report
            write_report(self._agent.run_dir, self._agent.place.node, report)
