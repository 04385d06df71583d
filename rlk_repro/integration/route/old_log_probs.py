"""The old policy's log-probs of the microbatch whose loss is being computed, laid out as its packed rows are.

They are near the current ones, and that is all they are used for; a layout that is not understood gives none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class CurrentBatch:
    """What the trainer's loss was called with, while it runs."""

    args: Any = None
    batch: Mapping[str, Any] | None = None

    @contextmanager
    def hold(self, args: Any, batch: Mapping[str, Any]) -> Iterator[None]:
        self.args, self.batch = args, batch
        try:
            yield
        finally:
            self.args = self.batch = None

    def find_old_log_probs(self, num_rows: int) -> torch.Tensor | None:
        """[num_rows] float32, zero where no response token is predicted; None where there are none or they do not fit.

        Row layout of vime without context parallelism: samples one after another; a sample of n tokens with a response
        of r predicts it in its rows n-r-1 to n-2.
        """
        if self.batch is None:
            return None
        name = "rollout_log_probs" if getattr(self.args, "use_rollout_logprobs", False) else "log_probs"
        parts, totals, responses = (self.batch.get(key) for key in (name, "total_lengths", "response_lengths"))
        if not parts or not totals or not responses or sum(totals) > num_rows or responses != [len(p) for p in parts]:
            return None
        if any(response >= total for response, total in zip(responses, totals, strict=True)):
            return None
        return pack_rows(parts, totals, responses, num_rows).float()


def pack_rows(
    parts: Sequence[torch.Tensor], totals: Sequence[int], responses: Sequence[int], num_rows: int
) -> torch.Tensor:
    """[num_rows]: per-token values of the responses in the rows that predict them, zero elsewhere."""
    padding = parts[0].new_zeros(num_rows)
    pieces, position = [], 0
    for part, total, response in zip(parts, totals, responses, strict=True):
        pieces += [padding[: total - response - 1], part, padding[:1]]
        position += total
    return torch.cat([*pieces, padding[: num_rows - position]])
