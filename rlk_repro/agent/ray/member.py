"""Prepare Ray on a node, stop it and collect its logs; the leader and the followers do this in the same way."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from rlk_repro.agent.losses import Followers
from rlk_repro.agent.parts import NodePlace, Parts
from rlk_repro.agent.preflight.gpu import find_busy, wait_until_idle
from rlk_repro.agent.preflight.host import read_free_memory
from rlk_repro.agent.ray.launch import SETTINGS, RaySeat, find_store_bytes, render_env
from rlk_repro.agent.ray.marks import RayOrder, Use
from rlk_repro.agent.ray.node import RayNode
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

    def make_seat(self, address: str, head: str) -> RaySeat:
        return RaySeat(
            index=self.place.nodes.index(self.place.node),
            node=self.place.node,
            address=address,
            head=head,
            num_gpus=self.plan.layout.gpus_per_node,
            first_port=self.plan.profile.ray.first_port,
            has_client=find_spec("grpc") is not None,
            store_bytes=find_store_bytes(shutil.disk_usage(SHARED_MEMORY).total, read_free_memory() or 0),
        )

    def make_node(self, seat: RaySeat, use: Use) -> RayNode:
        """Prepare Ray on this node without starting it; Ray's workers get the environment of the command of ``use``."""
        command = self.find_command(use)
        env = resolve_env(command, os.environ) | SETTINGS | self.make_env(seat, command)
        deadlines = self.parts.deadlines
        return RayNode(seat, env, retry_s=deadlines.ray_retry_s, grace_s=deadlines.grace_s)

    def make_followers(self) -> Followers:
        return Followers(self.run_dir, self.place, self.parts.deadlines.lost_s, self.stop)

    def make_env(self, seat: RaySeat, command: Command) -> dict[str, str]:
        return render_env(seat, str(self.run_dir.ray_token.absolute()), command.address_names)

    def put_away(self, node: RayNode, order: RayOrder) -> tuple[str, ...]:
        """Stop Ray on this node, collect its logs if wanted, and return the GPUs that are busy after ``idle_s``."""
        node.end()
        if order.keeps_logs:
            scrubber = Scrubber.from_environment(named=self.find_command(order.use).from_env.values())
            node.collect(self.run_dir.node(self.place.node).ray_logs(str(order.use)), scrubber.bytes)
        node.delete()
        if self.plan.num_gpus == 0:
            return ()
        busy = wait_until_idle(self.parts.busy_gpus, self.stop.wait, self.parts.deadlines.idle_s)
        return tuple(finding.found for finding in find_busy(busy, Level.WARNING))
