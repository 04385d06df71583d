"""Agents of a run whose trainer needs Ray, two on this machine standing for two nodes.

As a script, ``python -m tests.support.ray.examples RUN_DIR NODE SECONDS RAY_UP_S FOLDER``, it is
one of them.  The nodes are ``a``, which leads, and ``b``; each has an address of its own on the
loopback interface.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_repro.agent.agent import run_agent
from rlk_repro.agent.parts import Deadlines, make_place
from rlk_repro.base.errors import RlkReproError
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.switches import OPS_DIR
from rlk_repro.workloads.api import Command, Workload
from rlk_repro.workloads.environment import switch_env
from rlk_repro.workloads.vime import ADDRESS_NAMES
from tests.support.job_examples import make_parts

TRAINER = Path(__file__).with_name("trainer.py")
NODES = ("a", "b")
ADDRESSES = {"a": "127.0.0.2", "b": "127.0.0.3"}
ALLOCATION = "job-7"


@dataclass(frozen=True, kw_only=True)
class RayWorkload(Workload):
    """Its trials run a task on every node; the first one then idles for some seconds."""

    num_nodes: int = 2
    seconds: str = "0"
    folder: str = ""

    def find_problems(self, plan: Plan) -> list[Any]:  # noqa: ARG002
        return []

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        return iter(())

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        seconds = self.seconds if trial.index == 0 else "0"
        argv = (sys.executable, str(TRAINER), str(self.num_nodes), seconds, self.folder)
        records = {OPS_DIR: str(run_dir.trial(trial.name).ops.absolute())}
        env = records | switch_env(plan, trial)
        return Command(argv=argv, env=env, needs_ray=True, address_names=ADDRESS_NAMES)


def find_address(node: str, others: Sequence[str], interface: str | None) -> str:
    return ADDRESSES[node]


def main() -> int:
    run_dir, node, seconds, ray_up_s, folder = sys.argv[1:]
    deadlines = Deadlines(
        grace_s=5, idle_s=0.1, followers_s=20, followers_end_s=20, ray_up_s=float(ray_up_s),
        ray_retry_s=2, ray_down_s=10,
    )  # fmt: skip
    workload = RayWorkload(seconds=seconds, folder=folder)
    parts = make_parts(workload, deadlines=deadlines, find_address=find_address)
    try:
        return run_agent(RunDir(Path(run_dir)), make_place(node, NODES, ALLOCATION), parts=parts)
    except RlkReproError as error:
        sys.stderr.write(f"{error.title}: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
