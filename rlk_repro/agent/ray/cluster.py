"""Start Ray on all nodes before a command, and end Ray after the command.

The loss of a node says nothing about the variant, so the trial counts as interrupted.  If Ray ends while the node's
agent still runs, the trial may be the cause, so the trial counts as failed.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rlk_repro.agent.node import POLL_S
from rlk_repro.agent.ray.census import parse_names
from rlk_repro.agent.ray.launch import SETTINGS, require_tokens
from rlk_repro.agent.ray.marks import Condition, RayOrder, Report, Use, Want, read_report, write_mark
from rlk_repro.agent.ray.member import RayMember
from rlk_repro.agent.trial import Outcome, TrialWatch
from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import resolve_env

CENSUS_S: Final = (5.0, 60.0)


class RayClusters:
    """Start a new Ray cluster for each command; ``lost`` maps each lost node to the reason."""

    def __init__(self, member: RayMember, record: Callable[..., object], note: Callable[[list[Finding]], None]) -> None:
        self.lost: dict[str, str] = {}
        self._member = member
        self._record = record
        self._note = note
        self._number = 0

    @contextmanager
    def serve(self, use: Use, command: Command) -> Iterator[TrialWatch]:
        """Run the block with a Ray cluster if the command needs Ray.

        Raises:
            EnvironmentMissing: Ray did not start on every node, or Ray takes commands without a token.
        """
        if not command.needs_ray:
            yield TrialWatch()
            return
        require_tokens()
        self._number += 1
        cluster = _Cluster(self._member, use, command, self._number)
        try:
            started = time.monotonic()
            cluster.bring_up()
            self._record("ray up", use=str(use), duration_s=time.monotonic() - started)
            yield TrialWatch(env=cluster.env, find_trouble=cluster.find_trouble, settle=cluster.settle)
        except EnvironmentMissing as error:
            self._note(
                [
                    Finding(Level.BLOCKING, f"{use}: {problem.where}", str(problem.expected), problem.what)
                    for problem in error.problems
                ]
            )
            raise
        finally:
            cluster.take_down()
            self._record("ray down", use=str(use), duration_s=cluster.down_s)
            self.lost |= cluster.lost
            self._note(cluster.busy)


class _Cluster:
    def __init__(self, member: RayMember, use: Use, command: Command, number: int) -> None:
        self.busy: list[Finding] = []
        self.lost: dict[str, str] = {}
        self._member = member
        self._command = command
        self.down_s: float | None = None
        self._ended: dict[str, str] = {}
        place, settings = member.place, member.plan.profile.ray
        address = member.parts.find_address(place.node, place.followers, settings.interface)
        head = f"{address}:{settings.first_port}"
        self._order = RayOrder(allocation=place.allocation, number=number, want=Want.JOIN, use=use, head=head)
        self._seat = member.make_seat(address, head)
        self._own = member.make_node(self._seat, use)
        self._followers = member.make_followers()

    @property
    def env(self) -> dict[str, str]:
        return SETTINGS | self._member.make_env(self._seat, self._command) | {"RAY_ADDRESS": self._order.head}

    def bring_up(self) -> None:
        until = time.monotonic() + self._member.parts.deadlines.ray_up_s
        self._write_token()
        self._give(Want.JOIN)
        absent: list[Problem] = []
        while time.monotonic() < until and not self._member.stop.wait(POLL_S):
            self._own.keep(is_joining=True)
            self._require_followers()
            absent = self._find_absent(until)
            if not absent:
                self._give(Want.HOLD)
                return
        if self._member.stop.signal is None:
            raise EnvironmentMissing(*absent)

    def find_trouble(self) -> str:
        self._own.keep(is_joining=False)
        if not self._own.is_up:
            self._ended[self._member.place.node] = self._own.reason
        for node in self._member.place.followers:
            report = self._read_report(node)
            if report is not None and report.condition is Condition.ENDED:
                self._ended[node] = report.reason
            elif reason := self._find_loss(node):
                self.lost[node] = reason
        return self._describe_trouble()

    def settle(self, outcome: Outcome) -> Outcome:
        """Name a lost node in the outcome, because the trainer's log seldom names the node."""
        self.find_trouble()
        # most of a bundle's files would be Ray's logs, and the trainer's log already has what the workers print
        self._order = dataclasses.replace(self._order, keeps_logs=outcome.status is not TrialStatus.OK)
        self.take_down()
        return outcome.with_trouble(self._describe_trouble(), is_interrupted=bool(self.lost))

    def take_down(self) -> None:
        if self.down_s is not None:
            return
        started = time.monotonic()
        self._give(Want.DOWN)
        self._wait_for_followers()
        self._own.keep(is_joining=False)
        if not self._own.is_up and self._own.reason:
            self._ended[self._member.place.node] = self._own.reason
        self._note_busy(self._member.place.node, self._member.put_away(self._own, self._order))
        self._member.run_dir.ray_token.unlink(missing_ok=True)
        self.down_s = time.monotonic() - started

    def _wait_for_followers(self) -> None:
        deadlines = self._member.parts.deadlines
        until = time.monotonic() + deadlines.grace_s + deadlines.idle_s + deadlines.ray_down_s
        waiting = [node for node in self._member.place.followers if node not in self.lost]
        while waiting := [node for node in waiting if not self._is_put_away(node)]:
            if time.monotonic() >= until:
                self.lost |= dict.fromkeys(waiting, "the node's agent did not report the end of Ray")
                return
            if self._member.stop.wait(POLL_S):
                return

    def _is_put_away(self, node: str) -> bool:
        report = self._read_report(node)
        if report is not None and report.condition is Condition.DOWN:
            if report.reason:
                self._ended[node] = report.reason
            self._note_busy(f"nodes.{node}", report.busy)
            return True
        if reason := self._find_loss(node):
            self.lost[node] = reason
        return node in self.lost

    def _note_busy(self, where: str, busy: tuple[str, ...]) -> None:
        self.busy += [Finding(Level.WARNING, f"{self._order.use}: {where}.gpu", "idle", gpu) for gpu in busy]

    def _describe_trouble(self) -> str:
        found = [f"node {node} is lost: {reason}" for node, reason in self.lost.items()]
        found += [f"Ray ended on node {node}: {reason}" for node, reason in self._ended.items()]
        return "; ".join(found)

    def _require_followers(self) -> None:
        for node in self._member.place.followers:
            if reason := self._find_loss(node):
                self.lost[node] = reason
        if self.lost:
            raise EnvironmentMissing(
                *(Problem(f"nodes.{node}", f"is lost: {reason}", expected="a living agent")
                  for node, reason in self.lost.items())
            )  # fmt: skip

    def _find_loss(self, node: str) -> str:
        report = self._read_report(node)
        if report is not None and report.condition is Condition.LEFT:
            return "the node's agent has ended"
        return self._followers.find_loss(node)

    def _find_absent(self, until: float) -> list[Problem]:
        place = self._member.place
        reports = {node: self._read_report(node) for node in place.followers}
        reasons = {node: "no report" if report is None else report.reason for node, report in reports.items()}
        reasons[place.node] = self._own.reason
        if not self._own.is_up:
            return [self._explain_absence(place.node, reasons[place.node])]
        absent = [node for node, report in reports.items() if report is None or report.condition is not Condition.UP]
        absent = absent or self._ask_head_for_absent(until - time.monotonic())
        return [self._explain_absence(node, reasons[node] or "not known to Ray's head") for node in absent]

    def _explain_absence(self, node: str, reason: str) -> Problem:
        deadline_s = self._member.parts.deadlines.ray_up_s
        expected = f"a node that joins Ray's head {self._order.head} within {deadline_s:g} s"
        return Problem(f"nodes.{node}", f"did not join: {reason}", expected=expected)

    def _ask_head_for_absent(self, left_s: float) -> list[str]:
        env = resolve_env(self._command, os.environ) | self.env
        argv = [sys.executable, "-m", "rlk_repro.agent.ray.census", self._order.head]
        answer = proc.run(argv, timeout_s=min(max(left_s, CENSUS_S[0]), CENSUS_S[1]), env=env)
        known = parse_names(answer.stdout) if answer.is_ok else ()
        return [node for node in self._member.place.nodes if node not in known]

    def _read_report(self, node: str) -> Report | None:
        path = self._member.run_dir.ray_report(node)
        return read_report(path, self._order.allocation, self._order.number)

    def _give(self, want: Want) -> None:
        self._order = dataclasses.replace(self._order, want=want)
        write_mark(self._member.run_dir.ray_order, self._order)

    def _write_token(self) -> None:
        path = self._member.run_dir.ray_token
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as stream:
            stream.write(secrets.token_hex(32))
