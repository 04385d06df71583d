"""What a number of pairs can show: asked before a run (``submit --dry-run``) and by gates that lack data.

Plain Python, so that a dry run imports nothing heavy.  The tests hold it against scipy's noncentral t.
"""

from __future__ import annotations

import math
from typing import Final

from rlk_repro.stats import t_quantile

MIN_PAIRS: Final = 6
MAX_PAIRS_SUGGESTED: Final = 200
_NODES: Final = 400


def smallest_effect(
    num_pairs: int,
    pair_sd_pct: float,
    smallest_effect_pct: float,
    alpha: float,
    power: float = 0.9,
    num_control_pairs: int = 0,
) -> float | None:
    """The smallest true speed-up, as a fraction (0.04: baseline takes 4 % longer), called ``faster`` with ``power``.

    ``pair_sd_pct`` is the standard deviation of the log ratio of one pair, in percent.  Control pairs set a noise floor
    that replaces the smallest effect of interest where it is larger; it is taken at its expected value.  None below six
    pairs, which never yield ``faster``.
    """
    if num_pairs < MIN_PAIRS:
        return None
    sd = pair_sd_pct / 100
    floor = expected_noise_floor(num_control_pairs, pair_sd_pct, alpha) or 0.0
    threshold = math.log1p(max(smallest_effect_pct / 100, floor))
    critical = t_quantile(1 - alpha, num_pairs - 1)
    shift = _find_shift(critical, num_pairs - 1, power)
    return math.expm1(threshold + shift * sd / math.sqrt(num_pairs))


def power_of(effect: float, *, num_pairs: int, pair_sd_pct: float, smallest_effect_pct: float, alpha: float) -> float:
    """The chance that a true speed-up of ``effect`` (a fraction) is called ``faster``, gates aside."""
    if num_pairs < MIN_PAIRS:
        return 0.0
    distance = math.log1p(effect) - math.log1p(smallest_effect_pct / 100)
    shift = distance * math.sqrt(num_pairs) / (pair_sd_pct / 100)
    return _noncentral_t_tail(t_quantile(1 - alpha, num_pairs - 1), num_pairs - 1, shift)


def expected_noise_floor(num_control_pairs: int, pair_sd_pct: float, alpha: float) -> float | None:
    """The noise floor that so many control pairs are expected to measure, as a fraction; None below two.

    Two control pairs reach about 18 % at a spread of 2 %: few control pairs cost more than they tell.
    """
    n = num_control_pairs
    if n < 2:
        return None
    unbiased = math.sqrt(2 / (n - 1)) * math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2))
    reach = t_quantile(1 - alpha, n - 1) * unbiased + math.sqrt(2 / math.pi)
    return math.expm1(reach * pair_sd_pct / 100 / math.sqrt(n))


def pairs_to_decide(sd: float, margin: float, alpha: float) -> int | None:
    """How many pairs bound a mean within ``margin`` in 4 of 5 experiments where there is no true difference.

    One-sided at ``alpha``, ``sd`` and ``margin`` in the same unit; None beyond 200 pairs.
    """
    for n in range(2, MAX_PAIRS_SUGGESTED + 1):
        reach = t_quantile(1 - 2 * alpha, n - 1) + t_quantile(0.6, n - 1)
        if reach * sd <= margin * math.sqrt(n):
            return n
    return None


def _find_shift(critical: float, df: int, power: float) -> float:
    low, high = 0.0, 10.0 + 3 * critical
    for _ in range(50):
        middle = (low + high) / 2
        if _noncentral_t_tail(critical, df, middle) < power:
            low = middle
        else:
            high = middle
    return high


def _noncentral_t_tail(critical: float, df: int, shift: float) -> float:
    """P(T > critical), T noncentral t: the normal tail integrated over the density of s / sigma (midpoint rule)."""
    end = 1 + 8 / math.sqrt(df)
    log_scale = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    total = 0.0
    for index in range(_NODES):
        spread = (index + 0.5) * end / _NODES
        log_density = log_scale + (df - 1) * math.log(spread) - df / 2 * spread * spread
        total += math.exp(log_density) * math.erfc((critical * spread - shift) / math.sqrt(2)) / 2
    return total * end / _NODES
