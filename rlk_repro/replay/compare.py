"""Compare two results of the same experiment, and the manifests of two bundles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

from rlk_repro.base.answer import Answer
from rlk_repro.base.findings import Finding, Level, diff_values, has_blocking, limit_findings
from rlk_repro.base.units import count, format_number, format_percent
from rlk_repro.plan import Plan
from rlk_repro.prepare.contents import diff_contents, load_parts
from rlk_repro.replay.difference import CONFIDENCE, RatioDifference, compare_engines, find_difference
from rlk_repro.replay.identity import compare_identities, read_identity
from rlk_repro.replay.recorded import CONTRADICTS, open_intact, read_result
from rlk_repro.rundir.agreement import compare_checks
from rlk_repro.rundir.manifest import diff_manifests, load_manifests
from rlk_repro.rundir.microbatch import describe_microbatches
from rlk_repro.rundir.operator_results import OperatorResult
from rlk_repro.rundir.results import Analysis, TrialResult, TrialStatus
from rlk_repro.spec.values import BASELINE
from rlk_repro.statistics.power import MAX_PAIRS_SUGGESTED
from rlk_repro.statistics.stats import STEP_TIME, mean, t_interval

TEXTS_AND_ESTIMATES: Final = frozenset(
    {"purpose", "may_claim", "may_not_claim", "expected_trial_minutes", "expected_session_minutes"}
)
BY_HARDWARE: Final = frozenset({"layouts", "placements", "ops_on"})
# If all these metrics, which a seed decides, are equal to the last printed digit, the replay's level is bitwise.
SEEDED_METRICS: Final = ("loss", "raw_reward", "grad_norm", "kl_loss", "train_rollout_logprob_abs_diff")
COMPARED_EFFECTS: Final = ("step_time_s", "actor_train_time_s", "rollout_time_s", "peak_memory_bytes")
COMPARED_LEVELS: Final = ("raw_reward", "response_length_mean", "train_rollout_logprob_abs_diff")
OPERATOR_TOLERANCE: Final = 0.1
MOST_MARGIN: Final = 0.1
"""A run may declare any margin for its replays; no wider one than this counts."""
MAX_DETAILS: Final = 5
GPU: Final = "GPU"


class Match(StrEnum):
    """The level of agreement between a replay and the recorded result (docs/replay.md)."""

    BITWISE = "bitwise"
    REPRODUCED = "reproduced"
    IMPRECISE = "consistent but imprecise"
    DIFFERENT = "different"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


MEANINGS: Final = {
    Match.UNDECIDED: "hashes are missing, so nothing proves that the same code ran",
    Match.NOT_COMPARABLE: "the two results cannot be compared",
}


@dataclass(frozen=True, kw_only=True)
class Comparison(Answer):
    """A comparison of two results; ``margin_pct`` is the largest difference that counts as reproduced, in percent.

    ``obstacles`` are reasons why the results cannot be compared.  ``unidentified`` lists code that one of the bundles
    does not name, which makes the level undecided.  ``cautions`` do not change the level.
    """

    level: Match
    is_ok: bool
    headline: str
    margin_pct: float
    recorded_verdict: str
    new_verdict: str
    obstacles: tuple[str, ...]
    details: tuple[str, ...]
    num_blocking_drift: int
    unidentified: tuple[str, ...]
    cautions: tuple[str, ...]

    def lines(self) -> list[str]:
        lines = [f"replay level: {self.headline}"]
        lines += [f"  {text}" for text in (*self.obstacles, *self.unidentified)]
        lines += [f"  caution: {text}" for text in self.cautions]
        if self.num_blocking_drift:
            lines.append(f"  blocking differences of plan, files or machine: {self.num_blocking_drift}")
        lines += [f"  recorded verdict: {self.recorded_verdict}", f"  new verdict:      {self.new_verdict}"]
        return lines + [f"  {detail}" for detail in self.details]


_Match: TypeAlias = tuple[bool, str]
"""Whether two results agree on something, and a text that says how far."""


def compare_analyses(
    recorded: Analysis,
    new: Analysis,
    drift: Sequence[Finding] = (),
    code: Sequence[Finding] = (),
    margin: float | None = None,
) -> Comparison:
    """Compare two results: equal seeded metrics mean level ``bitwise``; otherwise speed and training metrics decide.

    Losses do not prove times, which could be invented, so results with equal losses differ if their times do.
    Operators and largest microbatches are never compared bitwise: their results are times and sizes. ``margin`` is the
    run's margin for replays, as a fraction; default: the smallest effect of interest.
    """
    margin = recorded.verdict.smallest_effect if margin is None else margin
    margin = OPERATOR_TOLERANCE if recorded.operators else margin
    unidentified, cautions = tuple(_describe_code(code, Level.WARNING)), []
    if margin > MOST_MARGIN:
        cautions.append(f"the run declares a margin of {_percent(margin)} for replays; {_percent(MOST_MARGIN)} counts")
        margin = MOST_MARGIN
    differing = list(_seeded_differences(recorded.trials, new.trials))
    matches = [*_match_operators(recorded, new), *_match_levels(recorded, new)]
    has_seeded = any(_values(trial, metric) for trial in recorded.trials for metric in SEEDED_METRICS)
    is_bitwise = has_seeded and not (differing or recorded.operators or recorded.microbatches)
    obstacles = [*_find_obstacles(recorded, new), *_describe_code(code, Level.BLOCKING)]
    obstacles += [] if is_bitwise else find_other_hardware(recorded, new)
    judged = _describe_bitwise(recorded, new, margin) if is_bitwise else _judge(recorded, new, matches, margin)
    if judged is None:
        obstacles.append("the results are not identical, and a step time ratio has no confidence interval")
    level, meaning = judged or (Match.NOT_COMPARABLE, "")
    if obstacles or unidentified:
        level = Match.NOT_COMPARABLE if obstacles else Match.UNDECIDED
    enabled = f"; with {recorded.switch}" if recorded.switch else ""
    within = f" within {_percent(margin)}" if level is Match.REPRODUCED else ""
    careful = f", with {count(len(cautions), 'caution')}" if cautions else ""
    return Comparison(
        level=level,
        is_ok=level in {Match.BITWISE, Match.REPRODUCED},
        headline=f"{level}{within}{careful} ({MEANINGS.get(level, meaning)}){enabled}",
        margin_pct=100 * margin,
        recorded_verdict=recorded.verdict.word.value,
        new_verdict=new.verdict.word.value,
        obstacles=tuple(obstacles),
        details=(
            *_describe_speed(recorded, new),
            *_describe_effects(recorded, new),
            *(text for _, text in matches),
            *differing[:MAX_DETAILS],
            *compare_checks(recorded.checks, new.checks),
        ),
        num_blocking_drift=sum(item.level is Level.BLOCKING for item in drift),
        unidentified=unidentified,
        cautions=tuple(cautions),
    )


def _describe_bitwise(recorded: Analysis, new: Analysis, margin: float) -> tuple[Match, str]:
    """Name two levels: one of the numbers, and one of the times, which losses do not prove."""
    text, speed = "losses and rewards are identical, step by step", compare_speed(recorded, new)
    if speed is None or any(find_other_hardware(recorded, new)):
        return Match.BITWISE, f"{text}; times are not compared"
    if speed[0].is_shown_beyond(margin):
        return Match.DIFFERENT, f"{text}, but times differ by more than {_percent(margin)}: {_describe_ratios(*speed)}"
    return Match.BITWISE, f"{text}; {_describe_ratios(*speed)}"


def _judge(recorded: Analysis, new: Analysis, matches: Sequence[_Match], margin: float) -> tuple[Match, str] | None:
    apart = next((text for is_compatible, text in matches if not is_compatible), None)
    if recorded.operators:
        return (Match.REPRODUCED if apart is None else Match.DIFFERENT), matches[0][1]
    if recorded.microbatches:
        return _compare_microbatches(recorded, new)
    speed = compare_speed(recorded, new)
    if speed is None:
        return None
    difference, text = speed[0], _describe_ratios(*speed)
    if apart is not None:
        return Match.DIFFERENT, f"{apart}; {text}"
    if difference.is_within(margin):
        return Match.REPRODUCED, text
    if difference.is_beyond(margin):
        return Match.DIFFERENT, text
    needed = difference.find_needed(margin)
    number = f"more than {MAX_PAIRS_SUGGESTED}" if needed is None else f"about {needed}"
    enough = f"{number} {recorded.unit}s in each result would show whether the difference is within {_percent(margin)}"
    return Match.IMPRECISE, f"{text}; {enough}"


def _compare_microbatches(recorded: Analysis, new: Analysis) -> tuple[Match, str]:
    was, now = describe_microbatches(recorded.microbatches), describe_microbatches(new.microbatches)
    if was == now:
        return Match.REPRODUCED, f"in both results: {was}"
    return Match.DIFFERENT, f"recorded: {was}; now: {now}"


def compare_speed(first: Analysis, second: Analysis) -> tuple[RatioDifference, float, float] | None:
    """Return the difference of two results' step time ratios, and both ratios; None without an interval."""
    old, now = first.effect(STEP_TIME), second.effect(STEP_TIME)
    difference = None if old is None or now is None else find_difference(old, now)
    if old is None or now is None or difference is None:
        return None
    return difference, old.ratio or 0.0, now.ratio or 0.0


def _describe_ratios(difference: RatioDifference, was: float, now: float) -> str:
    """Name the ratio, which a margin is for, and the difference of the changes in points."""
    return f"step time ratio {format_number(was)} recorded, {format_number(now)} now; {difference.describe(was)}"


def _percent(fraction: float) -> str:
    return f"{format_number(100 * fraction)} %"


def _describe_code(findings: Sequence[Finding], level: Level) -> Iterator[str]:
    form = "recorded {}, now {}" if level is Level.BLOCKING else "{} in the old bundle, {} in the new bundle"
    for item in findings:
        if item.level is level:
            yield f"{item.where}: {form.format(item.expected, item.found)}"


def find_other_hardware(recorded: Analysis, new: Analysis) -> Iterator[str]:
    """Yield the differences in hardware: times of two kinds of hardware are not comparable."""
    sides = [{"hardware": analysis.hardware, **analysis.facts} for analysis in (recorded, new)]
    for name in ("hardware", GPU):
        was, now = (side.get(name) for side in sides)
        if was is not None and now is not None and was != now:
            yield f"{name}: recorded {was}, now {now}"


def _describe_speed(recorded: Analysis, new: Analysis) -> Iterator[str]:
    old, now = (_baseline_step_time_s(analysis) for analysis in (recorded, new))
    if old and now:
        yield f"baseline step time: recorded {format_number(old)} s, now {format_number(now)} s (mean of trial medians)"


def _baseline_step_time_s(analysis: Analysis) -> float | None:
    found = (trial.summary(STEP_TIME) for trial in analysis.trials if trial.variant == BASELINE)
    medians = [summary.median for summary in found if summary is not None]
    return mean(medians) if medians else None


def _find_obstacles(recorded: Analysis, new: Analysis) -> Iterator[str]:
    if recorded.experiment_hash != new.experiment_hash:
        yield "the experiments differ"
    by_name = {trial.name: trial for trial in new.trials}
    for old in recorded.trials:
        trial = by_name.get(old.name)
        if trial is None:
            yield f"{old.name}: the new result lacks this trial"
        elif old.status is not trial.status or not (old.status is TrialStatus.OK or recorded.microbatches):
            yield f"{old.name}: recorded {old.status}, now {trial.status}"
        elif old.proof is not trial.proof:
            yield f"{old.name}: proof of {recorded.serving}: recorded {old.proof}, now {trial.proof}"


def _seeded_differences(recorded: Sequence[TrialResult], new: Sequence[TrialResult]) -> Iterator[str]:
    by_name = {trial.name: trial for trial in new}
    for old in recorded:
        trial = by_name.get(old.name)
        for metric in SEEDED_METRICS if trial is not None else ():
            was, now = _values(old, metric), _values(trial, metric)
            step = next((index for index, pair in enumerate(zip(was, now, strict=False)) if pair[0] != pair[1]), None)
            if step is not None:
                yield f"{old.name}: {metric} first differs at step {step}: recorded {was[step]}, now {now[step]}"
            elif len(was) != len(now):
                yield f"{old.name}: {metric}: recorded {len(was)} steps, now {len(now)} steps"


def _values(trial: TrialResult | None, metric: str) -> tuple[float | None, ...]:
    series = None if trial is None else trial.get_series(metric)
    return () if series is None else series.values


def _describe_effects(recorded: Analysis, new: Analysis) -> Iterator[str]:
    for name in COMPARED_EFFECTS:
        old, now = recorded.effect(name), new.effect(name)
        was, is_now = (None if effect is None else effect.ratio for effect in (old, now))
        if old is not None and now is not None and was is not None and is_now is not None:
            text = f"{name}: recorded {format_percent(was)} (n={old.n}), now {format_percent(is_now)} (n={now.n})"
            difference = find_difference(old, now)
            yield f"{text}; {'no interval' if difference is None else difference.describe(was)}"
        elif was is not is_now:
            yield f"{name}: only one of the two results has a ratio (enabled / baseline)"


def _match_levels(recorded: Analysis, new: Analysis) -> Iterator[_Match]:
    """Two results agree on a metric if the t interval of its changes between them contains 0."""
    by_name = {trial.name: trial for trial in new.trials}
    for name in COMPARED_LEVELS:
        # The variants of a session train one policy, so a session counts once.
        changes: dict[str, list[float]] = {}
        for old in recorded.trials:
            trial = by_name.get(old.name)
            was, now = old.summary(name), trial.summary(name) if trial else None
            if was is not None and now is not None:
                changes.setdefault(old.folder, []).append(now.mean - was.mean)
        interval = t_interval([mean(values) for values in changes.values()], CONFIDENCE)
        if interval is not None:
            change, low, high = map(format_number, (interval.estimate, interval.low, interval.high))
            what = "sessions" if recorded.is_crossover else "trials"
            text = f"{name}: mean change {change} ({low} to {high}, n = {interval.n} pairs of equally seeded {what})"
            yield interval.low <= 0 <= interval.high, text


def _match_operators(recorded: Analysis, new: Analysis) -> Iterator[_Match]:
    """Two speedups may differ by ``OPERATOR_TOLERANCE`` plus the spreads between processes in both results."""
    if not recorded.operators:
        return
    by_cell = {(cell.case, cell.implementation): cell for cell in new.operators}
    differing = []
    for old in recorded.operators:
        now = by_cell.get((old.case, old.implementation))
        if now is None or old.status is not now.status:
            differing.append(f"{_name_cell(old)}: recorded {old.status}, now {'absent' if now is None else now.status}")
        elif not _is_same_speed(old, now):
            was, is_now = (format_number(_mean_speedup(cell) or 0.0, 3) for cell in (old, now))
            differing.append(f"{_name_cell(old)}: recorded {was} times vime's speed, now {is_now}")
    num_agreeing = len(recorded.operators) - len(differing)
    yield not differing, f"operators: {num_agreeing} of {len(recorded.operators)} agree"
    yield from ((False, text) for text in differing[:MAX_DETAILS])


def _name_cell(cell: OperatorResult) -> str:
    case = cell.case
    shape = "x".join(str(size) for size in (case.num_tokens, case.hidden_size, case.vocab_size) if size is not None)
    return f"{case.operator} {case.work} {shape} {case.dtype} density {case.density:g} {cell.implementation}"


def _is_same_speed(old: OperatorResult, new: OperatorResult) -> bool:
    was, now = _mean_speedup(old), _mean_speedup(new)
    if was is None or now is None:
        return was is now
    allowed = math.log1p(OPERATOR_TOLERANCE) + sum(math.log1p(cell.process_spread or 0.0) for cell in (old, new))
    return abs(math.log(now / was)) <= allowed


def _mean_speedup(cell: OperatorResult) -> float | None:
    speedups = [trial.speedup for trial in cell.trials if trial.speedup]
    return mean(speedups) if speedups else None


@dataclass(frozen=True, kw_only=True)
class Differences(Answer):
    """The result of ``diff``; ``comparison`` is None if a bundle has no analysis."""

    findings: tuple[Finding, ...]
    unsealed: tuple[str, ...]
    comparison: Comparison | None


def diff_bundles(first: Path, second: Path) -> Differences:
    """Compare plans, prepared files, manifests node by node, and results where both bundles have an analysis.

    Raises:
        CheckFailed: one of the bundles was sealed and has been changed.
    """
    sources = (first, second)
    with open_intact(first) as (left, left_id), open_intact(second) as (right, right_id):
        ids = (left_id, right_id)
        unsealed = tuple(str(source) for source, bundle_id in zip(sources, ids, strict=True) if bundle_id is None)
        plans = [Plan.load(run_dir.plan) for run_dir in (left, right)]
        findings = _diff_plans(*plans)
        findings += diff_contents(load_parts(left.prepared), load_parts(right.prepared))
        old, new = load_manifests(left), load_manifests(right)
        has_analyses = left.analysis.is_file() and right.analysis.is_file()
        results = list(map(read_result, (left, right), sources, ids)) if has_analyses else []
        code = compare_identities(*map(read_identity, (left, right), plans))
        engines = tuple(compare_engines(plans[0], left, right))
    if len(old) != len(new):
        findings.append(Finding(Level.BLOCKING, "nodes", str(len(old)), str(len(new))))
    for was, now in zip(old, new, strict=False):
        findings += diff_manifests(was, now)
    comparison = None
    for source, (_, context) in zip(sources, results, strict=False):
        if has_blocking(context.findings):
            findings.append(Finding(Level.BLOCKING, str(source), "records that agree", CONTRADICTS))
    if results:
        (recorded, _), (later, _) = results
        comparison = compare_analyses(recorded, later, findings, code, plans[0].run.measure.replay_margin)
        comparison = replace(comparison, details=(*comparison.details, *engines))
    findings += code
    return Differences(findings=tuple(limit_findings(findings)), unsealed=unsealed, comparison=comparison)


def changes_nothing(item: Finding, *plans: Plan) -> bool:
    """Tell whether a value of a plan is a text or an estimate, or belongs to hardware that neither plan uses."""
    path = item.where.split(".")
    if not TEXTS_AND_ESTIMATES.isdisjoint(path):
        return True
    of_hardware = next((name for part, name in pairwise(path) if part in BY_HARDWARE), None)
    return of_hardware is not None and of_hardware not in {plan.hardware.hardware for plan in plans}


def _diff_plans(old: Plan, new: Plan) -> list[Finding]:
    findings = []
    if old.experiment_hash != new.experiment_hash:
        found = diff_values("plan", old.experiment, new.experiment, Level.BLOCKING)
        findings += [replace(item, level=Level.INFO) if changes_nothing(item, old, new) else item for item in found]
    if old.profile != new.profile:
        findings += list(diff_values("profile", old.profile.model_dump(mode="json"),
                                      new.profile.model_dump(mode="json"), Level.WARNING))  # fmt: skip
    return findings
