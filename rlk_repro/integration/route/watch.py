"""Check the operators' results without waiting for the device, and report invalid results when the step ends.

The check finds values that cannot be log-probs, and token ids outside the vocabulary; it does not measure accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch

HIGHEST: Final = 1e-3
"""Largest value that passes as a log-prob: a log-prob is at most 0, and rounding adds much less than this value."""


Seen: TypeAlias = tuple[str, int, torch.Tensor, torch.Tensor, torch.Tensor]
"""Operator, size of the vocabulary, lowest and highest token id, and highest log-prob of a call."""


@dataclass
class Watch:
    """Keeps each call's extreme token ids and highest log-prob on the device until ``settle`` reads them."""

    _seen: list[Seen] = field(default_factory=list)

    def add(self, op: str, tokens: torch.Tensor, num_columns: int, log_probs: torch.Tensor) -> None:
        lowest, highest = torch.aminmax(tokens)
        self._seen.append((op, num_columns, lowest, highest, log_probs.detach().amax()))

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
        tokens = torch.stack([torch.stack((low, high)) for _, _, low, high, _ in seen]).tolist()
        highest = torch.stack([value for *_, value in seen]).tolist()
        odd: dict[str, str] = {}
        for (op, num_columns, *_), (low, high), value in zip(seen, tokens, highest, strict=True):
            if low < 0 or high >= num_columns:
                ids = f"token ids from {low} to {high}"
                odd.setdefault(op, f"{ids} in a vocabulary of {num_columns}")
            if not value <= HIGHEST:
                what = f"the operator returned {value}, expected a value of at most 0"
                odd.setdefault(op, what)
        return odd
