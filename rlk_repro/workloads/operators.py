"""The operator tier as a workload: make the command of ``rlk_repro.bench.operators`` from a plan.

All trials are baseline trials and measure every implementation; two trials show the spread between processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import OperatorsWorkload
from rlk_repro.workloads.api import Command, Words, Workload
from rlk_repro.workloads.arguments import find_layout_problems, trial_flags
from rlk_repro.workloads.environment import find_env_problems, trainer_module, trial_env

TRAINER: Final = "rlk_repro.bench.operators"


class Operators(Workload):
    """Operators alone."""

    WORDS = Words(
        step="one operator",
        scope="An operator is a part of a training step: this result does not show how much faster a step gets.",
    )

    def find_problems(self, plan: Plan) -> list[Problem]:
        what = "the operator tier is one process on one device"
        return [*find_env_problems(plan), *find_layout_problems(plan, what)]

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        """``--num-rollout`` is the number of sweeps."""
        workload = plan.run.workload
        assert isinstance(workload, OperatorsWorkload)
        suite = json.dumps(workload.model_dump(mode="json"), sort_keys=True)
        argv = [TRAINER, *trial_flags(plan, trial.seed), "--suite", suite]
        return trainer_module(plan, argv, trial_env(plan, trial, run_dir))

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        names = dict.fromkeys(grid["operator"] for grid in settings["grids"])
        timed, untimed = settings["timed_calls"], settings["warmup_calls"]
        calls = f"{timed} timed calls after {untimed} untimed calls per implementation, case and sweep"
        chosen = ", ".join(settings["implementations"]) or "all implementations of these operators"
        yield "operators", f"{', '.join(names)}; {chosen}; {calls}"
