"""vime's own policy loss and Megatron's own output layer with RL-Kernel's operators, TP 1 and 2.

Needs checkouts of vime, Megatron-LM and RL-Kernel (docs/testing.md); the routes' arithmetic alone is in
test_log_probs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import proc
from rlk_repro.integration.vime_abi import BEGIN
from rlk_repro.integration.vime_engines import STAGE
from tests import ROOT

SOURCES = ("VIME_SRC", "MEGATRON_SRC", "RLK_SRC")

pytestmark = pytest.mark.skipif(
    not all(os.environ.get(name) for name in SOURCES),
    reason=f"{', '.join(SOURCES)} do not name checkouts of vime, Megatron-LM and RL-Kernel",
)


def run_ranks(folder: Path, world: int, word: str, script: str = "vime_agreement") -> Any:
    sources = [str(ROOT), *(os.environ[name] for name in SOURCES), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> proc.Completed:
        place = [str(rank), str(world), str(folder), word]
        command = [sys.executable, "-m", f"tests.support.{script}", *place]
        return proc.run(command, cwd=ROOT, env=environment, timeout_s=300)

    with ThreadPoolExecutor(world) as pool:
        completed = list(pool.map(run, range(world)))
    assert all(item.is_ok for item in completed), completed[0].stderr
    return json.loads(completed[0].stdout.splitlines()[-1])


CASES = ((1, "ratio_kl"), (2, "ratio_kl"), (1, "grpo_loss"), (1, "compiled_logp"))


@pytest.mark.parametrize(("world", "op"), CASES)
def test_loss_metrics_and_gradient_are_vime_s(tmp_path: Path, world: int, op: str) -> None:
    result = run_ranks(tmp_path, world, op)
    worst = result["worst"]
    assert worst["log_probs"] <= 4e-6
    # vime subtracts the largest logit first, the newer log-prob and torch.compile round the
    # log-sum-exp; k3's gradient multiplies that rounding by the ratio of the two policies
    assert all(worst[kind] <= 2e-5 for kind in ("loss", "metrics", "gradient"))
    assert result["num_refused_and_same"] == result["num_refused"] > 10


@pytest.mark.parametrize("world", [1, 2])
def test_a_session_switches_between_vime_s_numbers_and_others(tmp_path: Path, world: int) -> None:
    result = run_ranks(tmp_path, world, "seam")
    assert result["is_same"]
    assert result["is_same_by_turn"] == [True, False, True, True]
    assert [shadow["case"] for shadow in result["shadows"]] == ["as trained", "peaked"]
    for shadow in result["shadows"]:
        assert shadow["step"] == 3
        assert (shadow["log_probs"]["max_abs"], shadow["logits_grad"]["max_abs"]) == (0.0, 0.0)
        off_by = 0.01 * shadow["log_probs_no_grad"]["max_abs_baseline"]
        assert shadow["log_probs_no_grad"]["max_abs"] == pytest.approx(off_by, rel=1e-3)
        assert shadow["loss"]["baseline"] == shadow["loss"]["enabled"] != 0
    for step in result["agreement"]:
        assert step["largest"]["abs"] == pytest.approx(result["largest"])
    parts = ("log_probs_forward", "log_probs_no_grad", "clip_kl_forward", "clip_kl_backward")
    assert all(result["timers"][name] > 0 for name in parts)
    assert result["timers"]["grpo_loss_backward"] > result["timers"]["log_probs_backward"] > 0


# linear_logp in Megatron's own GPTModel, with RL-Kernel's native operator: what trains is what the logits would train.


FLOAT32 = {"log_probs": 4e-6, "loss": 2e-5, "hidden": 1e-5, "head": 1e-5, "weights": 1e-5}
BFLOAT16 = {"log_probs": 0.02, "loss": 0.02, "hidden": 0.02, "head": 0.04, "weights": 0.06}
"""The trainer rounds its logits to bfloat16, the operator does not where the vocabulary is split."""


SHARED = ((1, "tensor", 2), (2, "tensor", 4), (2, "context", 2))


@pytest.mark.parametrize(("world", "kind", "num_shapes"), SHARED)
def test_log_probs_loss_and_every_gradient_are_the_baseline_s(
    tmp_path: Path, world: int, kind: str, num_shapes: int
) -> None:
    result = run_ranks(tmp_path, world, kind, "linear_agreement")
    assert len(result) == num_shapes
    far = {
        (shape, name): value
        for shape, found in result.items()
        for name, value in found.items()
        if value > (BFLOAT16 if shape.endswith("bfloat16") else FLOAT32)[name]
    }
    assert far == {}


IN_VIME = {
    "vime/backends/megatron_utils/actor.py": ("data_iterator = get_data_iterator(rollout_data)",),
    "vime/backends/megatron_utils/model.py": (
        '"input_ids": tokens', '"packed_seq_params": packed_seq_params',
        '"loss_mask": batch["full_loss_masks"]',
        "origin_indices = sum(data_iterator[0].micro_batch_indices, [])",
    ),
    "vime/utils/routing_replay.py": (
        'if routing_replay_stage == "fallthrough":', f'os.environ["{STAGE}"]',
    ),
}  # fmt: skip
IN_MEGATRON = {
    "transformer/transformer_layer.py": ("self.self_attention = ", "self.mlp = "),
    "transformer/transformer_block.py": ("self.layers = ", "self.final_layernorm = "),
    "transformer/moe/moe_layer.py": ("self.router = ",),
    "transformer/moe/router.py": ("return probs, routing_map",),
    "models/gpt/gpt_model.py": ("self.decoder = TransformerBlock(",),
}


def test_vime_and_megatron_have_the_names_that_are_followed() -> None:
    vime, megatron = (Path(os.environ[name]) for name in SOURCES[:2])
    files = {vime / path: texts for path, texts in IN_VIME.items()}
    files |= {megatron / "megatron/core" / path: texts for path, texts in IN_MEGATRON.items()}
    for path, texts in files.items():
        assert [text for text in texts if text not in path.read_text()] == []
    folder = vime / "vime/backends/megatron_utils"
    actor, data = (folder / "actor.py").read_text(), (folder / "data.py").read_text()
    begin = actor.index(f"{BEGIN}(rollout_data)\n        num_microbatches")
    assert begin < actor.rindex("self.fill_routing_replay(")
    given = r"class DataIterator:.*?rollout_data: RolloutBatch,\s+micro_batch_indices: list"
    assert re.search(given, data, re.DOTALL)
