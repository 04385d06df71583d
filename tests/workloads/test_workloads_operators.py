"""From a plan to the operator process's command."""

from __future__ import annotations

import sys
from pathlib import Path

from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import OperatorsWorkload
from rlk_repro.submit.show import plan_lines
from rlk_repro.workloads import WORKLOADS
from tests.support.tier_examples import make_tier_plan

OPERATORS = WORKLOADS["operators"]

RUN_DIR = RunDir(Path("/runs/a b/{x}"))


def test_a_trial_gets_the_whole_suite_and_its_sweeps() -> None:
    plan = make_tier_plan("operators-smoke", "measure.scored_steps=3", "workload.implementations=[torch-compile]")
    command = OPERATORS.trainer_command(plan, plan.trials[0], RUN_DIR)
    assert command.argv[:-1] == (
        *(sys.executable, "-m", "rlk_repro.bench.operators"),
        *("--seed", "1234", "--num-rollout", "3", "--device", "cpu", "--suite"),
    )
    assert OperatorsWorkload.model_validate_json(command.argv[-1]) == plan.run.workload
    assert OPERATORS.rollout_commands(plan, RUN_DIR) == {}


def test_every_trial_is_a_baseline_that_does_the_same() -> None:
    plan = make_tier_plan("operators", hardware="h200")
    assert not plan.has_enabled
    first, second = (OPERATORS.trainer_command(plan, trial, RUN_DIR) for trial in plan.trials)
    assert first.argv == second.argv
    assert {name for name, value in first.env.items() if second.env[name] != value} == {
        "RLK_REPRO_OPS_DIR",
        "RLK_REPRO_LIBRARIES_DIR",
    }
    assert not any(line.startswith("rl-kernel") for line in plan_lines(plan))


def test_more_than_one_process_is_refused() -> None:
    plan = make_tier_plan("operators", "layouts.h200.tensor_parallel=2", hardware="h200")
    assert [str(problem) for problem in OPERATORS.find_problems(plan)] == [
        "run operators: layouts.h200.tensor_parallel: the operator tier is one process on one device, got 2, expected "
        "at most 1"
    ]
