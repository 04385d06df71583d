"""``jobs/learn.yaml`` keeps its promise, on every seed of its plan."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from rlk_repro.base import proc
from rlk_repro.base.resources import profile_folders
from rlk_repro.logs.metrics import metric_series
from rlk_repro.logs.vime import parse_log
from rlk_repro.plan import Plan, Trial, make_plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.environment import resolve_env

LIMIT_S = 300.0


def plan_learn() -> Plan:
    return make_plan(
        run=load_run("learn"),
        stack=load_stack("host"),
        hardware=load_hardware("cpu"),
        profile=load_profile("local", profile_folders("local")),
    )


PLAN = plan_learn()
TRIALS = [trial for trial in PLAN.trials if trial.variant == "baseline"]


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"seed-{trial.seed}")
def test_the_reward_of_the_last_fifth_exceeds_that_of_the_first_by_0_2(trial: Trial, tmp_path: Path) -> None:
    command = WORKLOADS[PLAN.run.workload.kind].trainer_command(PLAN, trial, RunDir(tmp_path))
    done = proc.run(command.argv, env=resolve_env(command, os.environ), timeout_s=LIMIT_S)
    assert done.is_ok, done.stdout + done.stderr
    log = tmp_path / "stdout.log"
    log.write_text(done.stdout)
    series = metric_series(parse_log(log), num_rollouts=PLAN.num_steps, num_steps_per_rollout=1)["raw_reward"]
    rewards = [sample.value for sample in series if sample is not None]
    assert len(rewards) == PLAN.num_steps
    fifth = len(rewards) // 5
    gain = (math.fsum(rewards[-fifth:]) - math.fsum(rewards[:fifth])) / fifth
    assert gain >= 0.2, f"gain {gain:.3f}"
