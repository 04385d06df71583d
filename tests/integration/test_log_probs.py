"""The arithmetic around RL-Kernel's operators: against torch on one process, and over a split vocabulary on two."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.integration.route.batch import CurrentBatch
from rlk_repro.integration.route.log_probs import (
    PROBED_COLUMNS,
    Operators,
    Shard,
    can_mend,
    find_value_refusal,
    select_by_moments,
    select_no_grad,
    select_with_grad,
)
from rlk_repro.integration.route.moments import _moments_by_blocks, find_moments
from rlk_repro.integration.route.rl_kernel import RouteFailed
from rlk_repro.operators import Reason, Refusal
from tests.support.loss_examples import run_ranks

WHOLE = Shard(0, 1, None)


def logp(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(dim=-1).gather(1, ids.unsqueeze(1)).squeeze(1)


def logp_of_far(logits: torch.Tensor, ids: torch.Tensor, is_near: torch.Tensor) -> torch.Tensor:
    return logp(logits, ids).masked_fill(is_near, 0.0)


class RatioKL(torch.autograd.Function):
    """By the documented contract, with the ratio kept for backward as the Triton operator keeps it."""

    @staticmethod
    def forward(ctx: Any, policy: torch.Tensor, ref: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor,
                old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ratio = (logp(policy, ids) - old).exp()
        ctx.save_for_backward(policy, ids, ratio)
        return ratio.view(len(ratio)), (logp(ref, ids) - logp(policy, ids)) * mask

    @staticmethod
    def backward(ctx: Any, grad_ratio: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        policy, ids, ratio = ctx.saved_tensors
        onehot = torch.zeros_like(policy).scatter_(1, ids.unsqueeze(1), 1.0)
        return (grad_ratio * ratio).unsqueeze(1) * (onehot - policy.softmax(dim=-1)), None, None, None, None


def ratio_kl(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = RatioKL.apply(*args)  # type: ignore[no-untyped-call]
    return result


OPERATORS = Operators(ratio_kl=ratio_kl, logp=logp, logp_of_far=logp_of_far)


def make_problem(seed: int, rows: int = 5, columns: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator) * 3
    return logits, torch.randint(columns, (rows,), generator=generator), torch.randn(rows, generator=generator)


def solve(logits: torch.Tensor, tokens: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.double().requires_grad_()
    values = leaf.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    return values.detach(), torch.autograd.grad(values, leaf, grad.double())[0]


@given(
    seed=st.integers(0, 10**6),
    with_entropy=st.booleans(),
    hint=st.sampled_from([None, 0.0, 1.0, 7.0, 50.0, 500.0, -500.0, math.nan, math.inf]),
)
@settings(max_examples=60, deadline=None)
def test_log_probs_and_gradient_are_torch_s_however_far_the_hint(
    seed: int, with_entropy: bool, hint: float | None
) -> None:
    logits, tokens, grad = make_problem(seed)
    expected, expected_grad = solve(logits, tokens, grad)
    leaf = logits.clone().requires_grad_()
    given_hint = None if hint is None else (expected.float() + hint)
    values, entropy = select_with_grad(OPERATORS, leaf, tokens, WHOLE, with_entropy=with_entropy, hint=given_hint)
    (found,) = torch.autograd.grad(values, leaf, grad)
    torch.testing.assert_close(values.double(), expected, atol=4e-6, rtol=0)
    torch.testing.assert_close(found.double(), expected_grad, atol=1e-5, rtol=0)
    assert (entropy is not None) == with_entropy
    if entropy is not None:
        assert not entropy.requires_grad
        full = logits.double().log_softmax(dim=-1)
        torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(dim=-1), atol=2e-6, rtol=0)


def test_an_operator_that_keeps_no_ratio_is_found_out() -> None:
    def native(policy: torch.Tensor, ref: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor,
               old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ratio = (logp(policy, ids) - old).exp()
        return ratio * 1.0, ref

    other = Operators(ratio_kl=native, logp=logp, logp_of_far=logp_of_far)
    assert can_mend(OPERATORS, torch.device("cpu"))
    assert not can_mend(other, torch.device("cpu"))


def test_moments_keep_their_digits_far_from_zero() -> None:
    logits = torch.randn(300, 64) * 2 + 5000
    moments = find_moments(logits)
    full = logits.double().log_softmax(dim=-1)
    torch.testing.assert_close(moments.entropy.double(), -(full.exp() * full).sum(dim=-1), atol=1e-6, rtol=0)
    ids = torch.zeros(300, dtype=torch.long)
    torch.testing.assert_close(select_by_moments(logits, ids).double(), full[:, 0], atol=2e-6, rtol=0)


def test_a_block_of_minus_infinity_leaves_the_normaliser_of_the_others() -> None:
    logits = torch.randn(3, 64)
    logits[:, 32:48] = -torch.inf
    largest, log_sum, _ = _moments_by_blocks(logits, 16)
    torch.testing.assert_close(largest + log_sum, logits.logsumexp(dim=-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("place", [0, PROBED_COLUMNS - 1])
def test_minus_infinity_where_the_kernels_begin_is_refused(place: int) -> None:
    logits, tokens, _ = make_problem(1, columns=PROBED_COLUMNS + 20)
    tokens.fill_(PROBED_COLUMNS + 1)
    assert find_value_refusal(logits, tokens, WHOLE) is None
    logits[3, place] = -torch.inf
    assert find_value_refusal(logits, tokens, WHOLE) == Refusal(Reason.NEGATIVE_INFINITY)


def test_minus_infinity_elsewhere_is_served_unless_it_is_the_token_s() -> None:
    logits, tokens, grad = make_problem(1, columns=PROBED_COLUMNS + 20)
    tokens.fill_(PROBED_COLUMNS + 1)
    logits[3, PROBED_COLUMNS + 9] = -torch.inf
    assert find_value_refusal(logits, tokens, WHOLE) is None
    leaf = logits.clone().requires_grad_()
    values, _ = select_with_grad(OPERATORS, leaf, tokens, WHOLE, with_entropy=False)
    expected, expected_grad = solve(logits, tokens, grad)
    torch.testing.assert_close(values.double(), expected, atol=4e-6, rtol=0)
    torch.testing.assert_close(torch.autograd.grad(values, leaf, grad)[0].double(), expected_grad, atol=1e-5, rtol=0)
    logits[3, PROBED_COLUMNS + 1] = -torch.inf
    assert find_value_refusal(logits, tokens, WHOLE) == Refusal(Reason.NEGATIVE_INFINITY)


@pytest.mark.parametrize("token", [-100, -1, 24])
def test_a_token_of_no_vocabulary_is_refused(token: int) -> None:
    logits, tokens, _ = make_problem(1)
    tokens[2] = token
    assert find_value_refusal(logits, tokens, WHOLE) == Refusal(Reason.FOREIGN_ID)


@pytest.mark.parametrize("wrong", [lambda x: x.unsqueeze(1), lambda x: x.double(), lambda x: x[:-1], lambda x: [x]])
def test_an_answer_of_another_form_stops(wrong: Any) -> None:
    logits, tokens, _ = make_problem(1)
    with pytest.raises(RouteFailed, match="logp: the result is not as documented, got"):
        select_no_grad(lambda rows, ids: wrong(logp(rows, ids)), logits, tokens, WHOLE, with_entropy=False)


def run_shard(rank: int, folder: str) -> None:
    """One of two ranks; every assertion is on this rank's half of the columns."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    try:
        shard = Shard.of(dist.group.WORLD)
        for seed in range(12):
            logits, tokens, grad = make_problem(seed)
            if seed % 3 == 2:
                logits[:, 12:] -= 300  # all of the probability on one rank
            expected, expected_grad = solve(logits, tokens, grad)
            half = slice(12 * rank, 12 * rank + 12)
            leaf = logits[:, half].clone().requires_grad_()
            found, entropies = select_no_grad(logp, leaf.detach(), tokens, shard, with_entropy=True)
            full = logits.double().log_softmax(dim=-1)
            torch.testing.assert_close(found.double(), expected, atol=4e-5 if seed % 3 == 2 else 4e-6, rtol=0)
            assert entropies is not None
            entropy = -(full.exp() * full).sum(dim=-1)
            torch.testing.assert_close(entropies.double(), entropy, atol=2e-6, rtol=0)
            for with_entropy in (False, True):
                values, _ = select_with_grad(OPERATORS, leaf, tokens, shard, with_entropy=with_entropy)
                (found,) = torch.autograd.grad(values, leaf, grad)
                torch.testing.assert_close(found.double(), expected_grad[:, half], atol=1e-5, rtol=0)
        logits, tokens, _ = make_problem(0)
        logits[0, 0] = -torch.inf if rank == 0 else 1.0
        assert find_value_refusal(logits[:, :12], tokens, shard) == Refusal(Reason.NEGATIVE_INFINITY)
        assert find_value_refusal(torch.zeros(2, 12), torch.tensor([0, 24]), shard) == Refusal(Reason.FOREIGN_ID)
    finally:
        dist.destroy_process_group()


def test_over_a_split_vocabulary_all_is_the_same(tmp_path: Path) -> None:
    run_ranks(run_shard, str(tmp_path))


# Where the old log-probs of a microbatch belong among its packed rows, and when there are none to take.

LENGTHS = ((7, 3), (4, 0), (9, 5))  # prompt and response together, response
NUM_ROWS = 24  # with four of padding


def make_batch(**changes: Any) -> dict[str, Any]:
    return {
        "log_probs": [torch.full((response,), -1.0 - index) for index, (_, response) in enumerate(LENGTHS)],
        "rollout_log_probs": [torch.full((response,), -9.0) for _, response in LENGTHS],
        "total_lengths": [total for total, _ in LENGTHS],
        "response_lengths": [response for _, response in LENGTHS],
    } | changes


def find(batch: dict[str, Any], num_rows: int = NUM_ROWS, **options: Any) -> torch.Tensor | None:
    current = CurrentBatch()
    with current.hold(argparse.Namespace(**options), batch):
        return current.find_old_log_probs(num_rows)


def test_they_stand_in_the_rows_that_predict_the_response() -> None:
    found = find(make_batch())
    assert found is not None
    assert found.tolist() == [0, 0, 0, -1, -1, -1, 0, *[0] * 4, 0, 0, 0, -3, -3, -3, -3, -3, 0, *[0] * 4]


def test_they_are_the_rollout_s_where_the_loss_takes_those() -> None:
    found = find(make_batch(), use_rollout_logprobs=True)
    assert found is not None
    assert set(found.tolist()) == {0.0, -9.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"log_probs": None},
        {"log_probs": []},
        {"response_lengths": [3, 0, 4]},
        {"total_lengths": [7, 4, 90]},
        {"total_lengths": [3, 4, 9]},
    ],
    ids=["absent", "empty", "other lengths", "more rows than there are", "no prompt"],
)
def test_an_unknown_layout_gives_no_old_log_probs(changes: dict[str, Any]) -> None:
    assert find(make_batch(**changes)) is None
