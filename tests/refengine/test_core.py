"""The numeric core against plain loops in float64: values, gradients, chunks, masks, clips, reductions."""

from __future__ import annotations

import argparse
import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.refengine import core
from rlk_repro.refengine.optimizer import EPSILON, AdamW
from tests.support.loss_examples import make_args

SMALL = settings(max_examples=40, deadline=None)
KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def _random(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def _tokens(num_rows: int, num_columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(num_columns, (num_rows,), generator=torch.Generator().manual_seed(seed))


def _softmax(row: list[float]) -> list[float]:
    top = max(row)
    total = math.fsum(math.exp(value - top) for value in row)
    return [math.exp(value - top) / total for value in row]


@SMALL
@given(rows=st.integers(1, 9), columns=st.integers(2, 12), seed=st.integers(0, 99), chunk=st.integers(-1, 10))
def test_log_probs_and_entropy_are_those_of_the_softmax_whatever_the_chunk(
    rows: int, columns: int, seed: int, chunk: int
) -> None:
    logits, tokens = _random(rows, columns, seed=seed), _tokens(rows, columns, seed)
    log_probs, entropy = core.calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, chunk_size=chunk)
    assert log_probs.shape == (rows, 1)
    assert entropy is not None
    assert entropy.shape == (rows,)
    for row, token in enumerate(tokens.tolist()):
        probabilities = _softmax(logits[row].tolist())
        assert log_probs[row].item() == pytest.approx(math.log(probabilities[token]), rel=1e-12)
        assert entropy[row].item() == pytest.approx(-math.fsum(p * math.log(p) for p in probabilities), rel=1e-12)


def test_gradients_are_the_numerical_ones() -> None:
    tokens = _tokens(4, 6)

    def compute(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = core.calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, chunk_size=3)
        assert entropy is not None
        return log_probs, entropy

    assert torch.autograd.gradcheck(compute, _random(4, 6).requires_grad_())


def test_entropy_without_gradient_has_its_value_and_leaves_the_log_probs_gradient_alone() -> None:
    tokens = _tokens(5, 7)
    grads, entropies = [], []
    for with_entropy, with_entropy_grad in ((True, True), (True, False), (False, True)):
        logits = _random(5, 7).requires_grad_()
        log_probs, entropy = core.calculate_log_probs_and_entropy(
            logits, tokens, None, with_entropy=with_entropy, with_entropy_grad=with_entropy_grad
        )
        grads.append(torch.autograd.grad(log_probs.sum(), logits)[0])
        entropies.append(entropy)
    assert [entropy is not None and entropy.requires_grad for entropy in entropies] == [True, False, False]
    assert entropies[2] is None
    torch.testing.assert_close(entropies[0], entropies[1], check_stride=False)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def _expected_kl(difference: float, kind: str) -> float:
    """Formula by formula from joschu.net/blog/kl-approx.html, with log(q/p) = -difference."""
    value = {"k1": difference, "k2": difference**2 / 2}.get(kind, math.exp(-difference) - 1 + difference)
    return min(max(value, -10.0), 10.0) if kind == "low_var_kl" else value


@SMALL
@given(difference=st.floats(-8, 8), kind=st.sampled_from(KL_TYPES))
def test_kl_estimates_follow_their_formulas(difference: float, kind: str) -> None:
    log_probs, base = torch.tensor([difference - 1], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    kl = core.compute_approx_kl(log_probs, base, kind)
    assert kl.item() == pytest.approx(_expected_kl(difference, kind), abs=1e-9)


def test_low_var_kl_stops_the_gradient_outside_its_bounds_and_k3_does_not() -> None:
    for kind, expected in (("low_var_kl", [True, False]), ("k3", [True, True])):
        log_probs = torch.tensor([-1.0, -6.0], dtype=torch.float64, requires_grad=True)
        kl = core.compute_approx_kl(log_probs, torch.tensor([-2.0, -1.0], dtype=torch.float64), kind)
        (grad,) = torch.autograd.grad(kl.sum(), log_probs)
        assert (grad != 0).tolist() == expected


@SMALL
@given(ppo_kl=st.floats(-1.5, 1.5), advantage=st.floats(-2, 2), low=st.floats(0.05, 0.5), high=st.floats(0.05, 0.9))
def test_policy_loss_is_the_larger_of_clipped_and_unclipped(
    ppo_kl: float, advantage: float, low: float, high: float
) -> None:
    losses, clipfrac = core.compute_policy_loss(
        torch.tensor([ppo_kl], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), low, high
    )
    ratio = math.exp(-ppo_kl)
    unclipped, clipped = -ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage
    assert losses.item() == pytest.approx(max(unclipped, clipped), abs=1e-12)
    assert clipfrac.item() == float(clipped > unclipped)


NO_KL = {"use_kl_loss": False, "kl_loss_coef": 0.0}
LENGTHS = ((6, 3), (3, 1), (8, 5), (5, 4))  # prompt and response together, response
MASKS = ([1, 0, 1], [0], [1, 1, 1, 1, 1], [0, 0, 1, 0])  # holes, and one sample masked out


def _make_batch() -> core.LossBatch:
    rows = [_random(4, response, seed=index, scale=0.3) - 2 for index, (_, response) in enumerate(LENGTHS)]
    return core.LossBatch(
        unconcat_tokens=[_tokens(total, 7, seed=index) for index, (total, _) in enumerate(LENGTHS)],
        total_lengths=[total for total, _ in LENGTHS],
        response_lengths=[response for _, response in LENGTHS],
        loss_masks=[torch.tensor(mask) for mask in MASKS],
        rollout_mask_sums=torch.tensor([sum(mask) for mask in MASKS]),
        advantages=[row[0] + 2 for row in rows],
        log_probs=[row[1] for row in rows],
        ref_log_probs=[row[2] for row in rows],
        rollout_log_probs=[row[3] for row in rows],
    )


def _expected_loss(args: argparse.Namespace, batch: core.LossBatch, logits: torch.Tensor, *, per_token: bool) -> float:
    """The loss of the packed batch, one token at a time."""
    loss, row = 0.0, 0
    for index, (total, response) in enumerate(LENGTHS):
        terms = []
        for position in range(response):
            at = total - response + position
            scaled = (logits[0, row + at - 1] / args.rollout_temperature).tolist()
            probabilities = _softmax(scaled)
            log_prob = math.log(probabilities[int(batch["unconcat_tokens"][index][at])])
            ratio = math.exp(log_prob - batch["log_probs"][index][position].item())
            advantage = batch["advantages"][index][position].item()
            term = -min(ratio * advantage, min(max(ratio, 1 - args.eps_clip), 1 + args.eps_clip_high) * advantage)
            term += args.entropy_coef * math.fsum(p * math.log(p) for p in probabilities)
            difference = log_prob - batch["ref_log_probs"][index][position].item()
            term += args.kl_loss_coef * _expected_kl(difference, args.kl_loss_type)
            terms.append(term * MASKS[index][position])
        loss += math.fsum(terms) / (1 if per_token else max(sum(MASKS[index]), 1))
        row += total
    return loss


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout_temperature": 0.7, "log_probs_chunk_size": 4},
        {"entropy_coef": 0.1},
        {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "low_var_kl"},
    ],
)
def test_policy_loss_function_is_the_sum_over_tokens_done_by_hand(changes: dict[str, Any], *, per_token: bool) -> None:
    args, batch, logits = make_args(**NO_KL | changes), _make_batch(), _random(1, 22, 7, scale=1.0)
    reducer = core.make_sum_of_sample_mean(
        batch["loss_masks"], batch["rollout_mask_sums"], calculate_per_token_loss=per_token
    )
    loss, metrics = core.policy_loss_function(args, batch, logits, reducer)
    assert loss.item() == pytest.approx(_expected_loss(args, batch, logits, per_token=per_token), rel=1e-6)
    assert list(metrics) == [
        *("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff"),
        *(["kl_loss"] if args.use_kl_loss else []),
    ]
    assert not any(value.requires_grad for value in metrics.values())
    difference = [(old - new).abs() for old, new in zip(batch["log_probs"], batch["rollout_log_probs"], strict=True)]
    assert metrics["train_rollout_logprob_abs_diff"].item() == reducer(torch.cat(difference)).item()


def test_masked_tokens_and_rows_outside_responses_get_no_gradient() -> None:
    args, batch = make_args(kl_loss_coef=1.0), _make_batch()
    logits = _random(1, 22, 7, scale=1.0).requires_grad_()
    reducer = core.make_sum_of_sample_mean(batch["loss_masks"], batch["rollout_mask_sums"])
    (grad,) = torch.autograd.grad(core.policy_loss_function(args, batch, logits, reducer)[0], logits)
    reached, start = [], 0
    for (total, response), mask in zip(LENGTHS, MASKS, strict=True):
        reached += [start + total - response - 1 + position for position, flag in enumerate(mask) if flag]
        start += total
    assert grad[0].abs().sum(dim=-1).nonzero().flatten().tolist() == reached


# AdamW and clipping against torch's own.


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 1e6])
def test_steps_are_those_of_torch(clip_grad: float) -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)).double()
    theirs = copy.deepcopy(ours)
    optimizer = AdamW(ours, lr=0.03, betas=(0.8, 0.95), weight_decay=0.2, clip_grad=clip_grad)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in theirs.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.95), eps=EPSILON)
    for _ in range(5):
        inputs = torch.randn(4, 5, dtype=torch.float64)
        for model in (ours, theirs):
            model(inputs).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_grad or float("inf"))
        reference.step()
        reference.zero_grad()
        assert optimizer.step() == pytest.approx(norm.item(), rel=1e-12)
        assert all(parameter.grad is None for parameter in ours.parameters())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
