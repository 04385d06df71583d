"""Compute effects of blocks and sessions in the crossover design, their exact p-values and the slope on a covariate.

The code is plain Python with exact sums, so that sealed numbers do not depend on the version of a library.  The design
is that of Jones and Kenward, Design and Analysis of Cross-Over Trials.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from statistics import median
from typing import Final

from rlk_repro.statistics.stats import Interval, mean, stdev, t_interval, t_quantile

MIN_SESSIONS: Final = 3
MIN_BLOCKS: Final = 6
MAX_SUMS: Final = 1_000_000
"""If either half of the sessions has more possible sums of block effects than this, no exact p is computed."""
ROUNDING: Final = 1e-12
SD_PER_MAD: Final = 1.4826
"""The standard deviation of normal noise, as a multiple of the median of its absolute values."""
_FIRST_LABEL: Final = "A"


def block_effect(order: str, values: Sequence[float | None]) -> float | None:
    """Return the mean logarithm of a block's values in periods B minus the mean logarithm in periods A.

    The result is None if a value is missing or not above 0.  Linear drift over the block cancels in the orders ABBA and
    BAAB.
    """
    logs = [math.log(value) if value is not None and 0 < value < math.inf else None for value in values]
    sides: tuple[list[float], list[float]] = ([], [])
    for label, log in zip(order, logs, strict=True):
        if log is None:
            return None
        sides[label != _FIRST_LABEL].append(log)
    first, second = sides
    return mean(second) - mean(first)


def hodges_lehmann(values: Sequence[float]) -> float:
    """Return the median of the means of all pairs of values, each value also with itself (Hodges and Lehmann 1963).

    One slow block of eight changes the result very little.
    """
    return median((one + other) / 2 for one, other in combinations_with_replacement(values, 2))


@dataclass(frozen=True, kw_only=True)
class BlockNoise:
    """The standard error that the noise of blocks alone gives the mean of session effects, as a log ratio."""

    error: float
    df: int

    def half_width(self, confidence: float) -> float:
        return t_quantile(confidence, self.df) * self.error


def measure_noise(sessions: Sequence[Sequence[float]]) -> BlockNoise | None:
    """Return the noise of the blocks of these sessions around their sessions' effects; None for one block a session.

    The median absolute residual measures the noise, because a standard deviation would grow with every rare stall.
    """
    residuals: list[float] = []
    for values in sessions:
        center = hodges_lehmann(values)
        residuals += [abs(value - center) for value in values]
    df = len(residuals) - len(sessions)
    if df < 1:
        return None
    spread = SD_PER_MAD * median(residuals) * math.sqrt(len(residuals) / df)
    return BlockNoise(
        error=spread * math.sqrt(math.fsum(1 / len(values) for values in sessions)) / len(sessions), df=df
    )


def trimmed_interval(values: Sequence[float], confidence: float) -> Interval | None:
    """Return the two-sided t interval of the mean without the lowest and highest fifth of the values (Yuen 1974).

    For the standard deviation, the nearest kept value replaces each trimmed value.
    """
    n = len(values)
    cut = n // 5
    if not cut:
        return t_interval(values, confidence)
    ordered = sorted(values)
    kept = ordered[cut : n - cut]
    center = mean(kept)
    spread = stdev([kept[0]] * cut + kept + [kept[-1]] * cut) * n / len(kept)
    half = t_quantile(confidence, len(kept) - 1) * spread / math.sqrt(n)
    return Interval(estimate=center, low=center - half, high=center + half, stdev=spread, n=n)


def common_slope(sessions: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Return the median of all slopes between two blocks of the same session (Theil 1950, Sen 1968).

    Each block gives two numbers: the covariate in B minus that in A, and the block's effect.  The result is None if
    in every session all blocks have the same difference of the covariate; differences that differ only by rounding
    count as equal.
    """
    slopes = [
        (second[1] - first[1]) / (second[0] - first[0])
        for blocks in sessions
        for first, second in combinations(blocks, 2)
        if abs(first[0] - second[0]) > ROUNDING
    ]
    return median(slopes) if slopes else None


def randomisation_p(sessions: Sequence[Sequence[tuple[str, float | None]]]) -> tuple[float, float] | None:
    """Return the exact two-sided p of the sum of all block effects, and the smallest p that the design allows.

    The p value covers all orders that the design could have drawn: each session has as many ABBA as BAAB blocks, or for
    an odd number of blocks one more of either (Edgington and Onghena, Randomization Tests).

    Args:
        sessions: for each session, the order and the effect of every block; a lost block has the effect None.

    Returns:
        None if every effect is 0 or None, or if the exact count would take too long.
    """
    signed = [
        [((1.0 if order[0] == _FIRST_LABEL else -1.0) * (effect or 0.0)) for order, effect in blocks]
        for blocks in sessions
    ]
    seen = abs(math.fsum(effect or 0.0 for blocks in sessions for _, effect in blocks))
    scale = math.fsum(abs(value) for blocks in signed for value in blocks)
    counts = [_count_orders(len(blocks)) for blocks in signed]
    if not scale or math.prod(counts[::2]) > MAX_SUMS or math.prod(counts[1::2]) > MAX_SUMS:
        return None
    left, right = (_add_sums(list(map(_list_sums, signed[start::2]))) for start in (0, 1))
    right.sort()
    # Sums that differ only by rounding count as equal, so every machine gives the same p.
    least = seen - 1e-9 * scale
    extreme = sum(bisect_right(right, -least - value) + len(right) - bisect_left(right, least - value)
                  for value in left)  # fmt: skip
    total = len(left) * len(right)
    return min(1.0, extreme / total), min(1.0, 2 / total)


def _count_orders(number: int) -> int:
    half = number // 2
    return math.comb(number, half) * (2 if number % 2 else 1)


def _list_sums(values: Sequence[float]) -> list[float]:
    total, number = math.fsum(values), len(values)
    sizes = {number // 2, number - number // 2}
    return [total - 2 * math.fsum(chosen) for size in sizes for chosen in combinations(values, size)]


def _add_sums(lists: Sequence[Sequence[float]]) -> list[float]:
    def add(first: Sequence[float], second: Sequence[float]) -> Iterator[float]:
        return (one + other for one in first for other in second)

    found = [0.0]
    for items in lists:
        found = list(add(found, items))
    return found
