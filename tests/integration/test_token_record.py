"""The record of training against rollout, token by token: what is counted, and what is said where nothing can be."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.integration.measure.agreement import TokenRecord
from rlk_repro.logs.ops import read_ops
from rlk_repro.refengine import rollout
from rlk_repro.rundir.agreement import LADDER, LOG_PROBS
from rlk_repro.rundir.paths import TrialDir
from tests.support.reference_runs import SMALL, run_trainer

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def make_batch(ours: list[list[float]], theirs: list[list[float]], masks: list[list[int]] | None = None) -> Any:
    """Responses with a prompt of two tokens each; a token's id is 100 times its sample plus its position."""
    lengths = [len(row) for row in ours]
    return {
        "log_probs": [torch.tensor(row) for row in ours],
        "rollout_log_probs": [torch.tensor(row) for row in theirs],
        "response_lengths": lengths,
        "total_lengths": [2 + length for length in lengths],
        "unconcat_tokens": [torch.tensor([-1, -1, *range(100 * n, 100 * n + k)]) for n, k in enumerate(lengths)],
        "loss_masks": [torch.tensor(row) for row in masks or [[1] * length for length in lengths]],
    }


def record(*batches: Any, refusal: str = "") -> dict[str, Any] | None:
    tokens = TokenRecord(refusal)
    loss = tokens.follow_loss(lambda _args, batch, _logits, _reducer: len(batch))
    for batch in batches:
        assert loss(SimpleNamespace(), batch, None, None) == len(batch)
    return tokens.end_step()


@given(LENGTHS, st.randoms(use_true_random=False))
def test_every_trained_token_counts_once_in_each_table(lengths: list[int], random: Any) -> None:
    theirs = [[-random.choice((0.001, 0.5, 2.0, 20.0)) for _ in range(length)] for length in lengths]
    ours = [[value + random.choice((0.0, 1e-5, -2e-3, 0.5, 3.0)) for value in row] for row in theirs]
    masks = [[random.randint(0, 1) for _ in row] for row in theirs]
    found = record(make_batch(ours, theirs, masks))
    assert found is not None
    assert 0 < found["seconds"] < 60
    pairs = [
        (a, b, p)
        for sample in range(len(lengths))
        for p, (a, b, trained) in enumerate(zip(ours[sample], theirs[sample], masks[sample], strict=True))
        if trained
    ]
    differences = [float((torch.tensor(a).double() - torch.tensor(b).double()).abs().float()) for a, b, _ in pairs]
    classes = [sum(value > bound for bound in torch.tensor(LADDER).tolist()) for value in differences]
    assert found["tokens"] == len(pairs) == sum(map(sum, found["by_position"]))
    columns = [sum(row[index] for row in found["by_log_prob"]) for index in range(len(LADDER) + 1)]
    assert columns == [classes.count(index) for index in range(len(LADDER) + 1)]
    bands = [int(math.log2(p + 1)) for *_, p in pairs]
    assert [sum(row) for row in found["by_position"]] == [bands.count(n) for n in range(max(bands, default=-1) + 1)]
    probable = [sum(b > bound for bound in LOG_PROBS) for _, b, _ in pairs]
    assert [sum(row) for row in found["by_log_prob"]] == [probable.count(n) for n in range(len(LOG_PROBS) + 1)]
    assert found["sums"]["abs"] == pytest.approx(math.fsum(differences), rel=1e-5)


def test_the_largest_difference_names_its_microbatch_sample_position_and_token() -> None:
    near = make_batch([[-1.0, -1.0]], [[-1.0, -1.1]])
    far = make_batch([[-1.0], [-1.0, -1.0, -4.0]], [[-1.0], [-1.0, -1.0, -1.0]])
    found = record(near, far)
    assert found is not None
    assert found["largest"] == {"abs": 3.0, "microbatch": 1, "sample": 1, "position": 2, "token": 102}
    assert found["sums"]["k1"] == pytest.approx(3.0 - 0.1, rel=1e-6)
    assert found["sums"]["k3"] == pytest.approx(math.expm1(-3) + 3 + math.expm1(0.1) - 0.1, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"log_probs": []}, "the batch has no log-probs of training"),
        ({"rollout_log_probs": None}, "the batch has no log-probs of the rollout"),
        ({"rollout_log_probs": [torch.zeros(3)]}, "log-probs of training and rollout do not cover the same tokens"),
    ],
)
def test_a_batch_without_both_log_probs_records_the_reason(change: dict[str, Any], reason: str) -> None:
    assert record({**make_batch([[-1.0, -2.0]], [[-1.0, -2.0]]), **change}) == {"reason": reason}


@pytest.mark.usefixtures("torch_as_it_was", "without_rl_kernel")
def test_the_trainer_s_tokens_are_counted_in_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer generates with the model that it trains, so that only what is put in differs."""
    draw = rollout._draw

    def draw_lowered(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, log_probs = draw(*given)
        return tokens, log_probs - 2e-6 * (tokens % 2 == 0)

    monkeypatch.setattr(rollout, "_draw", draw_lowered)
    run_trainer(caplog, f"{SMALL} --num-rollout 2", RLK_REPRO_OPS_DIR=str(tmp_path / "ops"))
    found = list(read_ops(TrialDir(tmp_path)).tokens())
    assert [(rank, step) for rank, step, _ in found] == [(0, 0), (0, 1)]
    for *_, item in found:
        columns = [sum(column) for column in zip(*item.by_log_prob, strict=True)]
        assert item.tokens == sum(columns) == sum(map(sum, item.by_position))
        assert 0 < sum(columns[1:]) < item.tokens
        assert columns[4:] == [0] * (len(LADDER) - 3)
