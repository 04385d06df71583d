"""Run the leader's commands on all nodes: each command that needs Ray is a step in a Ray cluster of its own.

What becomes of a lost node: its agent is killed or says that it ends (``Report.has_left``), or it does not say that the
step is over.  The trial then counts as interrupted, because the loss says nothing about its variant; the leader packs
and ends.  On Slurm, ``srun --kill-on-bad-exit`` ends all agents, and the batch script packs; on Kubernetes, the leading
pod (``job/pod.py``) waits for a new pod and continues.  If only Ray ends on a node, the trial may be the cause, so it
counts as failed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rlk_repro.agent.parts import Agent
from rlk_repro.agent.ray.members import find_members
from rlk_repro.agent.ray.node import RayNode, find_first_port, find_own_address, require_tokens
from rlk_repro.agent.step import Stage, Step, read_report, write_step
from rlk_repro.agent.trial import Outcome, TrialWatch
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import resolve_env


class Steps:
    """The leader's steps.

    ``lost`` maps each lost node to the reason; ``_ended``, each node where this step's Ray has ended.
    """

    def __init__(self, agent: Agent, record: Callable[..., object], note: Callable[[list[Finding]], None]) -> None:
        self.lost: dict[str, str] = {}
        self._agent = agent
        self._record = record
        self._note = note
        self._step = Step(allocation=agent.place.allocation)
        self._ray: RayNode | None = None
        self._ended: dict[str, str] = {}

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
        self._ray = ray = self._begin(use)
        try:
            self._join(ray, resolve_env(command, os.environ) | ray.client_env)
            self._record("ray up", use=use, duration_s=time.monotonic() - started)
            yield TrialWatch(env=ray.client_env, find_trouble=self.find_trouble, settle=self.settle)
        except EnvironmentMissing as error:
            for problem in error.problems:
                where = f"{use}: {problem.where}"
                self._note([Finding(Level.BLOCKING, where, str(problem.expected), problem.what)])
            raise
        finally:
            self._close()
        if self.lost and self._agent.stop.signal is None:
            raise EnvironmentMissing(*self._describe_lost())

    def _begin(self, use: str) -> RayNode:
        """Prepare Ray and its token for the next step."""
        require_tokens()
        agent, self._ended = self._agent, {}
        address = find_own_address(agent, agent.place.followers)
        head = f"{address}:{find_first_port(agent.plan.profile)}"
        self._step = Step(allocation=agent.place.allocation, number=self._step.number + 1, use=use, head=head)
        token = agent.run_dir.ray_token
        token.unlink(missing_ok=True)
        token.parent.mkdir(exist_ok=True)
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(secrets.token_hex(32))
        return RayNode(agent, self._step)

    def _join(self, ray: RayNode, env: dict[str, str]) -> None:
        """Start the step on all nodes, and wait until Ray knows them all."""
        agent, known = self._agent, set[str]()

        def is_decided() -> bool:
            self._look()
            if ray.is_up and not self.lost:
                known.update(find_members(self._step.head, env))
            return bool(self.lost) or known.issuperset(agent.place.nodes)

        self.enter(Stage.JOINING)
        agent.wait_for(is_decided, agent.deadlines.ray_up_s)
        if agent.stop.signal is None and (self.lost or not known.issuperset(agent.place.nodes)):
            raise EnvironmentMissing(*(self._describe_lost() or self._describe_absent(known)))
        self.enter(Stage.RUNNING)

    def find_trouble(self) -> str:
        self._look()
        found = [f"node {node} is lost: {reason}" for node, reason in self.lost.items()]
        found += [f"Ray ended on node {node}: {reason}" for node, reason in self._ended.items()]
        return "; ".join(found)

    def settle(self, outcome: Outcome) -> Outcome:
        """Name a lost node in the outcome, because the trainer's log seldom names the node."""
        # most of a bundle's files would be Ray's logs, and the trainer's log already has what the workers print
        self._step = replace(self._step, keeps_logs=outcome.status is not TrialStatus.OK)
        self._close()
        trouble = self.find_trouble()
        if outcome.status is TrialStatus.OK or not trouble:
            return outcome
        status = TrialStatus.INTERRUPTED if self.lost else outcome.status
        reason = outcome.reason if outcome.ended.trouble else f"{trouble}; {outcome.reason}"
        return replace(outcome, status=status, reason=reason)

    def _close(self) -> None:
        """End the step on all nodes; a node that does not report its end is lost."""
        if self._ray is None:
            return
        started, deadlines = time.monotonic(), self._agent.deadlines
        self.enter(Stage.OVER)
        # the head ends last: without it, Ray on the other nodes would end by itself, as if the trial were the cause
        limit_s = deadlines.grace_s + deadlines.idle_s + deadlines.ray_down_s
        if not self._agent.wait_for(lambda: not self._look(), limit_s) and self._agent.stop.signal is None:
            reason = f"its agent did not report the end of the step within {limit_s:g} s"
            self.lost |= dict.fromkeys(self._look(), reason)
        self._ray.put_away(keeps_logs=self._step.keeps_logs)
        self._ray = None
        self._agent.run_dir.ray_token.unlink(missing_ok=True)
        self._record("ray down", use=self._step.use, duration_s=time.monotonic() - started)

    def _look(self) -> list[str]:
        """Look how the step goes on every node, and return the other nodes on which it is not over."""
        place, waiting = self._agent.place, []
        found = {}
        if self._ray is not None:
            self._ray.keep(is_joining=self._step.stage is Stage.JOINING)
            found[place.node] = "" if self._ray.is_up else self._ray.reason
        for node in place.followers:
            report = read_report(self._agent.run_dir, node, self._step.allocation)
            is_present = report.number == self._step.number
            if is_present:
                found[node] = report.reason
            if is_present and report.is_over:
                continue
            if report.has_left:
                self.lost[node] = "the node's agent has ended"
            elif node not in self.lost:
                waiting.append(node)
        self._ended = {node: reason for node, reason in (self._ended | found).items() if reason}
        return waiting

    def _describe_lost(self) -> list[Problem]:
        lost = self.lost.items()
        return [Problem(f"nodes.{node}", f"is lost: {reason}", expected="a living agent") for node, reason in lost]

    def _describe_absent(self, known: set[str]) -> list[Problem]:
        """Say why nodes did not join; without Ray's head, none could."""
        place, deadline_s = self._agent.place, self._agent.deadlines.ray_up_s
        expected = f"a node that joins Ray's head {self._step.head} within {deadline_s:g} s"
        absent = [node for node in place.nodes if node not in known]
        if place.node in self._ended:
            absent = [place.node]
        reasons = {node: self._ended.get(node, "not known to Ray's head") for node in absent}
        return [Problem(f"nodes.{node}", f"did not join: {why}", expected=expected) for node, why in reasons.items()]
