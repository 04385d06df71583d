"""Describe the order of rows in a trainer's microbatch, and hold the microbatch whose loss is being computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The layout of a microbatch without context parallelism: the rows of its samples follow one another.

    In a sample of n tokens with a response of r tokens, rows n-r-1 to n-2 predict the response.  Each field names a key
    of the batch, except ``use_rollout_log_probs``: it names the trainer's option.
    """

    total_lengths: str = "total_lengths"
    response_lengths: str = "response_lengths"
    tokens: str = "unconcat_tokens"
    log_probs: str = "log_probs"
    rollout_log_probs: str = "rollout_log_probs"
    use_rollout_log_probs: str = "use_rollout_logprobs"

    def find_old(self, args: Any, batch: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Return the old policy's log-probs, one tensor [r] per response; empty if the batch has no such log-probs."""
        is_rollouts = getattr(args, self.use_rollout_log_probs, False)
        return batch.get(self.rollout_log_probs if is_rollouts else self.log_probs) or ()

    def pack_old(self, args: Any, batch: Mapping[str, Any], num_rows: int) -> torch.Tensor | None:
        parts = self.find_old(args, batch)
        totals, responses = (batch.get(key) for key in (self.total_lengths, self.response_lengths))
        if not parts or not totals or not responses or sum(totals) > num_rows or responses != [len(p) for p in parts]:
            return None
        if any(response >= total for response, total in zip(responses, totals, strict=True)):
            return None
        return self.pack(parts, batch, num_rows).float()

    def pack_tokens(self, batch: Mapping[str, Any], num_rows: int) -> torch.Tensor:
        responses = batch[self.response_lengths]
        parts = [one[len(one) - length :] for one, length in zip(batch[self.tokens], responses, strict=True)]
        return self.pack(parts, batch, num_rows)

    def pack(self, parts: Sequence[torch.Tensor], batch: Mapping[str, Any], num_rows: int) -> torch.Tensor:
        """Return [num_rows]: the value of the response token that each row predicts, or 0 if the row predicts none."""
        padding = parts[0].new_zeros(num_rows)
        pieces, position = [], 0
        for part, total, response in zip(parts, batch[self.total_lengths], batch[self.response_lengths], strict=True):
            pieces += [padding[: total - response - 1], part, padding[:1]]
            position += total
        return torch.cat([*pieces, padding[: num_rows - position]])


@dataclass
class CurrentBatch:
    """The arguments of the loss that runs now; if only its first rows are computed, ``num_rows`` counts all rows."""

    layout: RowLayout = field(default_factory=RowLayout)
    args: Any = None
    batch: Mapping[str, Any] | None = None
    num_rows: int | None = None

    @contextmanager
    def hold(self, args: Any, batch: Mapping[str, Any], num_rows: int | None = None) -> Iterator[None]:
        self.args, self.batch, self.num_rows = args, batch, num_rows
        try:
            yield
        finally:
            self.args = self.batch = self.num_rows = None

    def find_old_log_probs(self, num_rows: int) -> torch.Tensor | None:
        """Return old log-probs [num_rows] float32, 0 outside responses; None if they are absent or have wrong sizes."""
        found = None if self.batch is None else self.layout.pack_old(self.args, self.batch, self.num_rows or num_rows)
        return None if found is None else found[:num_rows]
