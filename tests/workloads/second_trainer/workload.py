"""The line trainer as a workload: a plan becomes the arguments of ``rlk_repro.workloads.line_trainer``."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlk_repro.base.errors import Problem
from rlk_repro.base.findings import Finding
from rlk_repro.plan import Plan, Trial
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.prepare.steps import PrepareRequest, PrepareStep
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Run, Stack
from rlk_repro.workloads.api import Brought, Command, Words
from rlk_repro.workloads.environment import profile_env, trial_env

WORDS = Words(step="a line", scope="These numbers are of a line.")


def find_problems(plan: Plan) -> list[Problem]:
    if plan.layout.num_nodes == 1:
        return []
    return [Problem("layouts", "the line trainer runs on one node", got=plan.layout.num_nodes, expected="1")]


def find_warnings(plan: Plan) -> list[Finding]:
    return []


def trainer_command(plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
    plain, from_env = profile_env(plan)
    num_points = str(plan.run.workload.model_dump()["num_points"])
    argv = (sys.executable, "-m", "rlk_repro.workloads.line_trainer", str(plan.num_steps), num_points, str(trial.seed))
    return Command(argv=argv, env=plain | trial_env(plan, trial, run_dir), from_env=from_env)


def rollout_commands(plan: Plan, run_dir: RunDir) -> dict[int, Command]:
    return {}


def describe(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", f"a line through {settings['num_points']} points"


def find_brought(plan: Plan) -> Brought:
    return Brought()


def list_folders(run: Run, stack: Stack, prepared: PreparedDir) -> dict[str, Path]:
    return {}


def list_steps(request: PrepareRequest) -> list[PrepareStep]:
    return []
