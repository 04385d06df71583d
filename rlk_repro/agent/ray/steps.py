"""Run the leader's commands on all nodes: each command that needs Ray is a step in a Ray cluster of its own.

The loss of a node says nothing about the variant, so the trial counts as interrupted.  If Ray ends while the node's
agent still runs, the trial may be the cause, so the trial counts as failed.  On Kubernetes, KubeRay keeps one cluster
up for the whole allocation: no agent starts Ray, and each trial passes its environment to the workers.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from rlk_repro.agent.node import POLL_S
from rlk_repro.agent.ray.launch import SETTINGS, TOKEN_NAMES, require_tokens
from rlk_repro.agent.ray.member import RayMember
from rlk_repro.agent.ray.members import find_members
from rlk_repro.agent.ray.node import RayNode
from rlk_repro.agent.step import Stage, Step, Use, read_report, write_step
from rlk_repro.agent.trial import Outcome, TrialWatch
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import JOB_CONFIG, OVERRIDE_JOB_CONFIG, resolve_env

ADDRESS_VARIABLE: Final = "RLK_REPRO_RAY_ADDRESS"
"""Variable set by the process that started the agent: the address of a Ray cluster that the agent must not end."""
MEMBERS_S: Final = 30.0
# how often the leader reads the reports of the other nodes during a command
REPORTS_S: Final = 10.0


class Steps:
    """The leader's steps; ``lost`` maps each lost node to the reason."""

    def __init__(self, member: RayMember, record: Callable[..., object], note: Callable[[list[Finding]], None]) -> None:
        self.lost: dict[str, str] = {}
        self._member = member
        self._record = record
        self._note = note
        self._given = os.environ.get(ADDRESS_VARIABLE, "")
        self._step = Step(allocation=member.place.allocation)
        self._is_told = False

    def open(self) -> None:
        """Write a file that shows the other nodes that they share this run directory."""
        self._tell(self._step)

    def end(self) -> None:
        self._tell(replace(self._step, stage=Stage.ENDED))

    def _tell(self, step: Step) -> None:
        self._step = step
        if self._member.place.followers:
            write_step(self._member.run_dir, step)

    @contextmanager
    def serve(self, use: Use, command: Command) -> Iterator[TrialWatch]:
        """Run the block with a Ray cluster if the command needs Ray.

        Raises:
            EnvironmentMissing: Ray did not start on every node, or Ray takes commands without a token.
        """
        if not command.needs_ray:
            yield TrialWatch()
            return
        running = _Running(self._member, self._given, self._begin(use), command, self._tell)
        up, down = ("ray given", "ray left") if self._given else ("ray up", "ray down")
        try:
            started = time.monotonic()
            running.join()
            self._record(up, use=str(use), duration_s=time.monotonic() - started)
            yield TrialWatch(env=running.env, find_trouble=running.find_trouble, settle=running.settle)
        except EnvironmentMissing as error:
            self._note([_describe(f"{use}: {problem.where}", problem) for problem in error.problems])
            raise
        finally:
            running.close()
            self._record(down, use=str(use), duration_s=running.down_s)
            self.lost |= running.lost
            self._note(running.busy)

    def _begin(self, use: Use) -> Step:
        number, head = self._step.number + 1, ""
        if not self._given:
            require_tokens()
            member = self._member
            head = f"{member.find_address(member.place.followers)}:{member.plan.profile.ray.first_port}"
        elif not self._is_told:
            self._is_told = True
            expected, found = "a fresh Ray cluster for every trial", "one Ray cluster for all trials"
            self._note([Finding(Level.INFO, "ray", expected, found)])
        return Step(allocation=self._step.allocation, number=number, stage=Stage.JOINING, use=use, head=head)


def _describe(where: str, problem: Problem) -> Finding:
    return Finding(Level.BLOCKING, where, str(problem.expected), problem.what)


class _Running:
    """One step on all nodes, from joining to the end of its Ray."""

    def __init__(
        self, member: RayMember, given: str, step: Step, command: Command, tell: Callable[[Step], None]
    ) -> None:
        self.busy: list[Finding] = []
        self.lost: dict[str, str] = {}
        self.down_s: float | None = None
        self._ended: dict[str, str] = {}
        self._member = member
        self._step = step
        self._tell = tell
        self._next_look = 0.0
        self._own: RayNode | None = None
        if given:
            self.env = render_given_env(given, command, dict(os.environ))
            self._address, self._asking = given, {**os.environ, **SETTINGS}
        else:
            self._own = member.make_node(step)
            self.env = self._own.client_env | {"RAY_ADDRESS": step.head}
            self._address, self._asking = step.head, resolve_env(command, os.environ) | self.env

    def join(self) -> None:
        """Start the step on all nodes, and wait until Ray knows them all.

        Raises:
            EnvironmentMissing: a node did not join in time.
        """
        place, deadlines = self._member.place, self._member.parts.deadlines
        if self._own is not None:
            self._write_token()
        self._enter(Stage.JOINING)
        until = time.monotonic() + deadlines.ray_up_s
        known: tuple[str, ...] = ()
        while len(known) < len(place.nodes) and (left_s := until - time.monotonic()) > 0:
            if self._own is not None:
                self._own.keep(is_joining=True)
            self._read_reports()
            if self.lost or self._member.stop.wait(POLL_S):
                break
            if self._own is None or self._own.is_up:
                known = find_members(self._address, len(place.nodes), min(left_s, MEMBERS_S), self._asking)
        if self._member.stop.signal is None and (self.lost or len(known) < len(place.nodes)):
            raise EnvironmentMissing(*self._explain_absence(known))
        self._next_look = time.monotonic() + REPORTS_S
        self._enter(Stage.RUNNING)

    def find_trouble(self) -> str:
        if self._own is not None:
            self._own.keep(is_joining=False)
            if not self._own.is_up:
                self._ended[self._member.place.node] = self._own.reason
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + REPORTS_S
            self._read_reports()
        return self._describe_trouble()

    def settle(self, outcome: Outcome) -> Outcome:
        """Name a lost node in the outcome, because the trainer's log seldom names the node."""
        self.find_trouble()
        # most of a bundle's files would be Ray's logs, and the trainer's log already has what the workers print
        self._step = replace(self._step, keeps_logs=outcome.status is not TrialStatus.OK)
        self.close()
        return outcome.with_trouble(self._describe_trouble(), is_interrupted=bool(self.lost))

    def close(self) -> None:
        """End the step on all nodes; a node that does not report its end is lost."""
        if self.down_s is not None:
            return
        started = time.monotonic()
        self._enter(Stage.OVER)
        # the head ends last: without it, Ray on the other nodes would end by itself, as if the trial were the cause
        self._wait_for_followers()
        member = self._member
        if self._own is not None:
            was_up = self._own.is_up
            self._note_busy(member.place.node, member.put_away(self._own, self._step))
            if not was_up and self._own.reason:
                self._ended[member.place.node] = self._own.reason
        member.run_dir.ray_token.unlink(missing_ok=True)
        self.down_s = time.monotonic() - started

    def _enter(self, stage: Stage) -> None:
        self._step = replace(self._step, stage=stage)
        self._tell(self._step)

    def _wait_for_followers(self) -> None:
        deadlines = self._member.parts.deadlines
        limit_s = deadlines.grace_s + deadlines.idle_s + deadlines.ray_down_s
        until = time.monotonic() + limit_s
        while waiting := self._read_reports():
            if time.monotonic() >= until:
                reason = f"its agent did not report the end of the step within {limit_s:g} s"
                self.lost |= dict.fromkeys(waiting, reason)
            elif self._member.stop.wait(POLL_S):
                return

    def _read_reports(self) -> list[str]:
        """Read what the other nodes tell, and return those on which this step is not over."""
        waiting = []
        for node in self._member.place.followers:
            report = read_report(self._member.run_dir, node, self._step.allocation)
            if report.number == self._step.number and report.reason and self._step.stage is not Stage.JOINING:
                self._ended[node] = report.reason
            if report.number == self._step.number and report.is_over:
                self._note_busy(f"nodes.{node}", report.busy)
            elif report.has_left:
                self.lost[node] = "the node's agent has ended"
            elif node not in self.lost:
                waiting.append(node)
        return waiting

    def _note_busy(self, where: str, gpus: tuple[str, ...]) -> None:
        for gpu in gpus:
            finding = Finding(Level.WARNING, f"{self._step.use}: {where}.gpu", "idle", gpu)
            if finding not in self.busy:
                self.busy.append(finding)

    def _describe_trouble(self) -> str:
        found = [f"node {node} is lost: {reason}" for node, reason in self.lost.items()]
        found += [f"Ray ended on node {node}: {reason}" for node, reason in self._ended.items()]
        return "; ".join(found)

    def _explain_absence(self, known: tuple[str, ...]) -> Iterator[Problem]:
        place, deadline_s = self._member.place, self._member.parts.deadlines.ray_up_s
        if self.lost:
            for node, reason in self.lost.items():
                yield Problem(f"nodes.{node}", f"is lost: {reason}", expected="a living agent")
            return
        if self._own is None:
            expected = f"{len(place.nodes)} nodes within {deadline_s:g} s"
            yield Problem(f"Ray at {self._address}", "lacks nodes", got=list(known), expected=expected)
            return
        expected = f"a node that joins Ray's head {self._step.head} within {deadline_s:g} s"
        absent = [node for node in place.nodes if node not in known] if self._own.is_up else [place.node]
        for node in absent:
            report = read_report(self._member.run_dir, node, self._step.allocation)
            reason = self._own.reason if node == place.node else report.reason
            reason = reason or "not known to Ray's head"
            yield Problem(f"nodes.{node}", f"did not join: {reason}", expected=expected)

    def _write_token(self) -> None:
        path = self._member.run_dir.ray_token
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as stream:
            stream.write(secrets.token_hex(32))


def render_given_env(address: str, command: Command, outside: dict[str, str]) -> dict[str, str]:
    """Return the variables by which a trial reaches a Ray that already runs, and by which its workers get their own."""
    inner = resolve_env(command, outside)
    own = {name: value for name, value in inner.items() if outside.get(name) != value}
    asked: Any = json.loads(own.pop(JOB_CONFIG, "{}")).get("runtime_env", {})
    config = {"runtime_env": {**asked, "env_vars": own}, "metadata": {}}
    # a trial gets the token of this Ray cluster, but no other token of the agent's environment
    token = {name: outside[name] for name in TOKEN_NAMES if name in outside}
    return {
        **SETTINGS,
        **token,
        "RAY_ADDRESS": address,
        JOB_CONFIG: json.dumps(config, sort_keys=True),
        OVERRIDE_JOB_CONFIG: "1",
    }
