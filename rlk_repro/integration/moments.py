"""Log-sum-exp and mean of each row of logits under its softmax: all that an entropy needs, in one read of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch

_ROWS: Final = 256
"""Computed at a time where nothing is compiled."""
_BLOCKS: Final = (1024, 512, 256, 128)


def find_moments(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the log-sum-exp and the mean logit under the softmax, both [T] float32, without gradient."""
    with torch.no_grad():
        if not logits.is_cuda:
            return _find_moments_by_chunks(logits)
        block = next((size for size in _BLOCKS if logits.shape[1] % size == 0), logits.shape[1])
        torch._dynamo.maybe_mark_dynamic(logits, 0)  # noqa: SLF001 documented under this name; every microbatch has its own number of rows
        return _compile_moments()(logits, block)


@functools.cache
def _compile_moments() -> Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]:
    """One read of the logits instead of several [T, V] intermediates; vime compiles functions of its own likewise."""
    return torch.compile(_moments_by_blocks)


def _moments_by_blocks(logits: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments of blocks of columns that fit into registers, then of the blocks: a row is read once, not twice."""
    values = logits.float().view(logits.shape[0], -1, block)
    tops = values.amax(dim=-1, keepdim=True)
    powers = (values - tops).exp()
    sums, weighted = powers.sum(dim=-1), (powers * values).sum(dim=-1)
    top = tops.amax(dim=1)
    scales = (tops.squeeze(-1) - top).exp()
    total = (sums * scales).sum(dim=-1)
    return top.squeeze(-1) + total.log(), (weighted * scales).sum(dim=-1) / total


def _moments(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = logits.float()
    top = values.amax(dim=-1, keepdim=True)
    powers = (values - top).exp()
    total = powers.sum(dim=-1)
    return top.squeeze(-1) + total.log(), (powers * values).sum(dim=-1) / total


def _find_moments_by_chunks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = [_moments(chunk) for chunk in torch.split(logits, _ROWS)]
    return torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks])
