"""Define the result of a run with ``what_for: largest-microbatch``: how many tokens of a microbatch fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlk_repro.base.units import count, format_count

LARGEST_MICROBATCH: Final = "largest microbatch"


@dataclass(frozen=True)
class Microbatch:
    """The microbatch of a step that was trained; ``peak_bytes`` is the peak of allocated GPU memory in that step."""

    tokens: int
    peak_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class MicrobatchResult:
    """The steps of one trial, smallest microbatch first; with a ``reason``, the trial gives no result.

    ``refused`` is the number of tokens that ran out of memory, or None if the trial trained every rollout.
    """

    trial: str
    variant: str
    trained: tuple[Microbatch, ...]
    refused: int | None
    reason: str = ""

    @property
    def largest(self) -> int | None:
        return None if self.reason or not self.trained else self.trained[-1].tokens

    def __str__(self) -> str:
        if self.largest is None:
            return f"{self.trial}: {self.reason}"
        end = "every rollout fitted" if self.refused is None else f"{format_count(self.refused)} ran out of memory"
        return f"{self.trial}: {count(self.largest, 'token')} fitted, {end}"


def describe_microbatches(results: Sequence[MicrobatchResult]) -> str:
    """Return a text like ``largest microbatch that trained: 45,056 tokens in baseline, 46,080 tokens in enabled``."""
    texts = []
    for variant in dict.fromkeys(result.variant for result in results):
        found = [result for result in results if result.variant == variant]
        sizes = [result.largest for result in found if result.largest is not None]
        ends = dict.fromkeys(format_count(end) for end in ((min(sizes), max(sizes)) if sizes else ()))
        more = " or more" if any(result.largest and result.refused is None for result in found) else ""
        texts.append(f"{' to '.join(ends)} tokens{more} in {variant}" if ends else f"unknown in {variant}")
    return f"{LARGEST_MICROBATCH} that trained: {', '.join(texts)}"
