"""linear_logp in Megatron's own GPTModel, with RL-Kernel's native operator: what trains is what the logits would train.

Needs checkouts of vime, Megatron-LM and RL-Kernel (docs/testing.md); the parts are in test_integration_linear_logp.
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
FLOAT32 = {"log_probs": 4e-6, "loss": 2e-5, "hidden": 1e-5, "head": 1e-5, "weights": 1e-5}
BFLOAT16 = {"log_probs": 0.02, "loss": 0.02, "hidden": 0.02, "head": 0.04, "weights": 0.06}
"""The trainer rounds its logits to bfloat16, the operator does not where the vocabulary is split."""

pytestmark = pytest.mark.skipif(
    not all(os.environ.get(name) for name in SOURCES),
    reason=f"{', '.join(SOURCES)} do not name checkouts of vime, Megatron-LM and RL-Kernel",
)


def run_ranks(folder: Path, world: int, kind: str) -> dict[str, Any]:
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
    result = run_ranks(tmp_path, world, kind)
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
