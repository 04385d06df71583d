"""Compute how two independent estimates of one ratio differ, and whether random spread explains the difference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rlk_repro.analysis.checks import compare_training
from rlk_repro.base.units import count, format_number, format_percent
from rlk_repro.logs.engines import read_engines
from rlk_repro.plan import Plan
from rlk_repro.rundir.agreement import TRAINING, AgreementCheck, CheckKind, CheckWord
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Effect
from rlk_repro.statistics.power import MAX_PAIRS_SUGGESTED
from rlk_repro.statistics.stats import t_quantile, to_ratio

_NAMES = (f"{TRAINING}, first bundle", f"{TRAINING}, second bundle")
_JUDGED = {CheckWord.PASS: "within the contract", CheckWord.FAIL: "outside the contract"}


def compare_engines(plan: Plan, first: RunDir, second: RunDir) -> Iterator[str]:
    """Yield one line for each trial and step that both agreement runs recorded; ``plan`` is the first bundle's.

    The log-probs are compared if both trials have the same tokens and weights at the step.  The outputs of layers are
    not compared, because with tensor parallelism a layer's output may be one rank's shard.
    """
    for trial in plan.trials:
        one, other = (read_engines(run_dir.trial(trial.name)) for run_dir in (first, second))
        if one is None or other is None:
            continue
        for step in (step for step in one.steps if step in other.steps):
            for check in compare_training((trial.pair, trial.variant, step), _NAMES, one, other):
                if check.kind is CheckKind.LOG_PROBS:
                    where = f"{trial.name}, step {step}"
                    yield f"engines: {where}, log-probs of training, first against second bundle: {_describe(check)}"


def _describe(check: AgreementCheck) -> str:
    if check.word is CheckWord.NOT_MEASURED:
        return f"not compared, because {check.found}"
    if not check.num_unequal:
        return f"{count(check.num, 'token')} bitwise equal"
    mean = "" if check.mean is None else f"mean {format_number(check.mean, 3)}, "
    return f"{check.num_unequal:,} of {count(check.num, 'token')} differ, {mean}{check.found}: {_JUDGED[check.word]}"


CONFIDENCE: Final = 0.95


@dataclass(frozen=True, kw_only=True)
class RatioDifference:
    estimate: float
    error: float
    df: int
    n: int

    @property
    def half_width(self) -> float:
        return t_quantile(CONFIDENCE, self.df) * self.error

    @property
    def holds_zero(self) -> bool:
        """Recorded ratios are rounded to 12 digits, so the test has a tolerance."""
        return abs(self.estimate) <= self.half_width + 1e-12

    def is_shown_beyond(self, margin: float) -> bool:
        """Tell whether the whole interval lies outside the margin."""
        return abs(self.estimate) - self.half_width > math.log1p(margin)

    def is_beyond(self, margin: float) -> bool:
        """Tell whether the interval excludes 0 and the estimate is farther from 0 than log(1 + ``margin``)."""
        return not self.holds_zero and abs(self.estimate) > math.log1p(margin)

    def is_within(self, margin: float) -> bool:
        """Tell whether the whole interval lies between -log(1 + ``margin``) and log(1 + ``margin``)."""
        return abs(self.estimate) + self.half_width <= math.log1p(margin)

    def find_needed(self, margin: float) -> int | None:
        """Return how many pairs each result needs for an interval inside the margin; None if over MAX_PAIRS_SUGGESTED.

        The calculation uses the measured difference, or 0 if the measured one is outside the margin.
        """
        limit, seen = math.log1p(margin), abs(self.estimate)
        room = limit - seen if seen < limit else limit
        for n in range(self.n + 1, MAX_PAIRS_SUGGESTED + 1):
            if t_quantile(CONFIDENCE, 2 * (n - 1)) * self.error * math.sqrt(self.n / n) <= room:
                return n
        return None

    def __str__(self) -> str:
        center, low, high = (
            format_percent(to_ratio(self.estimate + sign * self.half_width)).removesuffix(" %") for sign in (0, -1, 1)
        )
        return f"difference {center} %, {100 * CONFIDENCE:g} % interval {low} to {high} %"


def find_difference(old: Effect, new: Effect) -> RatioDifference | None:
    """Compare two effects by Welch's t test with Satterthwaite's degrees of freedom; None without an interval."""
    sides = [(effect.n, error) for effect in (old, new) if (error := _standard_error(effect)) is not None]
    if old.ratio is None or new.ratio is None or len(sides) < 2:
        return None
    variances = [error * error for _, error in sides]
    total = math.fsum(variances)
    rest = math.fsum(variance * variance / (n - 1) for variance, (n, _) in zip(variances, sides, strict=True))
    return RatioDifference(
        estimate=math.log(new.ratio) - math.log(old.ratio),
        error=math.sqrt(total),
        # Without the small addition, a computed 9.999999999 would give 9 degrees of freedom, not 10.
        df=max(1, math.floor(total * total / rest + 1e-9)) if rest else 1,
        n=max(old.n, new.n),
    )


def _standard_error(effect: Effect) -> float | None:
    return None if effect.sd_log is None or effect.n < 2 else effect.sd_log / math.sqrt(effect.n)
