"""Find the rows of a trainer's microbatch, and hold the microbatch whose loss is being computed.

Without context parallelism the rows of samples follow one another.  In a sample of n tokens with a response of r
tokens, rows n-r-1 to n-2 predict the response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def find_old(args: Any, batch: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """Return the old policy's log-probs, one tensor [r] per response; empty if the batch has no such log-probs."""
    is_rollouts = getattr(args, "use_rollout_logprobs", False)
    return batch.get("rollout_log_probs" if is_rollouts else "log_probs") or ()


def pack_tokens(batch: Mapping[str, Any], num_rows: int) -> torch.Tensor:
    responses = batch["response_lengths"]
    parts = [one[len(one) - length :] for one, length in zip(batch["unconcat_tokens"], responses, strict=True)]
    return pack(parts, batch, num_rows)


def pack(parts: Sequence[torch.Tensor], batch: Mapping[str, Any], num_rows: int) -> torch.Tensor:
    """Return [num_rows]: the value of the response token that each row predicts, or 0 if the row predicts none."""
    padding = parts[0].new_zeros(num_rows)
    pieces, position = [], 0
    for part, total, response in zip(parts, batch["total_lengths"], batch["response_lengths"], strict=True):
        pieces += [padding[: total - response - 1], part, padding[:1]]
        position += total
    return torch.cat([*pieces, padding[: num_rows - position]])


@dataclass
class CurrentBatch:
    """The current loss's arguments; if log-probs are computed for first rows only, ``num_rows`` counts all rows."""

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
        if self.batch is None:
            return None
        parts, whole = find_old(self.args, self.batch), self.num_rows or num_rows
        totals, responses = self.batch.get("total_lengths"), self.batch.get("response_lengths")
        if not parts or not totals or not responses or sum(totals) > whole or responses != [len(p) for p in parts]:
            return None
        if any(response >= total for response, total in zip(responses, totals, strict=True)):
            return None
        return pack(parts, self.batch, whole).float()[:num_rows]
