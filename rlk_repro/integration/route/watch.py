"""Check the operators' results without waiting for the device, and report invalid results when the step ends.

The check finds values that cannot be log-probs, and token ids outside the vocabulary; it does not measure accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch

HIGHEST: Final = 1e-3
"""Largest value that passes as a log-prob: a log-prob is at most 0, and rounding adds much less than this value."""


@dataclass(frozen=True)
class _Seen:
    op: str
    num_columns: int
    lowest_token: torch.Tensor
    highest_token: torch.Tensor
    highest: torch.Tensor


@dataclass
class Watch:
    """Keeps each call's extreme token ids and highest log-prob on the device until ``settle`` reads them."""

    _seen: list[_Seen] = field(default_factory=list)

    def add(self, op: str, tokens: torch.Tensor, num_columns: int, log_probs: torch.Tensor) -> None:
        lowest, highest = torch.aminmax(tokens)
        self._seen.append(_Seen(op, num_columns, lowest, highest, log_probs.detach().amax()))

    @contextmanager
    def aside(self) -> Iterator[None]:
        kept, self._seen = self._seen, []
        try:
            yield
        finally:
            self._seen = kept

    def settle(self) -> dict[str, str]:
        """Wait for the device; return a description of the invalid values since the last ``settle``, by operator."""
        seen, self._seen = self._seen, []
        if not seen:
            return {}
        tokens = torch.stack([torch.stack((item.lowest_token, item.highest_token)) for item in seen]).tolist()
        highest = torch.stack([item.highest for item in seen]).tolist()
        odd: dict[str, str] = {}
        for item, (low, high), value in zip(seen, tokens, highest, strict=True):
            if low < 0 or high >= item.num_columns:
                odd.setdefault(item.op, f"token ids from {low} to {high} in a vocabulary of {item.num_columns}")
            if not value <= HIGHEST:
                odd.setdefault(item.op, f"the operator returned {value}, expected a value of at most 0")
        return odd
