"""Enabled equals baseline through vime's own policy loss, with RL-Kernel's own native operators, TP 1 and 2.

Needs checkouts of vime, Megatron-LM and RL-Kernel (docs/testing.md); the routes' arithmetic alone is in
test_integration_log_probs.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import proc
from tests import ROOT

REPOSITORY = ROOT
SOURCES = ("VIME_SRC", "MEGATRON_SRC", "RLK_SRC")
NUM_BATCHES = 500

pytestmark = pytest.mark.skipif(
    not all(os.environ.get(name) for name in SOURCES),
    reason=f"{', '.join(SOURCES)} do not name checkouts of vime, Megatron-LM and RL-Kernel",
)


def run_ranks(folder: Path, world: int, *words: str) -> dict[str, Any]:
    named = [os.environ[name] for name in SOURCES]
    sources = [str(REPOSITORY), *named, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> proc.Completed:
        place = [str(rank), str(world), str(folder), str(NUM_BATCHES), "20260701"]
        command = [sys.executable, "-m", "tests.support.vime_agreement", *place, *words]
        return proc.run(command, cwd=REPOSITORY, env=environment, timeout_s=300)

    with ThreadPoolExecutor(world) as pool:
        completed = list(pool.map(run, range(world)))
    assert all(item.is_ok for item in completed), completed[0].stderr
    result: dict[str, Any] = json.loads(completed[0].stdout.splitlines()[-1])
    return result


def rounds_log_sum() -> bool:
    """RL-Kernel's newer log-prob rounds the log-sum-exp, and vime subtracts the largest logit first.

    k3's gradient multiplies that rounding by the ratio of the two policies.
    """
    return (Path(os.environ["RLK_SRC"]) / "rl_engine/kernels/ops/pytorch/loss/batch_invariant_logp.py").is_file()


@pytest.mark.parametrize("world", [1, 2])
def test_realistic_batches_agree(tmp_path: Path, world: int) -> None:
    result = run_ranks(tmp_path, world, "realistic")
    assert result["worst"]["loss"] <= 2e-5
    assert result["worst"]["metrics"] <= 2e-5
    assert result["worst"]["log_probs"] <= 4e-6
    assert result["worst"]["gradient"] <= (2e-5 if rounds_log_sum() else 1e-5)
    assert result["num_refused_and_same"] == result["num_refused"] > NUM_BATCHES // 10


@pytest.mark.parametrize("world", [1, 2])
def test_on_wild_batches_neither_is_nearer_to_float64(tmp_path: Path, world: int) -> None:
    result = run_ranks(tmp_path, world, "wild")
    assert result["largest_ratio"] <= (8 if rounds_log_sum() else 2)
    assert result["num_refused_and_same"] == result["num_refused"] > NUM_BATCHES // 10


def test_the_whole_loss_agrees_wherever_it_is_eligible(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 1, "realistic", "grpo_loss")
    assert result["worst"]["loss"] <= 2e-5
    assert result["worst"]["metrics"] <= 2e-5
    assert result["worst"]["gradient"] <= 1e-5
    assert NUM_BATCHES - result["num_refused"] > NUM_BATCHES // 20


# linear_logp in Megatron's own GPTModel, with RL-Kernel's native operator: what trains is what the logits would train.


FLOAT32 = {"log_probs": 4e-6, "loss": 2e-5, "hidden": 1e-5, "head": 1e-5, "weights": 1e-5}
BFLOAT16 = {"log_probs": 0.02, "loss": 0.02, "hidden": 0.02, "head": 0.04, "weights": 0.06}
"""The trainer rounds its logits to bfloat16, the operator does not where the vocabulary is split."""


def run_linear_ranks(folder: Path, world: int, kind: str) -> dict[str, Any]:
    sources = [str(REPOSITORY), *(os.environ[name] for name in SOURCES), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> proc.Completed:
        command = [sys.executable, "-m", "tests.support.linear_agreement", str(rank), str(world), str(folder), kind]
        return proc.run(command, cwd=REPOSITORY, env=environment, timeout_s=300)

    with ThreadPoolExecutor(world) as pool:
        completed = list(pool.map(run, range(world)))
    assert all(item.is_ok for item in completed), completed[0].stderr
    result: dict[str, Any] = json.loads(completed[0].stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("world", "kind", "num_shapes"), [(1, "tensor", 8), (2, "tensor", 16), (2, "context", 8)], ids=["1", "TP 2", "CP 2"]
)
def test_log_probs_loss_and_every_gradient_are_the_baseline_s(
    tmp_path: Path, world: int, kind: str, num_shapes: int
) -> None:
    result = run_linear_ranks(tmp_path, world, kind)
    refusals = result.pop("refusals", REFUSALS)
    assert len(result) == num_shapes
    far = {
        (shape, name): value
        for shape, found in result.items()
        for name, value in found.items()
        if value > (BFLOAT16 if shape.endswith("bfloat16") else FLOAT32)[name]
    }
    assert far == {}
    assert refusals == REFUSALS


TAKEN = "hidden states were used as logits"
REFUSALS = {
    "trainer's own function": TAKEN,
    "temperature": TAKEN,
    "entropy": "a call cannot be served: does not compute the entropy that this run reports",
    "top-p": "a call cannot be served: cannot leave out the columns that top-p sampling removed",
    "logits": "a call cannot be served: needs hidden states, and this call has logits",
    "labels": TAKEN,
    "gathered logits": "the output layer's hidden states can replace only this rank's logits",
    "other losses": TAKEN,
}
