"""Compute trial summaries, paired intervals, sign-flip p values, Holm's correction and the noise floor.

Versions of scipy differ in the tenth digit, so sealed numbers come from exact sums and closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final

from rlk_repro.base.units import format_number
from rlk_repro.rundir.results import Effect, NoiseFloor, PairMetric, Summary, TrialResult

RAW_REWARD: Final = "raw_reward"
ABS_DIFF: Final = "train_rollout_logprob_abs_diff"
PEAK_MEMORY: Final = "peak_memory_bytes"
RESPONSE_LENGTH: Final = "response_length_mean"
GATED: Final = frozenset({RAW_REWARD, ABS_DIFF, PEAK_MEMORY, RESPONSE_LENGTH})
"""Metrics on which a verdict depends: a trial must record them in every step, or records could be left out."""
STEP_TIME: Final = "step_time_s"
MEAN_STEP_TIME: Final = "mean_step_time_s"
NO_GRAD: Final = "module_log_probs_no_grad_s"
LOSS: Final = ("module_grpo_loss_forward_s", "module_grpo_loss_backward_s")
"""With ``NO_GRAD``, the times of all functions that RL-Kernel replaces: the loss contains its log-probs."""
ENERGY: Final = "energy_j"
GRADIENT: Final = "grad_norm"
UNADJUSTED: Final = "unadjusted_step_time_s"
CARRY_OVER: Final = "carry_over_step_time_s"
DIAGNOSTICS: Final = (UNADJUSTED, CARRY_OVER)
PERCENTILE_MIN_N: Final = {50: 1, 90: 20, 99: 200}
MAX_SIGN_FLIP_PAIRS: Final = 16
OUTLIER_MIN_N: Final = 4
SMALLEST_P: Final = 1e-9
LARGEST_VALUE: Final = 1e150
LARGEST_LOG_RATIO: Final = 700.0


@dataclass(frozen=True, kw_only=True)
class Interval:
    estimate: float
    low: float
    high: float
    stdev: float
    n: int


def mean(values: Sequence[float]) -> float:
    """Return the exactly summed mean; the mean of equal values is exactly that value."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def stdev(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n - 1) of two or more values; for equal values it is exactly 0."""
    center = mean(values)
    deviations = [value - center for value in values]
    return math.sqrt(math.fsum(item * item for item in deviations) / (len(values) - 1))


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the percentile of type 7 (Hyndman and Fan), or None: p90 needs 20 values, p99 needs 200."""
    if len(values) < PERCENTILE_MIN_N[percent]:
        return None
    return _quantile(sorted(values), percent / 100)


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    position = (len(ordered) - 1) * fraction
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def summarise(metric: str, values: Iterable[float | None]) -> Summary | None:
    """Summarise the scored steps of one trial; the result is None if no step has a value.

    ``n`` counts only recorded values that are finite and small enough to be squared.  Values more than 1.5
    interquartile ranges outside the quartiles (Tukey's fences) are counted as outliers and stay in all numbers.
    """
    found = sorted(value for value in values if value is not None and abs(value) < LARGEST_VALUE)
    if not found:
        return None
    median = _quantile(found, 0.5)
    return Summary(
        metric=metric,
        n=len(found),
        mean=mean(found),
        median=median,
        stdev=stdev(found) if len(found) > 1 else None,
        minimum=found[0],
        maximum=found[-1],
        p50=median,
        p90=percentile(found, 90),
        p99=percentile(found, 99),
        num_outliers=_count_outliers(found),
    )


def _count_outliers(ordered: Sequence[float]) -> int:
    if len(ordered) < OUTLIER_MIN_N:
        return 0
    first, third = _quantile(ordered, 0.25), _quantile(ordered, 0.75)
    reach = 1.5 * (third - first)
    return sum(not first - reach <= value <= third + reach for value in ordered)


def is_cost(metric: str) -> bool:
    """Whether a metric is a time, rate, memory or energy, as its name's ending shows; these are compared as ratios."""
    return metric.endswith(("_s", "_bytes", "_j"))


def pair_metrics(first: TrialResult, second: TrialResult) -> tuple[PairMetric, ...]:
    """Return every metric of one pair, by name; the mean of the step time is a metric of its own.

    The value of a trial is the median for times and rates, the maximum for memory, and the mean for other metrics.  A
    metric has no values if one trial recorded it in more steps than the other, because the values are not comparable;
    metrics on which a verdict depends also have none if a trial lacks one in a step that has a time.
    """
    names = {summary.metric for trial in (first, second) for summary in trial.summaries}
    if STEP_TIME in names:
        names.add(MEAN_STEP_TIME)
    return tuple(_pair_metric(name, first, second) for name in sorted(names))


def _pair_metric(name: str, first: TrialResult, second: TrialResult) -> PairMetric:
    source = STEP_TIME if name == MEAN_STEP_TIME else name
    left, right = first.summary(source), second.summary(source)
    if left and right and (left.n != right.n or _lacks_steps(left, first) or _lacks_steps(right, second)):
        return PairMetric(metric=name, first=None, second=None, log_ratio=None)
    before = None if left is None else _representative(name, left)
    after = None if right is None else _representative(name, right)
    log_ratio = None
    if before is not None and after is not None and before > 0 and 0 < after / before < math.inf:
        log_ratio = math.log(after / before)
    return PairMetric(metric=name, first=before, second=after, log_ratio=log_ratio)


def _lacks_steps(summary: Summary, trial: TrialResult) -> bool:
    step_times = trial.summary(STEP_TIME)
    return summary.metric in GATED and step_times is not None and summary.n < step_times.n


def _representative(name: str, summary: Summary) -> float:
    if name.endswith("_bytes"):
        return summary.maximum
    return summary.median if is_cost(name) and name != MEAN_STEP_TIME else summary.mean


def _central_probability(angle: float, df: int) -> float:
    """Return P(abs(T) <= sqrt(df) tan(angle)) for Student's t (Abramowitz and Stegun 26.7.3; even df: 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    if df == 1:
        return 2 * angle / math.pi
    terms = [sine * cosine if df % 2 else sine]
    for k in range(2 if df % 2 else 1, df - 1, 2):
        terms.append(terms[-1] * cosine * cosine * k / (k + 1))
    total = math.fsum(terms)
    return 2 / math.pi * (angle + total) if df % 2 else total


@lru_cache(maxsize=1024)
def t_quantile(confidence: float, df: int) -> float:
    """Return the t beyond which both tails together have the probability ``1 - confidence``, to about 13 digits."""
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _central_probability(middle, df) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan(high)


def t_interval(values: Sequence[float], confidence: float) -> Interval | None:
    """Return the mean and its two-sided t interval; fewer than two values give None.

    Each end is a one-sided bound at ``(1 + confidence) / 2``.
    """
    n = len(values)
    if n < 2:
        return None
    center, spread = mean(values), stdev(values)
    half = t_quantile(confidence, n - 1) * spread / math.sqrt(n)
    return Interval(estimate=center, low=center - half, high=center + half, stdev=spread, n=n)


def prediction_interval(values: Sequence[float], confidence: float) -> Interval | None:
    """Return the mean and the two-sided t interval for one more value; fewer than two values give None.

    The half width is t · s · √(1 + 1 / n) with n - 1 degrees of freedom, for values of one normal distribution.
    """
    found = t_interval(values, confidence)
    if found is None:
        return None
    half = t_quantile(confidence, found.n - 1) * found.stdev * math.sqrt(1 + 1 / found.n)
    return replace(found, low=found.estimate - half, high=found.estimate + half)


def t_p_value(values: Sequence[float]) -> float | None:
    """Return the two-sided p of the one-sample t test of mean 0, to 9 decimals.

    Fewer than two values, or equal values, give None.
    """
    interval = t_interval(values, 0.95)
    if interval is None or interval.stdev == 0:
        return None
    return two_sided_p(abs(interval.estimate) / interval.stdev * math.sqrt(interval.n), interval.n - 1)


def two_sided_p(t: float, df: int) -> float:
    """Return the probability that Student's t is at least as far from 0 as ``t``, to 9 decimals."""
    return max(SMALLEST_P, round(1 - _central_probability(math.atan(t / math.sqrt(df)), df), 9))


def sign_flip_p(values: Sequence[float]) -> float | None:
    """Return the exact two-sided p: the share of sign patterns whose sum is at least as far from 0 as the actual sum.

    No values, or more than 16, give None.
    """
    if not 0 < len(values) <= MAX_SIGN_FLIP_PAIRS:
        return None
    sums = [values[0]]
    for value in values[1:]:
        sums = [total + value for total in sums] + [total - value for total in sums]
    # Sums that differ only by rounding count as equal, so every machine gives the same p.
    seen = abs(math.fsum(values)) - 1e-9 * math.fsum(abs(value) for value in values)
    return sum(abs(total) >= seen for total in sums) / len(sums)


def sign_flip_floor(n: int) -> float | None:
    return 2.0 ** (1 - n) if 0 < n <= MAX_SIGN_FLIP_PAIRS else None


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p values after Holm's step-down correction, in the given order; a missing p stays missing."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        corrected[index] = highest
    return corrected


def to_ratio(log_ratio: float) -> float:
    """Return exp(log_ratio), limited to a finite number above 0: an interval from only two pairs may be very wide."""
    return math.exp(max(-LARGEST_LOG_RATIO, min(log_ratio, LARGEST_LOG_RATIO)))


def paired_effect(metric: str, log_ratios: Sequence[float], *, role: str, alpha: float, note: str = "") -> Effect:
    """Return the geometric mean ratio over pairs, its t interval and the uncorrected p of the sign-flip and t tests."""
    n = len(log_ratios)
    interval = t_interval(log_ratios, 1 - alpha)
    return Effect(
        metric=metric,
        role=role,
        n=n,
        ratio=to_ratio(mean(log_ratios)) if n else None,
        low=to_ratio(interval.low) if interval else None,
        high=to_ratio(interval.high) if interval else None,
        confidence=1 - alpha,
        sd_log=interval.stdev if interval else None,
        p_value=sign_flip_p(log_ratios),
        p_floor=sign_flip_floor(n),
        p_t=t_p_value(log_ratios),
        p_holm=None,
        note=note,
    )


class Place(StrEnum):
    BELOW = "below"
    ABOVE = "above"
    WITHIN = "within"
    ACROSS = "across"


def place_interval(effect: Effect, *, beyond: float, within: float) -> Place:
    """Return where the interval lies: wholly outside 1 ± ``beyond``, wholly inside 1 ± ``within``, or neither."""
    if effect.low is None or effect.high is None:
        return Place.ACROSS
    if effect.high < 1 / (1 + beyond):
        return Place.BELOW
    if effect.low > 1 + beyond:
        return Place.ABOVE
    return Place.WITHIN if 1 / (1 + within) <= effect.low and effect.high <= 1 + within else Place.ACROSS


def noise_floor(log_ratios: Sequence[float], *, alpha: float, unit: str = "pair") -> NoiseFloor:
    """Return the noise of control pairs as a fraction: the larger absolute value of the ends of their t interval."""
    n = len(log_ratios)
    interval = t_interval(log_ratios, 1 - alpha)
    if interval is None:
        what = f"no control {unit}s" if n == 0 else f"1 control {unit} gives no interval"
        return NoiseFloor(is_measured=False, fraction=None, n=n, note=f"{what}: the noise floor was not measured")
    reach = max(abs(interval.low), abs(interval.high))
    note = f"farther end of the {format_number(100 * (1 - alpha))} % interval of {n} control {unit}s"
    return NoiseFloor(is_measured=True, fraction=math.expm1(min(reach, LARGEST_LOG_RATIO)), n=n, note=note)
