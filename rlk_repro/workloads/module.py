"""The module tier as a workload: make the command of ``rlk_repro.bench.module`` from a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlk_repro.base.errors import Problem
from rlk_repro.base.units import count, format_count
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import ModuleWorkload
from rlk_repro.workloads.api import Command, Words, Workload
from rlk_repro.workloads.arguments import find_layout_problems, setting_flags, spell_flags, trial_flags
from rlk_repro.workloads.environment import find_env_problems, trainer_module, trial_env

TRAINER: Final = "rlk_repro.bench.module"


class Module(Workload):
    """The loss functions of vime alone."""

    WORDS = Words(
        step="vime's loss functions alone",
        takes="vime's loss functions alone take",
        scope=(
            "A step here is vime's loss functions and nothing else. This does not show how much faster training gets."
        ),
        updates_per="step",
        baseline_trainer="vime",
    )

    def find_problems(self, plan: Plan) -> list[Problem]:
        what = "the module tier can only split the vocabulary over the GPUs of one node"
        free = {"tensor_parallel", "gpus_per_node"}
        problems = [*find_env_problems(plan), *find_layout_problems(plan, what, free)]
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
        argv += [TRAINER, *trial_flags(plan, trial.seed), "--tensor-model-parallel-size", str(num_ranks)]
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
