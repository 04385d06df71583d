"""The reference trainer as a workload: make the command of ``rlk_repro.refengine`` from a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.base.units import count, format_count
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import ReferenceWorkload
from rlk_repro.workloads.api import Command, Words, Workload
from rlk_repro.workloads.arguments import (
    describe_rollouts,
    find_plan_problems,
    find_untimed_problems,
    setting_flags,
    spell_flags,
    switch_flags,
    trial_flags,
)
from rlk_repro.workloads.environment import THREADS, trainer_module, trial_env

TRAINER: Final = "rlk_repro.refengine"
INIT_PATH: Final = "rlk_repro.integration.reference.install"


class Reference(Workload):
    """The reference trainer."""

    WORDS = Words(
        step="the reference trainer, which is not vime",
        takes="a step of the reference trainer, which is not vime, takes",
        scope="The reference trainer produced these numbers. They show what this tool does and say nothing about vime.",
    )

    def find_problems(self, plan: Plan) -> list[Problem]:
        what = "the reference trainer is one process on one device"
        return [*find_plan_problems(plan, what, known=_list_flags(plan)), *find_untimed_problems(plan)]

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        flags, stored = ["--custom-megatron-init-path", INIT_PATH], None
        if plan.run.lane == "train-only":
            stored = run_dir.rollouts_of(trial.seed)
            folder = run_dir.session_rollouts(trial.name) if plan.is_crossover else stored
            flags += ["--debug-train-only", "--load-debug-rollout-data", folder.template]
        settings = switch_flags(plan, trial, _list_flags(plan))
        command = _make_command(plan, trial_flags(plan, trial.seed), settings, flags, trial_env(plan, trial, run_dir))
        return replace(command, stored=stored if plan.is_crossover else None)

    def rollout_commands(self, plan: Plan, run_dir: RunDir) -> dict[int, Command]:
        """Return one live run per seed of the plan's pairs, by seed; only lane train-only needs these runs.

        Rollouts of another seed would come from another policy, and train_rollout_logprob_abs_diff would measure the
        difference of the policies.
        """
        if plan.run.lane != "train-only":
            return {}
        seeds = dict.fromkeys(trial.seed for trial in plan.trials)
        num_stored, flag = plan.run.measure.num_stored, "--save-debug-rollout-data"
        return {
            seed: _make_command(
                plan,
                trial_flags(plan, seed, num_stored),
                _list_flags(plan),
                [flag, run_dir.rollouts_of(seed).template],
                {},
            )
            for seed in seeds
        }

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        model = settings["model"]
        if settings.get("what_for", "timing") != "timing":
            yield "meant for", settings["what_for"]
        yield (
            "model",
            f"reference trainer: {count(model['num_layers'], 'layer')}, hidden {format_count(model['hidden_size'])}, "
            f"vocabulary {format_count(model['vocab_size'])}, {model['dtype']}",
        )
        yield "rollouts", describe_rollouts(settings["grpo"])


def _list_flags(plan: Plan) -> dict[str, Any]:
    workload = plan.run.workload
    assert isinstance(workload, ReferenceWorkload)
    threads = {"num-threads": workload.num_threads}
    return threads | setting_flags(workload.model) | setting_flags(workload.task) | setting_flags(workload.grpo)


def _make_command(
    plan: Plan, first: list[str], settings: Mapping[str, Any], flags: list[str], own: dict[str, str]
) -> Command:
    argv = [TRAINER, *first, *spell_flags(settings), *flags]
    return trainer_module(plan, argv, {THREADS: str(settings["num-threads"])} | own)
