"""Compute how two independent estimates of one ratio differ, and whether random spread explains the difference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rlk_repro.analysis.checks import compare_training
from rlk_repro.base.units import count, format_number
from rlk_repro.logs.engines import read_engines
from rlk_repro.plan import Plan
from rlk_repro.rundir.agreement import TRAINING, AgreementCheck, CheckKind, CheckWord
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Effect
from rlk_repro.statistics.power import MAX_PAIRS_SUGGESTED
from rlk_repro.statistics.stats import t_quantile

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

    def is_shown_beyond(self, margin: float) -> bool:
        """Tell whether the whole interval lies outside the margin."""
        return abs(self.estimate) - self.half_width > math.log1p(margin)

    def is_beyond(self, margin: float) -> bool:
        """Tell whether the interval excludes 0 and the estimate is farther from 0 than log(1 + ``margin``)."""
        # Recorded ratios are rounded to 12 digits, so 0 has a tolerance.
        return abs(self.estimate) > max(self.half_width + 1e-12, math.log1p(margin))

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

    def describe(self, old_ratio: float) -> str:
        """Say by how many points the change in percent differs: 97.1 % after 96.1 % of a step is one point more."""
        center, low, high = (
            f"{100 * old_ratio * math.expm1(self.estimate + sign * self.half_width):+.2f}" for sign in (0, -1, 1)
        )
        return f"difference {center} points, {100 * CONFIDENCE:g} % interval {low} to {high}"


def find_difference(old: Effect, new: Effect) -> RatioDifference | None:
    """Compare two effects by Welch's t test with Satterthwaite's degrees of freedom; None without an interval."""
    sides = [(effect.sd_log, effect.n) for effect in (old, new) if effect.sd_log is not None and effect.n > 1]
    if old.ratio is None or new.ratio is None or len(sides) < 2:
        return None
    errors = [(sd / math.sqrt(n), n) for sd, n in sides]
    total = math.fsum(error * error for error, _ in errors)
    rest = math.fsum((error * error) * (error * error) / (n - 1) for error, n in errors)
    return RatioDifference(
        estimate=math.log(new.ratio) - math.log(old.ratio),
        error=math.sqrt(total),
        # Without the small addition, a computed 9.999999999 would give 9 degrees of freedom, not 10.
        df=max(1, math.floor(total * total / rest + 1e-9)) if rest else 1,
        n=max(old.n, new.n),
    )
