"""Make random packed batches in the form that vime's loss functions take.

The same seed and rank give the same bytes in every process.  The values of each token are equal on all ranks; the
logits differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed

from rlk_repro.refengine.core import cut_responses

# Megatron-LM's default of --make-vocab-size-divisible-by
VOCABULARY_MULTIPLE: Final = 128
# standard deviations; with these values, a few percent of the ratios are clipped, and log-probs differ as they do
# between engines
UPDATE_SPREAD: Final = 0.2
ROLLOUT_SPREAD: Final = 0.02
MASKED_FRACTION: Final = 0.1
ORACLE_ROWS: Final = 256
# two changes of logits imitate policy updates; one change of log-probs imitates the rollout's different kernels
NUM_CHANGES: Final = 3


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of one microbatch, whose vocabulary is split over ``num_ranks`` ranks."""

    num_samples: int
    num_tokens: int
    prompt_fraction: float
    vocab_size: int
    rank: int = 0
    num_ranks: int = 1

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary as Megatron-LM pads it: a multiple of 128 columns on every rank."""
        multiple = VOCABULARY_MULTIPLE * self.num_ranks
        return math.ceil(self.vocab_size / multiple) * multiple

    @property
    def num_columns(self) -> int:
        return self.padded_vocab_size // self.num_ranks


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitsBatch:
    """Logits [1, T, V / ranks] float32 that require a gradient, and the ``batch`` with the tokens of the same T rows.

    ``taken`` [T] holds the logit of each row's next token; ``rows`` and ``columns`` are the places of these logits on
    this rank.  ``noise`` yields a tensor [T] of standard normal numbers for each random change of logits or log-probs.
    No method waits for the device.
    """

    logits: torch.Tensor
    batch: dict[str, Any]
    taken: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    noise: Iterator[torch.Tensor]

    @torch.no_grad()
    def write_taken(self) -> None:
        self.logits[0, self.rows, self.columns] = self.taken[self.rows]

    @torch.no_grad()
    def update(self) -> None:
        """Add random noise to the logits of the sampled tokens, to imitate an optimizer step."""
        self.taken.add_(next(self.noise), alpha=UPDATE_SPREAD)
        self.write_taken()

    @torch.no_grad()
    def add_rollout_log_probs(self, temperature: float, group: Any) -> None:
        """Add the rollout's log-probs to the batch: the current policy's log-probs plus small random differences."""
        log_probs = self.taken / temperature - find_normaliser(self.logits[0], temperature, group)
        log_probs.add_(next(self.noise), alpha=ROLLOUT_SPREAD)
        self.batch["rollout_log_probs"] = cut_responses(log_probs, self.batch)


def make_microbatch(shape: BatchShape, device: torch.device, *key: int) -> LogitsBatch:
    """Make the random microbatch that follows from a key such as (seed, rollout, step, number).

    The logits of sampled tokens are raised: as in real samples, the probabilities of these tokens spread around 0.7.
    """
    generator = torch.Generator().manual_seed(make_seed(*key))
    batch, targets = _make_batch(shape, device, generator)
    first = shape.rank * shape.num_columns
    rows = torch.nonzero((targets >= first) & (targets < first + shape.num_columns)).squeeze(-1)
    odds, *noise = torch.randn(1 + NUM_CHANGES, shape.num_tokens, generator=generator).to(device)
    own = torch.Generator(device).manual_seed(make_seed(*key, shape.rank))
    microbatch = LogitsBatch(
        logits=torch.randn(1, shape.num_tokens, shape.num_columns, generator=own, device=device, requires_grad=True),
        batch=batch,
        # the log of the sum of exp over V standard normal logits is about ln V + 1/2
        taken=math.log(shape.padded_vocab_size) + 0.5 + 1 + 2 * odds,
        rows=rows.to(device),
        columns=(targets[rows] - first).to(device),
        noise=iter(noise),
    )
    microbatch.write_taken()
    return microbatch


def _make_batch(
    shape: BatchShape, device: torch.device, generator: torch.Generator
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the batch, and each row's next token on the CPU; -1 for a row without a next token."""
    totals = split_tokens(shape.num_tokens, shape.num_samples, generator)
    responses = [total - min(max(round(total * shape.prompt_fraction), 1), total - 1) for total in totals]
    tokens = torch.randint(shape.vocab_size, (shape.num_tokens,), generator=generator)
    targets = tokens.roll(-1)
    targets[torch.tensor(totals).cumsum(0) - 1] = -1
    masks = [(torch.rand(length, generator=generator) >= MASKED_FRACTION).float().to(device) for length in responses]
    advantages = torch.randn(shape.num_samples, generator=generator).tolist()
    batch = {
        "unconcat_tokens": list(torch.split(tokens.to(device), totals)),
        "total_lengths": totals,
        "response_lengths": responses,
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]),
        "advantages": [
            torch.full((length,), advantage, device=device)
            for length, advantage in zip(responses, advantages, strict=True)
        ],
    }
    return batch, targets


def make_seed(*key: int) -> int:
    """Return a seed of 63 bits; two keys get the same seed only by chance."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def split_tokens(num_tokens: int, num_samples: int, generator: torch.Generator) -> list[int]:
    """Return sample lengths, at least 2, that add up to ``num_tokens``; they differ by a factor of about 3 at most."""
    weights = 0.5 + torch.rand(num_samples, generator=generator, dtype=torch.float64)
    spare = num_tokens - 2 * num_samples
    ends = (weights.cumsum(0) / weights.sum() * spare).round().long()
    ends[-1] = spare
    return (2 + ends.diff(prepend=ends.new_zeros(1))).tolist()


def find_normaliser(logits: torch.Tensor, temperature: float, group: Any) -> torch.Tensor:
    """Return each row's log of the sum of exponentials [T], over the columns of all ranks, by plain torch only."""
    own = torch.cat([(rows / temperature).logsumexp(-1) for rows in torch.split(logits, ORACLE_ROWS)])
    if distributed.get_world_size(group) == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, own, group=group)
    return torch.stack(parts).logsumexp(0)
