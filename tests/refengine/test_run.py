"""Whole small runs: the log dialect, repetition to the bit, the lanes, the hooks, learning."""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.base import proc
from rlk_repro.base.resources import profile_folders
from rlk_repro.logs.metrics import metric_series
from rlk_repro.logs.vime import parse_log
from rlk_repro.plan import Plan, Trial, make_plan
from rlk_repro.refengine import core, trainer
from rlk_repro.refengine.arguments import parse_args
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.environment import resolve_env

SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-query-groups 1 --rollout-batch-size 4 "
    "--n-samples-per-prompt 4 --use-kl-loss --kl-loss-type low_var_kl --kl-loss-coef 0.1 --num-steps-per-rollout 2 "
    "--micro-batch-size 3 --num-threads 1 --device cpu --num-rollout 3"
)
Log = dict[tuple[str, int], dict[str, Any]]
"""Bodies by kind of line and number; the two perf lines of a rollout are merged."""

Run = Callable[[str], Log]


@pytest.fixture
def run(caplog: pytest.LogCaptureFixture, torch_as_it_was: None) -> Run:
    """Run the trainer in this process."""

    def run_and_read(flags: str) -> Log:
        caplog.clear()
        with caplog.at_level("INFO"):
            trainer.run(parse_args(f"{SMALL} {flags}".split()))
        return _parse_log(caplog.messages)

    return run_and_read


def _parse_log(messages: list[str]) -> Log:
    log: Log = {}
    for message in messages:
        match = re.fullmatch(r"(perf|rollout|step) (\d+): (\{.*\})", message)
        if match:
            log.setdefault((match[1], int(match[2])), {}).update(ast.literal_eval(match[3]))
    return log


def _without_times(log: Log) -> Log:
    return {
        key: {name: value for name, value in body.items() if not name.startswith("perf/")} for key, body in log.items()
    }


def test_lines_have_vimes_keys_in_vimes_order(run: Run) -> None:
    log = run("")
    assert list(log)[:5] == [("perf", 0), ("rollout", 0), ("step", 0), ("step", 1), ("perf", 1)]
    assert {kind: sum(key[0] == kind for key in log) for kind in ("perf", "rollout", "step")} == {
        "perf": 3,
        "rollout": 3,
        "step": 6,
    }
    names = "loss pg_loss entropy_loss pg_clipfrac ppo_kl train_rollout_logprob_abs_diff kl_loss grad_norm lr-pg_0 "
    assert list(log["step", 5]) == [f"train/{name}" for name in (names + "lr-pg_1 global_batch_size step").split()]
    names = "response_lengths rewards truncated rollout_log_probs raw_reward total_lengths ref_log_probs log_probs "
    assert list(log["rollout", 2]) == [f"rollout/{name}" for name in (names + "advantages returns").split()]
    names = "update_weights_time data_preprocess_time train_wait_time ref_log_probs_time log_probs_time "
    names += "actor_train_time train_time actor_train_tok_per_s step_time wait_time_ratio"
    assert list(log["perf", 1])[-10:] == [f"perf/{name}" for name in names.split()]


def test_lines_agree_with_each_other(run: Run) -> None:
    log = run("")
    for number in range(3):
        perf, rollout = log["perf", number], log["rollout", number]
        assert perf["perf/step_time"] == perf["perf/train_wait_time"] + perf["perf/train_time"]
        phases = sum(perf[f"perf/{name}_time"] for name in ("ref_log_probs", "log_probs", "actor_train"))
        assert phases <= perf["perf/train_time"]
        assert perf["perf/rollout_time"] <= perf["perf/train_wait_time"]
        assert rollout["rollout/response_lengths"] == perf["rollout/response_len/mean"]
        assert rollout["rollout/truncated"] == perf["rollout/truncated_ratio"]
        assert abs(rollout["rollout/rewards"]) < 1e-6
    assert log["rollout", 0]["rollout/ref_log_probs"] == log["rollout", 0]["rollout/log_probs"]
    assert log["step", 0]["train/kl_loss"] == log["step", 0]["train/ppo_kl"] == 0
    assert abs(log["step", 1]["train/ppo_kl"]) > 0
    assert all(log["step", number]["train/train_rollout_logprob_abs_diff"] < 1e-5 for number in range(6))


@pytest.mark.parametrize("flags", ["", "--calculate-per-token-loss --dtype bfloat16 --rollout-temperature 0.8"])
def test_a_run_repeats_to_the_bit_and_another_seed_does_not(run: Run, flags: str) -> None:
    first = _without_times(run(flags))
    assert _without_times(run(flags)) == first
    assert _without_times(run(f"{flags} --seed 5")) != first


def test_microbatches_and_chunks_do_not_change_a_step(run: Run) -> None:
    whole, cut = run("--num-rollout 1 --micro-batch-size 8"), run("--num-rollout 1 --log-probs-chunk-size 5")
    for number in range(2):
        for name, value in whole["step", number].items():
            assert cut["step", number][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_training_on_stored_rollouts_is_the_live_run_without_generation(run: Run, tmp_path: Path) -> None:
    template = tmp_path / "{rollout_id}.pt"
    live = run(f"--save-debug-rollout-data {template}")
    stored = run(f"--debug-train-only --load-debug-rollout-data {template}")
    assert stored.keys() == live.keys()
    for key in live:
        if key[0] != "perf":
            assert stored[key] == live[key]
    assert "perf/rollout_time" in live["perf", 0]
    assert "perf/rollout_time" not in stored["perf", 0]
    assert stored["perf", 2]["perf/step_time"] > 0


def test_the_init_function_gets_the_flags_and_what_it_rebinds_is_used(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site_hook.py").write_text("calls = []\ndef install(args):\n    calls.append(args)\n")
    monkeypatch.syspath_prepend(tmp_path)
    called: list[str] = []
    for name in ("calculate_log_probs_and_entropy", "policy_loss_function", "compute_policy_loss", "compute_approx_kl"):
        original = getattr(core, name)

        def replacement(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            called.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(core, name, replacement)
    run("--num-rollout 1 --micro-batch-size 8 --custom-megatron-init-path site_hook.install")
    (args,) = importlib.import_module("site_hook").calls
    assert isinstance(args, argparse.Namespace)
    assert args.num_rollout == 1
    in_step = ["policy_loss_function", "calculate_log_probs_and_entropy", "compute_policy_loss", "compute_approx_kl"]
    assert called == ["calculate_log_probs_and_entropy"] * 4 + in_step * 2


def test_rewards_rise_by_policy_gradient_alone(run: Run) -> None:
    log = run(
        "--num-rollout 60 --hidden-size 32 --max-operand 1 --rollout-batch-size 8 --n-samples-per-prompt 8 "
        "--num-steps-per-rollout 1 --micro-batch-size 64 --rollout-max-response-len 3 --lr 3e-3 --kl-loss-coef 0"
    )
    rewards = [log["rollout", number]["rollout/raw_reward"] for number in range(60)]
    assert sum(rewards[-12:]) / 12 > sum(rewards[:12]) / 12 + 0.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_the_first_steps_agree_with_the_cpu(run: Run, tmp_path: Path, dtype: str) -> None:
    template = tmp_path / "{rollout_id}.pt"
    on_cpu = run(f"--dtype {dtype} --save-debug-rollout-data {template}")
    on_gpu = run(f"--device cuda --dtype {dtype} --load-debug-rollout-data {template}")
    tolerance = 1e-3 if dtype == "float32" else 5e-2
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss", "train/kl_loss"):
        assert on_gpu["step", 1][name] == pytest.approx(on_cpu["step", 1][name], rel=tolerance, abs=tolerance)
    live = run(f"--device cuda --dtype {dtype}")
    assert live["step", 5]["train/train_rollout_logprob_abs_diff"] < (1e-4 if dtype == "float32" else 0.1)


# ``jobs/learn.yaml`` keeps its promise, on every seed of its plan.

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
