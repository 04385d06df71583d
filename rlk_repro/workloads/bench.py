"""The module and the operator tier as workloads: make the commands of ``rlk_repro.bench`` from a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.base.units import count, format_count
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import ModuleWorkload, OperatorsWorkload
from rlk_repro.workloads.api import Command, Words, Workload
from rlk_repro.workloads.arguments import (
    find_plan_problems,
    setting_flags,
    spell_flags,
    trial_flags,
)
from rlk_repro.workloads.environment import trainer_module, trial_env

MODULE: Final = "rlk_repro.bench.module"
OPERATORS: Final = "rlk_repro.bench.operators"


class Module(Workload):
    """The loss functions of vime alone."""

    WORDS = Words(
        step="vime's loss functions alone",
        takes="vime's loss functions alone take",
        scope=(
            "A step here is vime's loss functions and nothing else; at Qwen3-4B's sizes they are about 4 % of a "
            "training step. This does not show how much faster training gets: `rlk-repro predict` says what to expect."
        ),
        updates_per="step",
        baseline_trainer="vime",
    )

    def find_problems(self, plan: Plan) -> list[Problem]:
        what = "the module tier can only split the vocabulary over the GPUs of one node"
        free = {"tensor_parallel", "gpus_per_node"}
        problems = find_plan_problems(plan, what, free=free)
        layout = plan.layout
        if plan.num_gpus and layout.gpus_per_node != layout.tensor_parallel:
            where = f"run {plan.run.run}: layouts.{plan.hardware.hardware}.gpus_per_node"
            expected = f"{layout.tensor_parallel}, one GPU per rank"
            problems.append(Problem(where, "does not fit tensor_parallel", got=layout.gpus_per_node, expected=expected))
        return problems

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        workload = plan.run.workload
        assert isinstance(workload, ModuleWorkload)
        num_ranks = plan.layout.tensor_parallel
        argv = []
        if num_ranks > 1:
            argv += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m"]
        argv += [MODULE, *trial_flags(plan, trial.seed), "--tensor-model-parallel-size", str(num_ranks)]
        argv += ["--lead-ms", str(workload.lead_ms)]
        argv += spell_flags(setting_flags(workload.batch) | setting_flags(workload.grpo))
        return trainer_module(plan, argv, trial_env(plan, trial, run_dir))

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        batch = settings["batch"]
        yield (
            "batches",
            f"random: {format_count(batch['num_tokens'])} packed tokens of {batch['num_samples']} samples in a "
            f"microbatch, fp32 logits, vocabulary {format_count(batch['vocab_size'])} ({settings['model']}); "
            f"{count(batch['num_microbatches'], 'microbatch', 'microbatches')} in an optimizer step",
        )
        lead_ms = settings["lead_ms"]
        device = f"kept busy for {lead_ms:g} ms before each pass, in both variants"
        yield "device", device if lead_ms else "idle before each pass, in both variants"


class Operators(Workload):
    """Operators alone: every trial is a baseline trial that measures every implementation."""

    WORDS = Words(
        step="one operator",
        scope="An operator is a part of a training step: this result does not show how much faster a step gets.",
    )

    def find_problems(self, plan: Plan) -> list[Problem]:
        what = "the operator tier is one process on one device"
        return find_plan_problems(plan, what)

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        """``--num-rollout`` is the number of sweeps."""
        workload = plan.run.workload
        assert isinstance(workload, OperatorsWorkload)
        suite = json.dumps(workload.model_dump(mode="json"), sort_keys=True)
        argv = [OPERATORS, *trial_flags(plan, trial.seed), "--suite", suite]
        return trainer_module(plan, argv, trial_env(plan, trial, run_dir))

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        names = dict.fromkeys(grid["operator"] for grid in settings["grids"])
        timed, untimed = settings["timed_calls"], settings["warmup_calls"]
        calls = f"{timed} timed calls after {untimed} untimed calls per implementation, case and sweep"
        chosen = ", ".join(settings["implementations"]) or "all implementations of these operators"
        yield "operators", f"{', '.join(names)}; {chosen}; {calls}"
