"""Compares two results of the same experiment, and the manifests of two bundles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.findings import Finding, Level, diff_values, limit_findings
from rlk_repro.base.units import format_number, format_percent
from rlk_repro.bundle.seal import open_bundle
from rlk_repro.plan import BASELINE, Plan
from rlk_repro.prepare.contents import diff_contents, load_parts
from rlk_repro.replay.identity import compare_identities, read_identity
from rlk_repro.rundir.manifest import diff_manifests, load_manifests
from rlk_repro.rundir.operator_results import OperatorResult
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, Effect, TrialResult, TrialStatus
from rlk_repro.statistics.stats import STEP_TIME, mean, t_interval

# What a seed decides.  Where all of these are equal to the last printed digit, the replay was bitwise.
SEEDED_METRICS: Final = ("loss", "raw_reward", "grad_norm", "kl_loss", "train_rollout_logprob_abs_diff")
COMPARED_EFFECTS: Final = ("step_time_s", "actor_train_time_s", "rollout_time_s", "peak_memory_bytes")
# What training itself yields; times are the machine's and are compared as effects only.
COMPARED_LEVELS: Final = ("raw_reward", "response_length_mean", "train_rollout_logprob_abs_diff")
CONFIDENCE: Final = 0.95
OPERATOR_TOLERANCE: Final = 0.1
MAX_DETAILS: Final = 5


class Match(StrEnum):
    """The strongest level at which a replay agrees with what was recorded."""

    BITWISE = "bitwise"
    STATISTICAL = "statistical"
    DIFFERENT = "different"
    NOT_COMPARABLE = "not comparable"


MEANINGS: Final = {
    Match.BITWISE: "losses and rewards are identical, step by step",
    Match.STATISTICAL: "not identical, but nothing differs beyond its uncertainty",
    Match.DIFFERENT: "something differs beyond its uncertainty",
    Match.NOT_COMPARABLE: "the two results cannot be held against each other",
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``obstacles`` say why two results cannot be compared at all; ``unidentified`` is the code that made them and
    that one of them does not name.  With any of it equal bits are no bitwise replay.
    """

    level: Match
    recorded_verdict: str
    new_verdict: str
    obstacles: tuple[str, ...]
    details: tuple[str, ...]
    num_blocking_drift: int
    unidentified: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """Of the level, here."""
        if self.unidentified and self.level is Match.STATISTICAL:
            return "nothing differs beyond its uncertainty, but nobody knows whether the same code ran"
        return MEANINGS[self.level]

    @property
    def is_ok(self) -> bool:
        return self.level in {Match.BITWISE, Match.STATISTICAL}

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.level.value,
            "is_ok": self.is_ok,
            "recorded_verdict": self.recorded_verdict,
            "new_verdict": self.new_verdict,
            "obstacles": list(self.obstacles),
            "details": list(self.details),
            "num_blocking_drift": self.num_blocking_drift,
            "unidentified": list(self.unidentified),
        }

    def lines(self) -> list[str]:
        """For people: the level first, then what it rests on."""
        lines = [f"replay level: {self.level} ({self.meaning})"]
        lines += [f"  {text}" for text in (*self.obstacles, *self.unidentified)]
        if self.num_blocking_drift:
            lines.append(f"  blocking differences between the machines: {self.num_blocking_drift}")
        lines += [f"  recorded verdict: {self.recorded_verdict}", f"  new verdict:      {self.new_verdict}"]
        return lines + [f"  {detail}" for detail in self.details]


@dataclass(frozen=True, kw_only=True)
class _Comparand:
    """One quantity held against itself; ``is_compatible`` is None where there is no interval to judge by."""

    is_compatible: bool | None
    text: str


def compare_analyses(
    recorded: Analysis, new: Analysis, drift: Sequence[Finding] = (), code: Sequence[Finding] = ()
) -> Comparison:
    """Bitwise where every seeded metric of every trial is equal, else by effects and levels and their intervals.

    Operators are compared cell by cell, and never bitwise: what is recorded of them are times.  ``code`` says how the
    code that ran differs: other code makes two results not comparable, unknown code none of them bitwise.

    Trials that did not end well, or whose proof differs, on either side make the results not comparable: agreement of
    what is missing is no agreement.
    """
    obstacles = [*_find_obstacles(recorded, new), *_describe_code(code, Level.BLOCKING)]
    unidentified = tuple(_describe_code(code, Level.WARNING))
    differing = list(_seeded_differences(recorded.trials, new.trials))
    found = [_match_effects(name, recorded, new) for name in COMPARED_EFFECTS]
    found += [_match_levels(name, recorded, new) for name in COMPARED_LEVELS]
    matches = [*(match for match in found if match is not None), *_match_operators(recorded, new)]
    judged = [match.is_compatible for match in matches if match.is_compatible is not None]
    if not obstacles and differing and not judged:
        obstacles.append("not identical, and nothing has an interval on both sides")
    if obstacles:
        level = Match.NOT_COMPARABLE
    elif not differing and not recorded.operators and not unidentified:
        level = Match.BITWISE
    else:
        level = Match.STATISTICAL if all(judged) else Match.DIFFERENT
    return Comparison(
        level=level,
        recorded_verdict=recorded.verdict.word.value,
        new_verdict=new.verdict.word.value,
        obstacles=tuple(obstacles),
        details=(*_describe_speed(recorded, new), *(match.text for match in matches), *differing[:MAX_DETAILS]),
        num_blocking_drift=sum(item.level is Level.BLOCKING for item in drift),
        unidentified=unidentified,
    )


def _describe_code(findings: Sequence[Finding], level: Level) -> Iterator[str]:
    for item in findings:
        if item.level is level:
            yield f"{item.where}: recorded {item.expected}, now {item.found}"


def _describe_speed(recorded: Analysis, new: Analysis) -> Iterator[str]:
    """The machines' own speed and noise: told, never judged, since an effect is what a replay has to reproduce."""
    old, now = (_baseline_step_time_s(analysis) for analysis in (recorded, new))
    if old and now:
        yield f"baseline step time: recorded {format_number(old)} s, now {format_number(now)} s (mean of trial medians)"
    floors = [analysis.noise_floor.fraction for analysis in (recorded, new)]
    if None not in floors:
        was, is_now = (f"{format_number(100 * floor, 3)} %" for floor in floors if floor is not None)
        yield f"noise floor: recorded {was}, now {is_now}"


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
            yield f"{old.name}: not in the new result"
        elif (old.status, trial.status) != (TrialStatus.OK, TrialStatus.OK):
            yield f"{old.name}: recorded {old.status}, now {trial.status}"
        elif old.proof is not trial.proof:
            yield f"{old.name}: RL-Kernel recorded {old.proof}, now {trial.proof}"


def _seeded_differences(recorded: Sequence[TrialResult], new: Sequence[TrialResult]) -> Iterator[str]:
    by_name = {trial.name: trial for trial in new}
    for old in recorded:
        trial = by_name.get(old.name)
        for metric in SEEDED_METRICS if trial is not None else ():
            was, now = _values(old, metric), _values(trial, metric)
            step = next((index for index, pair in enumerate(zip(was, now, strict=False)) if pair[0] != pair[1]), None)
            if step is not None:
                yield f"{old.name}: {metric} first differs at step {step}: was {was[step]}, now {now[step]}"
            elif len(was) != len(now):
                yield f"{old.name}: {metric} has {len(now)} steps, recorded {len(was)}"


def _values(trial: TrialResult | None, metric: str) -> tuple[float | None, ...]:
    series = None if trial is None else trial.get_series(metric)
    return () if series is None else series.values


def _match_effects(name: str, recorded: Analysis, new: Analysis) -> _Comparand | None:
    """Compatible where the distance of the log ratios is within both half widths taken together (root sum of squares).

    That is the interval of a difference of two independent estimates.  None where neither side has the effect.
    """
    old, now = recorded.effect(name), new.effect(name)
    was_ratio, now_ratio = (None if effect is None else effect.ratio for effect in (old, now))
    if was_ratio is None or now_ratio is None:
        return None if was_ratio is now_ratio else _Comparand(is_compatible=None, text=f"{name}: on one side only")
    assert old is not None
    assert now is not None
    text = f"{name}: recorded {format_percent(was_ratio)} (n={old.n}), now {format_percent(now_ratio)} (n={now.n})"
    half_widths = [_half_width(effect) for effect in (old, now)]
    if None in half_widths:
        return _Comparand(is_compatible=None, text=f"{text}, no interval")
    distance = abs(math.log(now_ratio) - math.log(was_ratio))
    allowed = math.hypot(*(width for width in half_widths if width is not None))
    text += f"; apart {format_number(distance * 100, 3)} %, allowed {format_number(allowed * 100, 3)} %"
    return _Comparand(is_compatible=distance <= allowed + 1e-12, text=text)


def _match_levels(name: str, recorded: Analysis, new: Analysis) -> _Comparand | None:
    """Compatible where the t interval of the differences between trials of one name (one seed) holds 0."""
    by_name = {trial.name: trial for trial in new.trials}
    pairs = [(old.summary(name), by_name[old.name].summary(name)) for old in recorded.trials if old.name in by_name]
    interval = t_interval(
        [now.mean - was.mean for was, now in pairs if was is not None and now is not None], CONFIDENCE
    )
    if interval is None:
        return None
    bounds = f"{format_number(interval.low)} to {format_number(interval.high)}"
    text = f"{name}: mean change {format_number(interval.estimate)} ({bounds}, n = {interval.n} trials of equal seed)"
    return _Comparand(is_compatible=interval.low <= 0 <= interval.high, text=text)


def _match_operators(recorded: Analysis, new: Analysis) -> Iterator[_Comparand]:
    """A cell agrees in its status, and in its speedup over vime's function where it has one.

    Speedups may lie ``OPERATOR_TOLERANCE`` apart, and as far again as the processes of either result do.
    """
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
            differing.append(f"{_name_cell(old)}: {was} times vime's speed, now {is_now}")
    num_agreeing = len(recorded.operators) - len(differing)
    yield _Comparand(is_compatible=not differing, text=f"operators: {num_agreeing} of {len(recorded.operators)} agree")
    yield from (_Comparand(is_compatible=False, text=text) for text in differing[:MAX_DETAILS])


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


def _half_width(effect: Effect) -> float | None:
    if effect.low is None or effect.high is None or effect.low <= 0:
        return None
    return (math.log(effect.high) - math.log(effect.low)) / 2


@dataclass(frozen=True, kw_only=True)
class EffectDifference:
    """How two bundles differ; ``comparison`` only where both hold an analysis."""

    findings: tuple[Finding, ...]
    comparison: Comparison | None


def diff_bundles(first: Path, second: Path) -> EffectDifference:
    """Compare plans, what was prepared, manifests node by node, and what the logs give where both were analysed.

    Raises:
        BundleUnreadable: either is broken or unsafe.
    """
    with open_bundle(first) as left, open_bundle(second) as right:
        findings = _diff_plans(left, right)
        findings += diff_contents(load_parts(left.prepared), load_parts(right.prepared))
        old, new = load_manifests(left), load_manifests(right)
        analyses = [analyse(run_dir) if run_dir.analysis.is_file() else None for run_dir in (left, right)]
        code = compare_identities(*(read_identity(run_dir, Plan.load(run_dir.plan)) for run_dir in (left, right)))
    if len(old) != len(new):
        findings.append(Finding(Level.BLOCKING, "nodes", str(len(old)), str(len(new))))
    for was, now in zip(old, new, strict=False):
        findings += diff_manifests(was, now)
    recorded, later = analyses
    comparison = None if recorded is None or later is None else compare_analyses(recorded, later, findings, code)
    findings += code
    return EffectDifference(findings=tuple(limit_findings(findings)), comparison=comparison)


def _diff_plans(left: RunDir, right: RunDir) -> list[Finding]:
    old, new = (Plan.load(run_dir.plan) for run_dir in (left, right))
    findings = []
    if old.experiment_hash != new.experiment_hash:
        findings += list(diff_values("plan", old.experiment, new.experiment, Level.BLOCKING))
    if old.profile != new.profile:
        findings += list(diff_values("profile", old.profile.model_dump(mode="json"),
                                      new.profile.model_dump(mode="json"), Level.WARNING))  # fmt: skip
    return findings
