"""From pairs to a verdict: effects, noise floor, gates, one word and the sentence that goes with it.

``judge`` is the only entry point; it reads no file and knows no cluster.  Pairs and trials come from ``analysis``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rlk_repro.analysis.gates import ACTIVE, Evidence, count, make_gates, name_some
from rlk_repro.base.findings import Finding
from rlk_repro.base.units import format_number
from rlk_repro.rundir.results import (
    Effect,
    Gate,
    GateStatus,
    NoiseFloor,
    PairResult,
    PairStatus,
    TrialResult,
    TrialStatus,
    Verdict,
    VerdictWord,
)
from rlk_repro.spec import Lane, Measure
from rlk_repro.spec.values import CROSSOVER
from rlk_repro.statistics.power import MIN_PAIRS
from rlk_repro.statistics.stats import MEAN_STEP_TIME, STEP_TIME, holm, is_cost, noise_floor, paired_effect

PRIMARY: Final = "primary"
SECONDARY: Final = "secondary"
MAX_THROTTLED_FRACTION: Final = 0.01
SHOWN: Final = (VerdictWord.FASTER, VerdictWord.SLOWER)
NOT_COMPUTED: Final = "inconclusive: this version computes no verdict for the design crossover"
NOTHING_COMPARED: Final = (
    "operators are measured one by one: no variants are compared, and nothing is said about a trainer's speed"
)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The part of an analysis that follows from its pairs."""

    effects: tuple[Effect, ...]
    noise_floor: NoiseFloor
    gates: tuple[Gate, ...]
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class _Case:
    """All that the word and its reasons are taken from.  ``threshold`` and ``smallest`` are fractions."""

    evidence: Evidence
    effects: tuple[Effect, ...]
    floor: NoiseFloor
    gates: tuple[Gate, ...]

    @property
    def primary(self) -> Effect:
        return self.effects[0]

    @property
    def smallest(self) -> float:
        return self.evidence.measure.smallest_effect_pct / 100

    @property
    def threshold(self) -> float:
        return max(self.smallest, self.floor.fraction or 0.0)

    def gates_that(self, status: GateStatus) -> list[Gate]:
        return [gate for gate in self.gates if gate.status is status]

    def comparisons_that_are(self, status: PairStatus) -> list[PairResult]:
        return [pair for pair in self.evidence.comparisons if pair.status is status]

    @property
    def by_mean(self) -> Effect | None:
        return next((effect for effect in self.effects if effect.metric == MEAN_STEP_TIME), None)

    @property
    def fallen_back(self) -> list[PairResult]:
        return [pair for pair in self.comparisons_that_are(PairStatus.SCORED) if pair.is_control]

    @property
    def never_ran(self) -> bool:
        """Whether every comparison that finished fell back everywhere."""
        return bool(self.fallen_back) and not self.evidence.scored and not self.comparisons_that_are(PairStatus.VOID)


def judge(
    measure: Measure,
    *,
    lane: Lane,
    pairs: Sequence[PairResult],
    trials: Sequence[TrialResult],
    differences: Sequence[Finding] | None,
    missing: Sequence[str] = (),
    is_exploratory: bool = False,
    workload: str = "",
) -> Judgement:
    """Judge one run.

    Args:
        measure: the measurement plan as it was hashed.
        lane: gates on rewards and response lengths apply to ``live`` only.
        pairs: every planned pair, also the void, dropped and fallen-back ones, with ``stats.pair_metrics``.
        trials: every planned trial; the names in ``pairs`` must be among them.
        differences: findings between the manifests of the two variants outside the declared switches (a blocking one
            fails the gate); None where they were not compared.
        missing: records of scored pairs that could not be compared, by name; the gate is undecided for them.
        is_exploratory: the plan was changed after it was hashed; said in headline and reasons.
        workload: its kind, which decides how gates that do not apply are worded.
    """
    evidence = Evidence(
        measure=measure,
        lane=lane,
        pairs=pairs,
        trials={trial.name: trial for trial in trials},
        differences=differences,
        missing=missing,
        workload=workload,
    )
    case = _Case(
        evidence=evidence,
        effects=_make_effects(evidence),
        floor=noise_floor(_log_ratios(evidence.controls, STEP_TIME), alpha=measure.alpha),
        gates=make_gates(evidence),
    )
    word = _choose_word(case)
    prefix = "exploratory: " if is_exploratory else ""
    verdict = Verdict(
        word=word,
        headline=prefix + _headline(case, word) + _name_slow_steps(case, word) + _name_lost(case),
        reasons=tuple(_reasons(case, is_exploratory=is_exploratory)),
        threshold=case.threshold,
        smallest_effect=case.smallest,
        num_pairs=case.primary.n,
        is_exploratory=is_exploratory,
    )
    return Judgement(effects=case.effects, noise_floor=case.floor, gates=case.gates, verdict=verdict)


def decline(
    measure: Measure, *, pairs: Sequence[PairResult], trials: Sequence[TrialResult], is_exploratory: bool = False
) -> Judgement:
    """The verdict of a run that has no variants: that there is none.  Its control pairs still show noise.

    Of sessions this version computes none.
    """
    is_crossover = measure.design == CROSSOVER
    controls = [pair for pair in pairs if pair.status is PairStatus.SCORED]
    lost = [pair for pair in pairs if pair.status is not PairStatus.SCORED]
    reasons = [
        f"{trial.name}: {trial.status} ({trial.reason})" for trial in trials if trial.status is not TrialStatus.OK
    ]
    reasons += [f"pair {pair.pair} {pair.status}: {pair.reason}" for pair in lost]
    smallest = measure.smallest_effect_pct / 100
    verdict = Verdict(
        word=VerdictWord.INCONCLUSIVE if is_crossover else VerdictWord.NO_COMPARISON,
        headline=("exploratory: " if is_exploratory else "") + (NOT_COMPUTED if is_crossover else NOTHING_COMPARED),
        reasons=tuple(reasons),
        threshold=smallest,
        smallest_effect=smallest,
        num_pairs=0,
        is_exploratory=is_exploratory,
    )
    floor = noise_floor(_log_ratios(controls, STEP_TIME), alpha=measure.alpha)
    return Judgement(effects=(), noise_floor=floor, gates=(), verdict=verdict)


def _make_effects(evidence: Evidence) -> tuple[Effect, ...]:
    """The step time first, then every other time, rate and memory by name, Holm-corrected among themselves."""
    scored = evidence.scored
    names = {item.metric for pair in scored for item in pair.metrics if is_cost(item.metric)} - {STEP_TIME}
    secondary = [_make_effect(evidence, name, SECONDARY) for name in sorted(names)]
    corrected = holm([effect.p_t for effect in secondary])
    found = [replace(effect, p_holm=p) for effect, p in zip(secondary, corrected, strict=True)]
    return (_make_effect(evidence, STEP_TIME, PRIMARY), *found)


def _make_effect(evidence: Evidence, metric: str, role: str) -> Effect:
    log_ratios, n = _log_ratios(evidence.scored, metric), len(evidence.scored)
    note = "" if len(log_ratios) == n else f"comparable in {len(log_ratios)} of {count(n, 'scored pair')}"
    return paired_effect(metric, log_ratios, role=role, alpha=evidence.measure.alpha, note=note)


def _log_ratios(pairs: Sequence[PairResult], metric: str) -> list[float]:
    items = (pair.metric(metric) for pair in pairs)
    return [item.log_ratio for item in items if item is not None and item.log_ratio is not None]


def _choose_word(case: _Case) -> VerdictWord:
    if case.gates_that(GateStatus.FAILED):
        return VerdictWord.NOT_COMPARABLE
    if case.gates_that(GateStatus.UNDECIDED) or case.primary.n < MIN_PAIRS or _mean_disagrees(case):
        return VerdictWord.INCONCLUSIVE
    return _speed_word(case.primary, case)


def _speed_word(effect: Effect, case: _Case) -> VerdictWord:
    """Where the interval lies.  The noise floor makes a difference harder to show, never equality easier."""
    if effect.low is None or effect.high is None:
        return VerdictWord.INCONCLUSIVE
    if effect.high < 1 / (1 + case.threshold):
        return VerdictWord.FASTER
    if effect.low > 1 + case.threshold:
        return VerdictWord.SLOWER
    if 1 / (1 + case.smallest) <= effect.low and effect.high <= 1 + case.smallest:
        return VerdictWord.EQUIVALENT
    return VerdictWord.INCONCLUSIVE


def _mean_disagrees(case: _Case) -> bool:
    """Rare slow steps that a median does not see, but that whoever waits for the run does."""
    if case.by_mean is None or case.by_mean.n < case.primary.n:
        return False
    word = _speed_word(case.by_mean, case)
    return word in SHOWN and word is not _speed_word(case.primary, case)


def _headline(case: _Case, word: VerdictWord) -> str:
    if not case.evidence.comparisons:
        return f"no pair was meant to compare: {_show_noise(case)}"
    if case.never_ran:
        fallen = f"it fell back in {len(case.fallen_back)} of {count(case.evidence.num_planned, 'planned pair')}"
        return f"enabled never ran RL-Kernel: {fallen}; {_show_noise(case)}"
    if word is VerdictWord.NOT_COMPARABLE:
        return f"not comparable: {name_some(map(_show_gate, case.gates_that(GateStatus.FAILED)))}"
    if word is VerdictWord.INCONCLUSIVE:
        return f"inconclusive: {_why_inconclusive(case)}; {_show_effect(case.primary)}"
    if word is VerdictWord.EQUIVALENT:
        return f"enabled and baseline are equivalent within {_show_size(case.smallest)}: {_show_effect(case.primary)}"
    return f"enabled is {word} than baseline: {_show_effect(case.primary)}, wholly beyond {_show_threshold(case)}"


def _why_inconclusive(case: _Case) -> str:
    undecided = case.gates_that(GateStatus.UNDECIDED)
    if any(gate.name == ACTIVE for gate in undecided):
        return next(gate.detail for gate in undecided if gate.name == ACTIVE)
    if case.primary.n < MIN_PAIRS:
        return f"{count(case.primary.n, 'scored pair')}, at least {MIN_PAIRS} are needed"
    if undecided:
        return f"undecided on {name_some(gate.name for gate in undecided)}"
    if _mean_disagrees(case):
        return "median and mean of the step time do not agree"
    if case.threshold > case.smallest:
        return (
            f"the interval is not wholly beyond {_show_threshold(case)}, nor wholly within {_show_size(case.smallest)}"
        )
    return f"the interval is neither wholly beyond nor wholly within {_show_size(case.smallest)}"


def _show_noise(case: _Case) -> str:
    floor = case.floor
    if floor.fraction is None:
        return f"noise not measured, {count(floor.n, 'control pair')}"
    size = f"{_show_size(floor.fraction)} ({format_number(100 * case.primary.confidence)} % interval)"
    return f"{count(floor.n, 'control pair')} show noise in step time of up to {size}"


def _show_effect(effect: Effect) -> str:
    if effect.ratio is None:
        return "no step time ratio, 0 pairs"
    return f"step time ratio enabled / baseline {_show_ratio(effect)}"


def _show_ratio(effect: Effect) -> str:
    interval = "no interval"
    if effect.low is not None and effect.high is not None:
        interval = f"{format_number(100 * effect.confidence)} % interval {effect.low:.4f} to {effect.high:.4f}"
    return f"{effect.ratio:.4f} ({interval}, {count(effect.n, 'pair')})"


def _show_gate(gate: Gate) -> str:
    if gate.estimate is None or gate.low is None or gate.high is None or gate.margin is None:
        return f"{gate.name}: {gate.detail}"
    numbers = f"{gate.estimate:.4g}, bounds {gate.low:.4g} and {gate.high:.4g}, margin {gate.margin:.4g}"
    return f"{gate.name}: {gate.detail} ({numbers}, {count(gate.n, 'pair')})"


def _show_size(fraction: float) -> str:
    return f"{format_number(100 * fraction, 3)} %"


def _show_threshold(case: _Case) -> str:
    what = "the noise floor" if case.threshold > case.smallest else "the smallest effect of interest"
    return f"{what}, {_show_size(case.threshold)}"


def _name_slow_steps(case: _Case, word: VerdictWord) -> str:
    """A median can be faster while the sum is not: say so even where the mean is too noisy to show it."""
    median, by_mean = case.primary.ratio, case.by_mean
    if word not in SHOWN or median is None or by_mean is None or by_mean.ratio is None:
        return ""
    if (median < 1) is (by_mean.ratio < 1):
        return ""
    return f"; with rare slow steps counted, by means, {_show_ratio(by_mean)}"


def _name_lost(case: _Case) -> str:
    """Fallbacks, missing proof and failures belong into the headline; the never-ran one tells of its own."""
    lost = {
        "void": case.comparisons_that_are(PairStatus.VOID),
        "dropped": case.comparisons_that_are(PairStatus.DROPPED),
    }
    planned = count(case.evidence.num_planned, "planned pair")
    text = "".join(
        f"; {len(pairs)} of {planned} {how}: {name_some(f'{pair.pair} ({pair.reason})' for pair in pairs)}"
        for how, pairs in lost.items()
        if pairs
    )
    fallen = case.fallen_back
    return text + (f"; {len(fallen)} of {planned} fell back" if fallen and not case.never_ran else "")


def _reasons(case: _Case, *, is_exploratory: bool) -> Iterator[str]:
    if is_exploratory:
        yield "exploratory: the measurement plan was changed after it was fixed"
    yield from _reasons_from_gates(case)
    if case.evidence.scored and case.primary.n < MIN_PAIRS:
        yield f"a verdict on speed needs {MIN_PAIRS} pairs with a step time, found {case.primary.n}"
    yield _reason_for_floor(case)
    if case.by_mean is not None and _mean_disagrees(case):
        yield f"with rare slow steps counted, by means, not medians: {_show_effect(case.by_mean)}"
    yield from _reasons_from_trials(case)
    p = case.primary.p_value
    if _speed_word(case.primary, case) in SHOWN and p is not None and p > case.evidence.measure.alpha:
        yield f"the exact sign-flip p is {format_number(p, 3)}: the interval alone carries the difference"


def _reasons_from_gates(case: _Case) -> Iterator[str]:
    failed, undecided = case.gates_that(GateStatus.FAILED), case.gates_that(GateStatus.UNDECIDED)
    yield from (f"failed: {_show_gate(gate)}" for gate in failed)
    if not case.evidence.scored:
        yield "no pair was scored, so nothing else could be measured"
        return
    yield from (f"undecided: {_show_gate(gate)}" for gate in undecided)
    if not failed and not undecided:
        yield "every gate that applies passed"
    yield from (f"{gate.name} does not apply: {gate.detail}" for gate in case.gates_that(GateStatus.NOT_APPLICABLE))


def _reason_for_floor(case: _Case) -> str:
    if case.floor.fraction is None:
        return case.floor.note
    return f"noise floor {_show_size(case.floor.fraction)}, the {case.floor.note}"


def _reasons_from_trials(case: _Case) -> Iterator[str]:
    for pair in case.comparisons_that_are(PairStatus.DROPPED):
        yield f"pair {pair.pair} dropped: {pair.reason}"
    for pair in case.comparisons_that_are(PairStatus.VOID):
        yield f"pair {pair.pair} void: {pair.reason}"
    for reason in dict.fromkeys(pair.control_reason for pair in case.fallen_back):
        names = name_some((pair.pair for pair in case.fallen_back if pair.control_reason == reason), limit=12)
        yield f"used as control pairs: {names}: {reason}"
    for pair in case.evidence.scored:
        for name in (pair.first, pair.second):
            share = case.evidence.trials[name].throttled_fraction or 0.0
            if share > MAX_THROTTLED_FRACTION:
                yield f"thermal: {name} was throttled in {_show_size(share)} of its samples"
