"""The line trainer as a workload: a plan becomes the arguments of ``rlk_repro.workloads.line_trainer``."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rlk_repro.base.errors import Problem
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads.api import Command, Words, Workload
from rlk_repro.workloads.environment import profile_env, trial_env


class Line(Workload):
    WORDS = Words(step="a line", scope="These numbers are of a line.")

    def find_problems(self, plan: Plan) -> list[Problem]:
        if plan.layout.num_nodes == 1:
            return []
        return [Problem("layouts", "the line trainer runs on one node", got=plan.layout.num_nodes, expected="1")]

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        plain, from_env = profile_env(plan)
        points = str(plan.run.workload.model_dump()["num_points"])
        argv = (sys.executable, "-m", "rlk_repro.workloads.line_trainer", str(plan.num_steps), points, str(trial.seed))
        return Command(argv=argv, env=plain | trial_env(plan, trial, run_dir), from_env=from_env)

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        yield "model", f"a line through {settings['num_points']} points"
