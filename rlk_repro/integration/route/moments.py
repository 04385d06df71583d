"""Compute normaliser and entropy of each row of logits, without gradient, in one read of the logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

_ROWS: Final = 256
_BLOCKS: Final = (1024, 512, 256, 128)


class Moments(NamedTuple):
    """Per row [T] float32: the largest logit, the logarithm of the sum of exp(logit - largest), and the entropy.

    ``largest`` and ``log_sum`` stay separate, because rounding their sum, the log-sum-exp, would lose digits.
    """

    largest: torch.Tensor
    log_sum: torch.Tensor
    entropy: torch.Tensor


def find_moments(logits: torch.Tensor) -> Moments:
    with torch.no_grad():
        if not logits.is_cuda:
            parts = [_moments_by_blocks(rows, rows.shape[1]) for rows in torch.split(logits, _ROWS)]
            return Moments(*map(torch.cat, zip(*parts, strict=True)))
        block = next((size for size in _BLOCKS if logits.shape[1] % size == 0), logits.shape[1])
        torch._dynamo.maybe_mark_dynamic(logits, 0)  # noqa: SLF001  avoids a compilation for each number of rows
        return Moments(*_compile_moments()(logits, block))


@functools.cache
def _compile_moments() -> Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]:
    """The compiled function reads the logits once and makes no [T, V] intermediates."""
    return torch.compile(_moments_by_blocks)


def _moments_by_blocks(logits: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
    """Compute ``Moments`` by blocks of columns that fit into registers, so that each row is read only once.

    With x = logit - largest: entropy = log(sum exp(x)) - sum x exp(x) / sum exp(x).
    """
    values = logits.float().view(logits.shape[0], -1, block)
    tops = values.amax(dim=-1, keepdim=True)
    below = values - tops.clamp_min(torch.finfo(torch.float32).min)  # all logits of a block can be -inf
    powers = below.exp()
    sums, weighted = powers.sum(dim=-1), (powers * below).sum(dim=-1)
    tops = tops.squeeze(-1)
    shifts = tops - tops.amax(dim=-1, keepdim=True)
    scales = shifts.exp()
    total = (sums * scales).sum(dim=-1)
    log_sum = total.log()
    return tops.amax(dim=-1), log_sum, log_sum - ((weighted + shifts * sums) * scales).sum(dim=-1) / total
