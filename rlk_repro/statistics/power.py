"""Compute how small an effect a given number of pairs can show, and how many pairs a gate needs.

The code is plain Python, so that a dry run starts fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist
from typing import Final

from rlk_repro.statistics.crossover import MIN_BLOCKS, MIN_SESSIONS
from rlk_repro.statistics.stats import t_quantile

MIN_PAIRS: Final = 6
HODGES_LEHMANN_EFFICIENCY: Final = 3 / math.pi
TRIMMED_EFFICIENCY: Final = 0.9
"""The efficiency of the 20 % trimmed mean relative to the mean, for normal noise."""
STEP_AND_TRIAL_SD: Final = {"raw_reward": (0.02, 0.006), "response_length_mean": (0.03, 0.008)}
"""Assumed standard deviations between steps and between trials; those of response length are fractions of its mean."""
MAX_PAIRS_SUGGESTED: Final = 200
LARGEST_LOG_EFFECT: Final = 4.0
_NODES: Final = 200
_FLOOR_NODES: Final = (32, 4)


@lru_cache(maxsize=64)
def smallest_effect(
    num_pairs: int,
    pair_sd_pct: float,
    smallest_effect_pct: float,
    alpha: float,
    power: float = 0.9,
    num_control_pairs: int = 0,
    least: int = MIN_PAIRS,
    gates: float = 1.0,
) -> float | None:
    """Return the smallest true speed-up for which the verdict is ``faster`` with probability ``power``.

    The speed-up is a fraction: 0.04 means that the baseline takes 4 % longer.  Control pairs measure a noise floor,
    which replaces the smallest effect of interest if it is larger.  The result is None for fewer than ``least`` pairs
    or sessions, or if the power is too small even for a 50-fold speed-up.

    Args:
        pair_sd_pct: standard deviation of the log ratio of one pair, in percent.
        gates: the chance that all gates pass.
    """
    if num_pairs < least:
        return None
    design = Design(num_pairs, pair_sd_pct / 100, smallest_effect_pct / 100, alpha, num_control_pairs)
    return _search(lambda log_effect: design.power(log_effect) * gates, power)


def chance_of_live_gates(
    *, num_pairs: int, scored_steps: int, alpha: float, reward_margin: float, length_margin: float
) -> float:
    """Return the chance that pairs of the lane ``live`` pass the reward and length gates if the variants are equal."""
    if num_pairs < 2:
        return 0.0
    reward, length = (
        math.sqrt(2 * (trial_sd**2 + step_sd**2 / scored_steps)) for step_sd, trial_sd in STEP_AND_TRIAL_SD.values()
    )
    return _chance_within(num_pairs, reward, reward_margin, alpha, num_sides=1) * _chance_within(
        num_pairs, length, math.log1p(length_margin), alpha
    )


def _search(find_power: Callable[[float], float], power: float) -> float | None:
    low, high = 0.0, LARGEST_LOG_EFFECT
    if find_power(high) < power:
        return None
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if find_power(middle) < power else (low, middle)
    return math.expm1(high)


@lru_cache(maxsize=64)
def smallest_session_effect(
    *,
    sessions: int,
    blocks: int,
    control_blocks: int,
    block_sd_pct: float,
    smallest_effect_pct: float,
    alpha: float,
    power: float = 0.9,
) -> float | None:
    """Return the smallest true speed-up for which sessions give the verdict ``faster`` with probability ``power``.

    ``power`` is the probability that the effect is detected and the gate on control blocks passes.  ``block_sd_pct`` is
    the standard deviation of the log ratio of one block, in percent; sessions are assumed to differ by this noise only.
    The result is None for too little data, or if even a 50-fold speed-up does not reach ``power``.
    """
    number = sessions * control_blocks
    if sessions < MIN_SESSIONS or blocks < MIN_BLOCKS or 0 < number < MIN_BLOCKS:
        return None
    block_sd, smallest = block_sd_pct / 100, smallest_effect_pct / 100
    design = Design(sessions, block_sd / math.sqrt(HODGES_LEHMANN_EFFICIENCY * blocks), smallest, alpha, 0)

    def find_power(log_effect: float) -> float:
        margin = max(math.log1p(smallest), log_effect - design.half_width)
        chance = _chance_within(number, block_sd / math.sqrt(TRIMMED_EFFICIENCY), margin, alpha) if number > 1 else 1.0
        return design.power(log_effect) * chance

    return _search(find_power, power)


def _chance_within(number: int, sd: float, margin: float, alpha: float, num_sides: int = 2) -> float:
    """Return the chance that, without a true effect, the interval of ``number`` values lies within ``margin``."""
    error, critical = sd / math.sqrt(number), t_quantile(1 - 2 * alpha, number - 1)
    reaches = ((weight, (margin - critical * spread * error) / error) for spread, weight in _spread_weights(number - 1))
    if num_sides == 1:
        return math.fsum(weight * NormalDist().cdf(reach) for weight, reach in reaches)
    return math.fsum(weight * math.erf(reach / math.sqrt(2)) for weight, reach in reaches if reach > 0)


class Design:
    """Pairs or sessions whose log ratios have the standard deviation ``sd``; ``smallest`` is the effect of interest."""

    def __init__(self, num_pairs: int, sd: float, smallest: float, alpha: float, num_control_pairs: int) -> None:
        self._df = num_pairs - 1
        self._error = sd / math.sqrt(num_pairs)
        self._critical = t_quantile(1 - alpha, self._df)
        floors = _likely_floors(num_control_pairs, sd, alpha) if num_control_pairs > 1 else [0.0]
        self._thresholds = [max(math.log1p(smallest), floor) for floor in floors]

    @property
    def half_width(self) -> float:
        return self._critical * self._error

    def power(self, log_effect: float) -> float:
        chances = (
            _noncentral_t_tail(self._critical, self._df, (log_effect - threshold) / self._error)
            for threshold in self._thresholds
        )
        return math.fsum(chances) / len(self._thresholds)


def _likely_floors(num_control_pairs: int, sd: float, alpha: float) -> list[float]:
    """Return equally weighted values of the noise floor, abs(mean) + t s / sqrt(n), for a true effect of 0."""
    critical, error = t_quantile(1 - alpha, num_control_pairs - 1), sd / math.sqrt(num_control_pairs)
    num_spreads, num_means = _FLOOR_NODES
    means = [NormalDist().inv_cdf(0.5 + (index + 0.5) / num_means / 2) for index in range(num_means)]
    spreads = _likely_spreads(num_control_pairs - 1, num_spreads)
    return [error * (center + critical * spread) for center in means for spread in spreads]


def _likely_spreads(df: int, number: int) -> list[float]:
    """Return ``number`` evenly spaced quantiles of s / sigma, a sample's standard deviation divided by the true one."""
    found: list[float] = []
    reached = 0.0
    for spread, weight in _spread_weights(df):
        reached += weight
        while len(found) < number and reached > (len(found) + 0.5) / number:
            found.append(spread)
    return found


def pairs_to_decide(sd: float, margin: float, alpha: float) -> int | None:
    """Return how many pairs a gate needs to pass in 4 of 5 experiments if the variants are truly equal.

    The gate passes if the one-sided bound of the mean at ``alpha`` is within ``margin``.  The result is None for more
    than 200 pairs.
    """
    for n in range(2, MAX_PAIRS_SUGGESTED + 1):
        reach = t_quantile(1 - 2 * alpha, n - 1) + t_quantile(0.6, n - 1)
        if reach * sd <= margin * math.sqrt(n):
            return n
    return None


def _noncentral_t_tail(critical: float, df: int, shift: float) -> float:
    """Return P(T > critical) for noncentral t: the normal tail, integrated over the density of s / sigma."""
    return sum(
        weight * math.erfc((critical * spread - shift) / math.sqrt(2)) / 2 for spread, weight in _spread_weights(df)
    )


@lru_cache(maxsize=64)
def _spread_weights(df: int) -> list[tuple[float, float]]:
    """Return the midpoint rule's points and weights for the density of s / sigma = sqrt(chi2 / df)."""
    width = (1 + 8 / math.sqrt(df)) / _NODES
    log_scale = math.log(2 * width) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    spreads = [(index + 0.5) * width for index in range(_NODES)]
    return [
        (spread, math.exp(log_scale + (df - 1) * math.log(spread) - df / 2 * spread * spread)) for spread in spreads
    ]
