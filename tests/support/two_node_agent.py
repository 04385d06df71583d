"""The node agent for a run of the reference trainer on two nodes, which the trainer itself refuses.

``python -m tests.support.two_node_agent [--quick | --ray] -m rlk_repro.job …``.  Node 0 trains, the other one describes
and watches itself: all that agents do across nodes, but for Ray.  With ``--quick`` a trainer that needs no torch takes
0.05 seconds a step.  With ``--ray`` the trainer is a Ray driver that needs both nodes; as they are one machine, each
gets an address of its own on the loopback interface.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlk_repro.agent import agent
from rlk_repro.agent.parts import Parts, real_parts
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.api import Command, Workload
from rlk_repro.workloads.reference import TRAINER
from rlk_repro.workloads.vime import ADDRESS_NAMES
from tests import ROOT, SUPPORT

if TYPE_CHECKING:
    import pytest

REFERENCE = WORKLOADS["reference"]
QUICK_TRAINER = SUPPORT / "fake_trainer.py"

DRIVER = "tests.support.ray.reference"
ADDRESSES = {"node-0": "127.0.0.2", "node-1": "127.0.0.3"}

_make_command = REFERENCE.trainer_command


def allow_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(REFERENCE, "find_problems", lambda _: [])


def write_agent(folder: Path, option: str = "--quick") -> str:
    """Return an interpreter for profiles: it starts this agent."""
    path = folder / "agent"
    folders = f"{ROOT}:{SUPPORT / 'fake_rl_engine'}"
    command = f'exec {sys.executable} -m tests.support.two_node_agent {option} "$@"'
    path.write_text(f'#!/bin/sh\nexport PYTHONPATH="{folders}:$PYTHONPATH"\n{command}\n')
    path.chmod(0o755)
    return str(path)


def make_quick(plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
    num_steps = plan.run.measure.warmup_steps + plan.run.measure.scored_steps
    argv = (sys.executable, "-I", "-S", str(QUICK_TRAINER), "begin", f"steps:{num_steps}:0.05", "end")
    return dataclasses.replace(_make_command(plan, trial, run_dir), argv=argv)


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
    split = sys.argv.index("-m")
    module, *arguments = sys.argv[split + 1 :]
    options = sys.argv[1:split]
    sys.argv[1:] = arguments
    REFERENCE.find_problems = lambda plan: []  # type: ignore[method-assign]  # noqa: ARG005
    if "--quick" in options:
        REFERENCE.trainer_command = make_quick  # type: ignore[method-assign]
    if "--ray" in options:
        REFERENCE.trainer_command = make_driver  # type: ignore[method-assign]
        agent.real_parts = make_parts  # type: ignore[attr-defined]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
