"""The node agent for a run of the reference trainer on two nodes, which the trainer itself refuses.

``python -m tests.support.two_node_agent [--ray] -m rlk_repro.job …``.  Node 0 trains, the other one describes and
watches itself: all that agents do across nodes, but for Ray.  With ``--ray`` the trainer is a Ray driver that needs
both nodes; as they are one machine, each gets an address of its own on the loopback interface.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from collections.abc import Sequence

import pytest

from rlk_repro.agent import agent
from rlk_repro.agent.parts import Parts, real_parts
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.api import Command, Workload
from rlk_repro.workloads.reference import TRAINER
from rlk_repro.workloads.vime import ADDRESS_NAMES
from tests.support.slurm.cluster import NODES

REFERENCE = WORKLOADS["reference"]

DRIVER = "tests.support.ray.reference"
ADDRESSES = {node: f"127.0.0.{number}" for number, node in enumerate(NODES, start=2)}

_make_command = REFERENCE.trainer_command


def allow_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(REFERENCE, "find_problems", lambda _: [])


def use_ray(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(REFERENCE, "trainer_command", make_driver)
    patch.setattr(agent, "real_parts", make_parts)


def make_driver(plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
    """The reference trainer's own command behind the driver that starts it in a Ray cluster."""
    command = _make_command(plan, trial, run_dir)
    assert command.argv[:3] == (sys.executable, "-m", TRAINER)
    argv = (sys.executable, "-m", DRIVER, str(plan.layout.num_nodes), *command.argv[3:])
    return dataclasses.replace(command, argv=argv, needs_ray=True, address_names=ADDRESS_NAMES)


def make_parts(workload: Workload) -> Parts:
    return dataclasses.replace(real_parts(workload), find_address=find_address)


def find_address(node: str, others: Sequence[str], interface: str | None) -> str:
    return ADDRESSES[node]


def main() -> None:
    has_ray = sys.argv[1] == "--ray"
    options = sys.argv[1 + has_ray :]
    module, *arguments = options[options.index("-m") + 1 :]
    sys.argv[1:] = arguments
    with pytest.MonkeyPatch.context() as patch:
        allow_nodes(patch)
        if has_ray:
            use_ray(patch)
        runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
