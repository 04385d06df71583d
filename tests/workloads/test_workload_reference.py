"""From a plan to the reference trainer's command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlk_repro import switches
from rlk_repro.base.errors import SpecError
from rlk_repro.plan import Plan
from rlk_repro.refengine.arguments import parse_args
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import ReferenceWorkload
from rlk_repro.workloads import WORKLOADS, environment
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import resolve_env
from tests.support.job_examples import PROFILE, SETTINGS, make_example_plan

REFERENCE = WORKLOADS["reference"]

RUN_DIR = RunDir(Path("/runs/a b/{x}"))
BASELINE, ENABLED = "00-p1-baseline", "01-p1-enabled"


def commands(plan: Plan) -> dict[str, Command]:
    return {trial.name: REFERENCE.trainer_command(plan, trial, RUN_DIR) for trial in plan.trials}


def test_variants_differ_in_the_declared_switches_and_where_they_write() -> None:
    found = commands(make_example_plan()[0])
    baseline, enabled = found[BASELINE], found[ENABLED]
    assert baseline.argv == enabled.argv
    assert enabled.env == dict(baseline.env) | {
        "VIME_RL_KERNEL": "1",
        "VIME_RL_KERNEL_MODE": "auto",
        "VIME_RL_KERNEL_OPS": "logp,ratio_kl",
        "RLK_REPRO_OPS_DIR": f"/runs/a b/{{x}}/trials/{ENABLED}/ops",
        "RLK_REPRO_LIBRARIES_DIR": f"/runs/a b/{{x}}/trials/{ENABLED}/libraries",
    }
    assert baseline.env == {
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "RLK_REPRO_OPS_DIR": f"/runs/a b/{{x}}/trials/{BASELINE}/ops",
        "RLK_REPRO_LIBRARIES_DIR": f"/runs/a b/{{x}}/trials/{BASELINE}/libraries",
    }


def test_every_flag_is_the_trainers_and_every_setting_arrives() -> None:
    settings = ["workload.grpo.use_kl_loss=false", "workload.grpo.calculate_per_token_loss=true",
                "workload.model.dtype=bfloat16", "workload.task.max_operand=7", "workload.num_threads=3"]  # fmt: skip
    plan = make_example_plan([*settings, "measure.warmup_steps=2", "measure.scored_steps=5"])[0]
    argv = commands(plan)[BASELINE].argv
    assert argv[:3] == (sys.executable, "-m", "rlk_repro.refengine")
    args = parse_args(argv[3:])
    workload = plan.run.workload
    assert isinstance(workload, ReferenceWorkload)
    expected = workload.model.model_dump() | workload.grpo.model_dump() | {"max_operand": 7, "num_threads": 3}
    assert {name: getattr(args, name) for name in expected} == expected
    assert (args.num_rollout, args.device, args.dtype) == (7, "cpu", "bfloat16")
    assert args.custom_megatron_init_path == "rlk_repro.integration.reference.install"


def test_the_live_lane_stores_nothing_and_the_train_only_lane_reads_what_was_stored() -> None:
    assert REFERENCE.rollout_commands(make_example_plan()[0], RUN_DIR) == {}
    plan = make_example_plan([*SETTINGS, "lane=train-only"])[0]
    stored = REFERENCE.rollout_commands(plan, RUN_DIR)
    assert list(stored) == [1234, 1235]
    for seed, command in stored.items():
        assert "RLK_REPRO_OPS_DIR" not in command.env
        args = parse_args(command.argv[3:])
        assert (args.seed, args.num_rollout, args.debug_rollout_only) == (seed, plan.num_steps, False)
        assert args.save_debug_rollout_data == f"/runs/a b/{{x}}/rollouts/{seed}/{{rollout_id}}.pt"
    for command in commands(plan).values():
        args = parse_args(command.argv[3:])
        assert args.load_debug_rollout_data == f"/runs/a b/{{x}}/rollouts/{args.seed}/{{rollout_id}}.pt"


def test_the_profiles_variables_reach_every_trainer_and_secrets_stay_names() -> None:
    profile = PROFILE + b"env: {HF_HOME: /data, HF_TOKEN: {from_env: MY_TOKEN}}\n"
    for command in commands(make_example_plan(profile=profile)[0]).values():
        assert command.env["HF_HOME"] == "/data"
        assert command.from_env == {"HF_TOKEN": "MY_TOKEN"}
        assert resolve_env(command, {"MY_TOKEN": "x"})["HF_TOKEN"] == "x"


def test_all_absent_variables_are_named_at_once() -> None:
    command = Command(argv=("x",), env={}, from_env={"A": "NO_B", "B": "NO_A", "C": "YES"})
    with pytest.raises(SpecError) as caught:
        resolve_env(command, {"YES": ""})
    assert str(caught.value) == (
        "environment variable NO_A: is not set, expected a value\n  hint: export NO_A=…\n"
        "environment variable NO_B: is not set, expected a value\n  hint: export NO_B=…"
    )


def test_switches_left_over_in_the_shell_reach_no_trainer() -> None:
    inherited = dict.fromkeys(environment.DECLARED, "1") | {"PATH": "/bin"}
    plan = make_example_plan()[0]
    env = resolve_env(REFERENCE.trainer_command(plan, plan.trials[0], RUN_DIR), inherited)
    assert env["PATH"] == "/bin"
    assert "VIME_RL_KERNEL" not in env
    assert env["RLK_REPRO_OPS_DIR"] != "1"


def test_every_variable_of_a_variant_is_declared() -> None:
    found = {value for value in vars(switches).values() if isinstance(value, str) and value.startswith(("RLK", "VIME"))}
    assert found - {switches.COMMITS} == environment.DECLARED


def test_a_profile_may_not_set_what_the_launcher_sets() -> None:
    profile = PROFILE + b'env: {OMP_NUM_THREADS: "4", VIME_RL_KERNEL: "1", OTHER: x}\n'
    problems = REFERENCE.find_problems(make_example_plan(profile=profile)[0])
    assert [str(problem) for problem in problems] == [
        f"profile local: env.{name}: is set by the launcher, expected another variable"
        for name in ("OMP_NUM_THREADS", "VIME_RL_KERNEL")
    ]


def test_more_than_one_process_is_refused() -> None:
    assert REFERENCE.find_problems(make_example_plan()[0]) == []
    plan = make_example_plan(["layouts.h200.num_nodes=2", "layouts.h200.tensor_parallel=2"], hardware="h200")[0]
    assert [str(problem) for problem in REFERENCE.find_problems(plan)] == [
        f"run smoke: layouts.h200.{name}: the reference trainer is one process on one device, got 2, expected at most 1"
        for name in ("num_nodes", "tensor_parallel")
    ]
