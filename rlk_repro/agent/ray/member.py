"""Run one node's part of a step's Ray cluster; the leader and the other nodes do this in the same way."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from rlk_repro.agent.parts import NodePlace, Parts
from rlk_repro.agent.preflight.gpu import find_busy, wait_until_idle
from rlk_repro.agent.preflight.host import read_free_memory
from rlk_repro.agent.ray.launch import SETTINGS, RaySeat, find_store_bytes, render_env
from rlk_repro.agent.ray.node import RayNode
from rlk_repro.agent.step import Step, Use
from rlk_repro.agent.stop import Stop
from rlk_repro.base.findings import Level
from rlk_repro.base.secrets import Scrubber
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import resolve_env

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  (only the folder's size is read)


@dataclass(frozen=True, kw_only=True)
class RayMember:
    plan: Plan
    run_dir: RunDir
    place: NodePlace
    parts: Parts
    stop: Stop

    def find_command(self, use: Use) -> Command:
        """Return the command that runs the trial or stores the rollouts; every node computes the same command."""
        workload = self.parts.workload
        if use.trial is None:
            assert use.seed is not None
            return workload.rollout_commands(self.plan, self.run_dir)[use.seed]
        trial = next(trial for trial in self.plan.trials if trial.name == use.trial)
        return workload.trainer_command(self.plan, trial, self.run_dir)

    def find_address(self, others: tuple[str, ...]) -> str:
        return self.parts.find_address(self.place.node, others, self.plan.profile.ray.interface)

    def make_node(self, step: Step) -> RayNode:
        """Prepare Ray on this node without starting it; Ray's workers get the environment of the step's command."""
        head = step.head.rpartition(":")[0]
        address = head if self.place.is_leader else self.find_address((head,))
        shm_bytes = shutil.disk_usage(SHARED_MEMORY).total
        seat = RaySeat(
            index=self.place.nodes.index(self.place.node),
            node=self.place.node,
            address=address,
            head=step.head,
            num_gpus=self.plan.layout.gpus_per_node,
            first_port=self.plan.profile.ray.first_port,
            has_client=find_spec("grpc") is not None,
            store_bytes=find_store_bytes(shm_bytes, read_free_memory() or 0),
        )
        command = self.find_command(step.use)
        own = render_env(seat, str(self.run_dir.ray_token.absolute()), command.address_names)
        env = resolve_env(command, os.environ) | SETTINGS | own
        deadlines = self.parts.deadlines
        return RayNode(seat, env, SETTINGS | own, deadlines.ray_retry_s, deadlines.grace_s)

    def put_away(self, node: RayNode, step: Step) -> tuple[str, ...]:
        """Stop Ray on this node, collect its logs if wanted, and return the GPUs that are busy after ``idle_s``."""
        node.keep(is_joining=False)
        node.end()
        if step.keeps_logs:
            scrubber = Scrubber.from_environment(named=self.find_command(step.use).from_env.values())
            node.collect(self.run_dir.node(self.place.node).ray_logs(str(step.use)), scrubber.bytes)
        node.delete()
        if self.plan.num_gpus == 0:
            return ()
        busy = wait_until_idle(self.parts.busy_gpus, self.stop.wait, self.parts.deadlines.idle_s)
        return tuple(finding.found for finding in find_busy(busy, Level.WARNING))
