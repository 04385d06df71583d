"""Run the leader's commands on all nodes: each command that needs Ray is a step in a Ray cluster of its own.

The loss of a node says nothing about the variant, so the trial counts as interrupted.  If Ray ends while the node's
agent still runs, the trial may be the cause, so the trial counts as failed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from rlk_repro.agent.parts import POLL_S, Agent
from rlk_repro.agent.ray.launch import require_tokens
from rlk_repro.agent.ray.members import find_members
from rlk_repro.agent.ray.node import RayNode, find_own_address, make_ray_node
from rlk_repro.agent.step import Stage, Step, read_report, write_step
from rlk_repro.agent.trial import Outcome, TrialWatch
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import resolve_env

# how often the leader reads the reports of the other nodes during a command
REPORTS_S: Final = 10.0


class Steps:
    """The leader's steps; ``lost`` maps each lost node to the reason."""

    def __init__(self, agent: Agent, record: Callable[..., object], note: Callable[[list[Finding]], None]) -> None:
        self.lost: dict[str, str] = {}
        self._agent = agent
        self._record = record
        self._note = note
        self._step = Step(allocation=agent.place.allocation)
        self._ray: RayNode | None = None
        self._ended: dict[str, str] = {}
        self._next_look = 0.0

    def enter(self, stage: Stage) -> None:
        """Tell the other nodes; the first stage, ``waiting``, shows them that they share this run directory."""
        self._step = replace(self._step, stage=stage)
        if self._agent.place.followers:
            write_step(self._agent.run_dir, self._step)

    @contextmanager
    def serve(self, use: str, command: Command) -> Iterator[TrialWatch]:
        """Run the block with a Ray cluster if the command needs Ray.

        Raises:
            EnvironmentMissing: Ray did not start on every node, Ray takes commands without a token, or a node is lost.
        """
        if not command.needs_ray:
            yield TrialWatch()
            return
        started = time.monotonic()
        ray = self._begin(use)
        try:
            self._join(ray, resolve_env(command, os.environ) | ray.client_env)
            self._record("ray up", use=use, duration_s=time.monotonic() - started)
            yield TrialWatch(env=ray.client_env, find_trouble=self.find_trouble, settle=self.settle)
        except EnvironmentMissing as error:
            self._note(
                [
                    Finding(Level.BLOCKING, f"{use}: {problem.where}", str(problem.expected), problem.what)
                    for problem in error.problems
                ]
            )
            raise
        finally:
            self._close()
        if self.lost and self._agent.stop.signal is None:
            raise EnvironmentMissing(*self._describe_lost())

    def _begin(self, use: str) -> RayNode:
        """Prepare Ray and its token for the next step."""
        require_tokens()
        agent, self._ended = self._agent, {}
        head = f"{find_own_address(agent, agent.place.followers)}:{agent.plan.profile.ray.first_port}"
        self._step = Step(allocation=agent.place.allocation, number=self._step.number + 1, use=use, head=head)
        agent.run_dir.ray_token.unlink(missing_ok=True)
        agent.run_dir.ray_token.parent.mkdir(exist_ok=True)
        handle = os.open(agent.run_dir.ray_token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as stream:
            stream.write(secrets.token_hex(32))
        self._ray = make_ray_node(agent, self._step)
        return self._ray

    def _join(self, ray: RayNode, env: dict[str, str]) -> None:
        """Start the step on all nodes, and wait until Ray knows them all."""
        agent = self._agent
        num_nodes, until = len(agent.place.nodes), time.monotonic() + agent.deadlines.ray_up_s
        known: tuple[str, ...] = ()
        self.enter(Stage.JOINING)
        while len(known) < num_nodes and time.monotonic() < until:
            ray.keep(is_joining=True)
            self._read_reports()
            if self.lost or agent.stop.wait(POLL_S):
                break
            if ray.is_up:
                known = find_members(self._step.head, env)
        if agent.stop.signal is None and (self.lost or len(known) < num_nodes):
            raise EnvironmentMissing(*(self._describe_lost() or self._explain_absence(ray, known)))
        self._next_look = time.monotonic() + REPORTS_S
        self.enter(Stage.RUNNING)

    def find_trouble(self) -> str:
        self._look_at_own_ray()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + REPORTS_S
            self._read_reports()
        return self._describe_trouble()

    def settle(self, outcome: Outcome) -> Outcome:
        """Name a lost node in the outcome, because the trainer's log seldom names the node."""
        self._look_at_own_ray()
        # most of a bundle's files would be Ray's logs, and the trainer's log already has what the workers print
        self._step = replace(self._step, keeps_logs=outcome.status is not TrialStatus.OK)
        self._close()
        trouble = self._describe_trouble()
        if outcome.status is TrialStatus.OK or not trouble:
            return outcome
        status = TrialStatus.INTERRUPTED if self.lost else outcome.status
        reason = outcome.reason if outcome.ended.trouble else f"{trouble}; {outcome.reason}"
        return replace(outcome, status=status, reason=reason)

    def _look_at_own_ray(self) -> None:
        if self._ray is not None:
            self._ray.keep(is_joining=False)
            if not self._ray.is_up and self._ray.reason:
                self._ended[self._agent.place.node] = self._ray.reason

    def _close(self) -> None:
        """End the step on all nodes; a node that does not report its end is lost."""
        if self._ray is None:
            return
        started = time.monotonic()
        self.enter(Stage.OVER)
        # the head ends last: without it, Ray on the other nodes would end by itself, as if the trial were the cause
        limit_s = self._agent.deadlines.grace_s + self._agent.deadlines.idle_s + self._agent.deadlines.ray_down_s
        if not self._agent.wait_for(lambda: not self._read_reports(), limit_s) and self._agent.stop.signal is None:
            reason = f"its agent did not report the end of the step within {limit_s:g} s"
            self.lost |= dict.fromkeys(self._read_reports(), reason)
        self._look_at_own_ray()
        self._ray.put_away(self._step)
        self._ray = None
        self._agent.run_dir.ray_token.unlink(missing_ok=True)
        self._record("ray down", use=self._step.use, duration_s=time.monotonic() - started)

    def _read_reports(self) -> list[str]:
        """Read what the other nodes tell, and return those on which this step is not over."""
        waiting = []
        for node in self._agent.place.followers:
            report = read_report(self._agent.run_dir, node, self._step.allocation)
            is_present = report.number == self._step.number
            if is_present and report.reason and self._step.stage is not Stage.JOINING:
                self._ended[node] = report.reason
            if is_present and report.is_over:
                continue
            if report.has_left:
                self.lost[node] = "the node's agent has ended"
            elif node not in self.lost:
                waiting.append(node)
        return waiting

    def _describe_trouble(self) -> str:
        found = [f"node {node} is lost: {reason}" for node, reason in self.lost.items()]
        found += [f"Ray ended on node {node}: {reason}" for node, reason in self._ended.items()]
        return "; ".join(found)

    def _describe_lost(self) -> list[Problem]:
        return [
            Problem(f"nodes.{node}", f"is lost: {reason}", expected="a living agent")
            for node, reason in self.lost.items()
        ]

    def _explain_absence(self, ray: RayNode, known: tuple[str, ...]) -> list[Problem]:
        place, deadline_s = self._agent.place, self._agent.deadlines.ray_up_s
        expected = f"a node that joins Ray's head {self._step.head} within {deadline_s:g} s"
        problems = []
        for node in place.nodes if ray.is_up else place.nodes[:1]:
            if node not in known:
                report = read_report(self._agent.run_dir, node, self._step.allocation)
                reason = ray.reason if node == place.node else report.reason
                reason = reason or "not known to Ray's head"
                problems.append(Problem(f"nodes.{node}", f"did not join: {reason}", expected=expected))
        return problems
