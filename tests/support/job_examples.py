"""Run directories and parts for tests of the node agent: everything real but the trainer, the probes and the analysis.

As a script, ``python -m tests.support.job_examples RUN_DIR ACTION…``, it is an agent that resumes with the fake
trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlk_repro.agent.agent import run_agent
from rlk_repro.agent.node import make_facts
from rlk_repro.agent.parts import Deadlines, Parts, make_place
from rlk_repro.agent.preflight.facts import Facts
from rlk_repro.base.errors import Problem
from rlk_repro.base.files import load_json
from rlk_repro.base.procfs import read_stat
from rlk_repro.bundle.seal import pack, seal
from rlk_repro.clusters.api import Job
from rlk_repro.plan import Plan, Trial, make_plan
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.rundir.manifest import Manifest
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_bytes, load_hardware, load_run, load_stack, parse_overrides
from rlk_repro.submit.stage import AuthorFiles, stage
from rlk_repro.switches import OPS_DIR
from rlk_repro.workloads.api import Command, Workload
from rlk_repro.workloads.environment import profile_env, switch_env

TRAINER = Path(__file__).with_name("fake_trainer.py")
QUICK = ("begin", "steps:3:0.001", "end")
PROFILE = b"profile: local\ncluster: local\npreflight: {min_free_disk_gib: 0.01, min_free_memory_gib: 0.01}\n"
SETTINGS = ("measure.pairs=2", "measure.warmup_steps=1", "measure.scored_steps=2")


def make_example_plan(
    settings: Sequence[str] = SETTINGS, *, profile: bytes = PROFILE, hardware: str = "cpu"
) -> tuple[Plan, AuthorFiles]:
    overrides = parse_overrides(settings)
    files = (
        load_run("smoke", overrides),
        load_stack("host"),
        load_hardware(hardware),
        load_bytes(Profile, "profile.yaml", profile),
    )
    run, stack, machine, site = files
    plan = make_plan(run=run, stack=stack, hardware=machine, profile=site, overrides=overrides, is_exploratory=True)
    return plan, AuthorFiles(run=run.data, stack=stack.data, hardware=machine.data, profile=site.data)


def make_staged(root: Path, settings: Sequence[str] = SETTINGS, **options: Any) -> tuple[Plan, RunDir]:
    plan, inputs = make_example_plan(settings, **options)
    run_dir = RunDir(root)
    stage(plan, inputs, run_dir, Job(files={"command.json": "{}\n"}, command=("true",)))
    return plan, run_dir


@dataclass(frozen=True, kw_only=True)
class FakeWorkload(Workload):
    """Trials do ``actions``, those named in ``by_trial`` something else."""

    actions: Sequence[str] = QUICK
    by_trial: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rollouts: Mapping[int, Sequence[str]] = field(default_factory=dict)
    problems: Sequence[Problem] = ()

    def find_problems(self, plan: Plan) -> list[Problem]:  # noqa: ARG002
        return list(self.problems)

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        return iter(())

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        plain, from_env = profile_env(plan)
        records = {OPS_DIR: str(run_dir.trial(trial.name).ops.absolute())}
        own = records | switch_env(plan, trial)
        return _make_command(self.by_trial.get(trial.name, self.actions), plain | own, from_env)

    def rollout_commands(self, plan: Plan, run_dir: RunDir) -> dict[int, Command]:  # noqa: ARG002
        return {seed: _make_command(actions, {}, {}) for seed, actions in self.rollouts.items()}


def _make_command(actions: Sequence[str], env: Mapping[str, str], from_env: Mapping[str, str]) -> Command:
    return Command(argv=(sys.executable, "-I", "-S", str(TRAINER), *actions), env=env, from_env=from_env)


def make_parts(workload: Workload | None = None, **changes: Any) -> Parts:
    values: dict[str, Any] = {
        "workload": workload or FakeWorkload(),
        "probe_node": lambda node: Manifest(node=node, sections={"host": {"machine": os.uname().machine}}),
        "busy_gpus": list[GpuUse],
        "analyse": lambda run_dir: {"schema": 1, "num_trials": len(run_dir.trial_dirs())},
        "seal": seal,
        "pack": pack,
        "deadlines": Deadlines(grace_s=20, idle_s=0.05, followers_s=0.1, followers_end_s=0.1),
    }
    return Parts(**values | changes)


def run_example(run_dir: RunDir, workload: Workload | None = None, *, until: float = 0.0, **changes: Any) -> int:
    place = make_place("node-0", ("node-0",), None, until)
    return run_agent(run_dir, place, parts=make_parts(workload, **changes))


def statuses(run_dir: RunDir) -> dict[str, str]:
    return {folder.name: load_json(folder.exit)["status"] for folder in run_dir.trial_dirs() if folder.exit.exists()}


def find_alive(pids: Sequence[int]) -> list[int]:
    """Those that run; zombies of a machine without an init that reaps do not."""
    stats = {pid: read_stat(pid) for pid in pids}
    return [pid for pid, stat in stats.items() if stat is not None and stat.is_running]


def find_descendants(run_dir: RunDir) -> list[int]:
    """Processes of a run: of its agent by their arguments, of its trainers by what they inherited."""
    mark = str(run_dir.root).encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def main() -> int:
    return run_example(RunDir(Path(sys.argv[1])), FakeWorkload(actions=sys.argv[2:]))


def fill_disk(folder: Path) -> Path:
    """The file that took all the room."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


if __name__ == "__main__":
    sys.exit(main())


def make_staged_facts(plan: Plan, run_dir: RunDir | None = None) -> Facts:
    """What preflight's checks get of a run on a node of which nothing is recorded."""
    facts = make_facts(plan, Manifest(node="node-0"))
    return dataclasses.replace(facts, staged=(plan, run_dir or RunDir(Path("absent"))))
