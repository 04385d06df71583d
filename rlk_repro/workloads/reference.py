"""The reference trainer as a workload: a plan becomes the arguments and environment of ``rlk_repro.refengine``.

Nothing is started here and nothing is read but the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from pydantic import BaseModel

from rlk_repro.errors import Problem
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir import RunDir
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import find_profile_problems, profile_env, record_env, switch_env

TRAINER: Final = "rlk_repro.refengine"
INIT_PATH: Final = "rlk_repro.integration.reference.install"

_THREADS: Final = "OMP_NUM_THREADS"
_FIXED_ENV: Final = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}


def find_problems(plan: Plan) -> list[Problem]:
    """More than one node or device, and profile variables that are the launcher's own."""
    problems = find_profile_problems(plan, frozenset({_THREADS, *_FIXED_ENV}))
    where = f"run {plan.run.run}: layouts.{plan.hardware.hardware}"
    for name, value in plan.layout.model_dump().items():
        if value > 1:
            problems.append(
                Problem(f"{where}.{name}", "the reference trainer is one process on one device", got=value,
                        expected="at most 1")
            )  # fmt: skip
    return problems


def trainer_command(plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
    """One trial; the two trials of a pair differ in ``switch_env`` and ``record_env`` only."""
    lane = []
    if plan.run.lane == "train-only":
        lane = ["--debug-train-only", "--load-debug-rollout-data", run_dir.rollouts_of(trial.seed).template]
    own = record_env(run_dir.trial(trial.name)) | switch_env(plan, trial)
    return _make_command(plan, trial.seed, ["--custom-megatron-init-path", INIT_PATH, *lane], own)


def rollout_commands(plan: Plan, run_dir: RunDir) -> dict[int, Command]:
    """Store the rollouts of the train-only lane: a plain live run per pair.

    The seed makes the weights, and training moves them: any other rollouts would be another policy's, and their
    train_rollout_logprob_abs_diff would measure that instead of the variants.
    """
    if plan.run.lane != "train-only":
        return {}
    seeds = dict.fromkeys(trial.seed for trial in plan.trials)
    return {
        seed: _make_command(plan, seed, ["--save-debug-rollout-data", run_dir.rollouts_of(seed).template], {})
        for seed in seeds
    }


def _make_command(plan: Plan, seed: int, flags: list[str], own: dict[str, str]) -> Command:
    workload = plan.run.workload
    plain, from_env = profile_env(plan)
    argv = [sys.executable, "-m", TRAINER, "--seed", str(seed), "--num-rollout", str(plan.num_steps)]
    argv += ["--device", "cpu" if plan.hardware.platform == "cpu" else "cuda"]
    argv += ["--num-threads", str(workload.num_threads)]
    argv += _flags(workload.model)
    argv += _flags(workload.task)
    argv += _flags(workload.grpo)
    env = plain | _FIXED_ENV | {_THREADS: str(workload.num_threads)} | own
    return Command(argv=(*argv, *flags), env=env, from_env=from_env)


def _flags(settings: BaseModel) -> Iterator[str]:
    """Field names are the trainer's flag names; True is a bare flag, False is none."""
    for name, value in settings.model_dump(exclude={"kind"}).items():
        if value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)
