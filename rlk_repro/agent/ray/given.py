"""Use the Ray cluster that KubeRay keeps up for a whole allocation.

Its workers start before the first trial, so each trial passes its environment to them as Ray's runtime environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rlk_repro.agent.ray.census import parse_names
from rlk_repro.agent.ray.launch import SETTINGS, TOKEN_NAMES
from rlk_repro.agent.ray.marks import Use
from rlk_repro.agent.ray.member import RayMember
from rlk_repro.agent.trial import Outcome, TrialWatch
from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import JOB_CONFIG, OVERRIDE_JOB_CONFIG, resolve_env

ADDRESS_VARIABLE: Final = "RLK_REPRO_RAY_ADDRESS"
"""Variable set by the process that started the agent: the address of a Ray cluster that the agent must not end."""
CENSUS_S: Final = 5.0
PAUSE_S: Final = 1.0


class GivenRay:
    """A Ray cluster that already ran when the leader started."""

    def __init__(self, member: RayMember, record: Callable[..., object], note: Callable[[list[Finding]], None]) -> None:
        self.lost: dict[str, str] = {}
        self._address = os.environ[ADDRESS_VARIABLE]
        self._record = record
        self._note = note
        self._num_nodes = len(member.place.nodes)
        self._deadline_s = member.parts.deadlines.ray_up_s
        self._followers = member.make_followers()
        self._is_told = False

    @contextmanager
    def serve(self, use: Use, command: Command) -> Iterator[TrialWatch]:
        """Enter the ``with`` block as soon as every node has joined Ray.

        Raises:
            EnvironmentMissing: a node did not join Ray in time.
        """
        if not command.needs_ray:
            yield TrialWatch()
            return
        self._wait_for_nodes()
        if not self._is_told:
            self._is_told = True
            expected, found = "a fresh Ray cluster for every trial", "one Ray cluster for all trials"
            self._note([Finding(Level.INFO, "ray", expected, found)])
        self._record("ray given", use=str(use), address=self._address)
        yield TrialWatch(env=self._make_env(command), find_trouble=self._find_trouble, settle=self._settle)

    def _find_trouble(self) -> str:
        self.lost |= self._followers.find_lost()
        return "; ".join(f"node {node} is lost: {reason}" for node, reason in self.lost.items())

    def _settle(self, outcome: Outcome) -> Outcome:
        """A trial that failed because a node was lost counts as interrupted: its variant is not the cause."""
        if outcome.status is TrialStatus.OK:
            return outcome
        self._followers.wait_for_signs()
        return outcome.with_trouble(self._find_trouble(), is_interrupted=True)

    def _wait_for_nodes(self) -> None:
        """Wait until every node has joined Ray; pods start at different times, and each pod then starts Ray."""
        until = time.monotonic() + self._deadline_s
        known: tuple[str, ...] = ()
        while len(known) < self._num_nodes:
            left_s = until - time.monotonic()
            if left_s <= 0:
                self._followers.wait_for_signs()
                self._find_trouble()
                expected = f"{self._num_nodes} nodes within {self._deadline_s:g} s"
                raise EnvironmentMissing(
                    Problem(f"Ray at {self._address}", "lacks nodes", got=list(known), expected=expected)
                )
            argv = [sys.executable, "-m", "rlk_repro.agent.ray.census", self._address]
            answer = proc.run(argv, timeout_s=max(left_s, CENSUS_S), env={**os.environ, **SETTINGS})
            known = parse_names(answer.stdout)
            if not known:
                time.sleep(PAUSE_S)

    def _make_env(self, command: Command) -> dict[str, str]:
        outside = dict(os.environ)
        own = {name: value for name, value in resolve_env(command, outside).items() if outside.get(name) != value}
        asked = json.loads(own.pop(JOB_CONFIG, "{}")).get("runtime_env", {})
        config = {"runtime_env": {**asked, "env_vars": own}, "metadata": {}}
        # a trial gets the token of this Ray cluster, but no other token of the agent's environment
        token = {name: outside[name] for name in TOKEN_NAMES if name in outside}
        return {
            **SETTINGS,
            **token,
            "RAY_ADDRESS": self._address,
            JOB_CONFIG: json.dumps(config, sort_keys=True),
            OVERRIDE_JOB_CONFIG: "1",
        }
