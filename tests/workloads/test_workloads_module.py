"""From a plan to the module process's command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlk_repro.bench.module_arguments import parse_args
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import ModuleWorkload, OperatorsWorkload
from rlk_repro.submit.show import plan_lines
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.environment import resolve_env
from tests.support.run_plans import make_tier_plan

MODULE = WORKLOADS["module"]

RUN_DIR = RunDir(Path("/runs/a b/{x}"))


def test_variants_differ_in_the_declared_switches_and_where_they_write() -> None:
    plan = make_tier_plan("module-smoke")
    baseline, enabled = (MODULE.trainer_command(plan, trial, RUN_DIR) for trial in plan.trials)
    assert baseline.argv == enabled.argv
    assert {name for name, value in enabled.env.items() if baseline.env.get(name) != value} == {
        "VIME_RL_KERNEL",
        "VIME_RL_KERNEL_MODE",
        "VIME_RL_KERNEL_OPS",
        "RLK_REPRO_OPS_DIR",
        "RLK_REPRO_LIBRARIES_DIR",
    }
    assert set(baseline.env) < set(enabled.env)
    assert MODULE.rollout_commands(plan, RUN_DIR) == {}


def test_every_setting_arrives_under_vimes_name() -> None:
    settings = ["workload.grpo.calculate_per_token_loss=true", "workload.grpo.use_tis=true",
                "workload.grpo.advantage_estimator=gspo", "workload.batch.num_microbatches=3"]  # fmt: skip
    plan = make_tier_plan("module-smoke", *settings, "measure.scored_steps=5")
    argv = MODULE.trainer_command(plan, plan.trials[0], RUN_DIR).argv
    assert argv[:3] == (sys.executable, "-m", "rlk_repro.bench.module")
    args = parse_args(argv[3:])
    workload = plan.run.workload
    assert isinstance(workload, ModuleWorkload)
    expected = workload.batch.model_dump() | workload.grpo.model_dump()
    assert {name: getattr(args, name) for name in expected} == expected
    assert (args.seed, args.num_rollout, args.device, args.tensor_model_parallel_size) == (1234, 6, "cpu", 1)


def test_a_split_vocabulary_has_a_process_per_rank() -> None:
    plan = make_tier_plan("module-qwen3-4b-tp2", hardware="h200")
    argv = MODULE.trainer_command(plan, plan.trials[0], RUN_DIR).argv
    assert argv[1:8] == (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "rlk_repro.bench.module"),
    )
    args = parse_args(argv[8:])
    assert (args.device, args.tensor_model_parallel_size, args.vocab_size) == ("cuda", 2, 151936)


def test_without_the_entropy_metric_both_variants_are_told_so_whatever_the_shell_says() -> None:
    for setting, expected in (("false", "0"), ("true", None)):
        plan = make_tier_plan("module-smoke", f"entropy_metric={setting}")
        for trial in plan.trials:
            command = MODULE.trainer_command(plan, trial, RUN_DIR)
            env = resolve_env(command, {"RLK_REPRO_ENTROPY_METRIC": "left over"})
            assert env.get("RLK_REPRO_ENTROPY_METRIC") == expected


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["layouts.h200.gpus_per_node=2"],
            "layouts.h200.gpus_per_node: does not fit tensor_parallel, got 2, expected 1, one GPU per rank",
        ),
        (
            ["layouts.h200.num_nodes=2"],
            "layouts.h200.num_nodes: the module tier can only split the vocabulary over the GPUs of one node, got 2, "
            "expected "
            "at most 1",
        ),
        (
            ["layouts.h200.expert_parallel=8"],
            "layouts.h200.expert_parallel: the module tier can only split the vocabulary over the GPUs of one node, "
            "got 8, "
            "expected at most 1",
        ),
    ],
)
def test_other_layouts_are_refused(settings: list[str], problem: str) -> None:
    (found,) = MODULE.find_problems(make_tier_plan("module-smoke", *settings, hardware="h200"))
    assert str(found) == f"run module-smoke: {problem}"


# From a plan to the operator process's command.


OPERATORS = WORKLOADS["operators"]


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
