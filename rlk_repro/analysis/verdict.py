"""Find the verdict from pairs and trials: effects, noise floor, gates, one word and the sentence that explains it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rlk_repro.analysis.evidence import Evidence, list_log_ratios
from rlk_repro.analysis.gates import ACTIVE, OWN_GPUS, make_gates
from rlk_repro.analysis.gates import CONTROL_BLOCKS as CONTROL_BLOCKS_GATE
from rlk_repro.analysis.noise import widen
from rlk_repro.base.units import count, format_number, group, name_some
from rlk_repro.rundir.results import (
    Effect,
    Gate,
    GateStatus,
    NoiseFloor,
    PairResult,
    PairStatus,
    Verdict,
    VerdictWord,
    count_gates,
)
from rlk_repro.statistics.crossover import MIN_SESSIONS, randomisation_p
from rlk_repro.statistics.power import MIN_PAIRS
from rlk_repro.statistics.stats import (
    DIAGNOSTICS,
    ENERGY,
    MEAN_STEP_TIME,
    STEP_TIME,
    Place,
    holm,
    is_cost,
    noise_floor,
    paired_effect,
    place_interval,
)

PRIMARY: Final = "primary"
SECONDARY: Final = "secondary"
DIAGNOSTIC: Final = "diagnostic"
MAX_THROTTLED_FRACTION: Final = 0.01
SPEED_WORDS: Final = {
    Place.BELOW: VerdictWord.FASTER,
    Place.ABOVE: VerdictWord.SLOWER,
    Place.WITHIN: VerdictWord.EQUIVALENT,
    Place.ACROSS: VerdictWord.INCONCLUSIVE,
}
SHOWN: Final = (VerdictWord.FASTER, VerdictWord.SLOWER)
OVERRIDDEN: Final = "exploratory: flags of the submission override measurement rules of the run's file"
TOO_NOISY: Final = "too noisy to tell whether the change is within or beyond"
"""How a headline begins, after its word, if nothing but the width of the interval prevents a verdict."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    effects: tuple[Effect, ...]
    noise_floor: NoiseFloor
    gates: tuple[Gate, ...]
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class _Case:
    """``threshold`` and ``smallest`` are fractions."""

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
    def unit(self) -> str:
        return self.evidence.unit

    @property
    def num_planned(self) -> str:
        return count(self.evidence.num_planned, f"planned {self.unit}")

    @property
    def least(self) -> int:
        return MIN_SESSIONS if self.evidence.is_crossover else MIN_PAIRS

    @property
    def by_mean(self) -> Effect | None:
        return next((effect for effect in self.effects if effect.metric == MEAN_STEP_TIME), None)

    @property
    def never_ran(self) -> bool:
        return (
            bool(self.evidence.fallen_back)
            and not self.evidence.scored
            and not self.comparisons_that_are(PairStatus.VOID)
        )


def judge(evidence: Evidence, *, is_exploratory: bool = False) -> Judgement:
    """Find the verdict of a run; the headline begins with ``exploratory`` if a flag changed a rule of measurement."""
    measure = evidence.measure
    case = _Case(
        evidence=evidence,
        effects=_make_effects(evidence),
        floor=noise_floor(list_log_ratios(evidence.controls, STEP_TIME), alpha=measure.alpha, unit=evidence.unit),
        gates=make_gates(evidence),
    )
    word = _choose_word(case)
    headline = _open_headline(evidence, is_exploratory=is_exploratory) + _headline(case, word)
    headline += _name_slow_steps(case, word) + _name_lost(case)
    if measure.rules > 1 and evidence.scored:
        headline += f"; {count_gates(case.gates)}"
    verdict = Verdict(
        word=word,
        headline=headline,
        reasons=tuple(_reasons(case, is_exploratory=is_exploratory)),
        threshold=case.threshold,
        smallest_effect=case.smallest,
        num_pairs=case.primary.n,
        is_exploratory=is_exploratory,
    )
    return Judgement(effects=case.effects, noise_floor=case.floor, gates=case.gates, verdict=verdict)


def decline(evidence: Evidence, headline: str, reasons: Sequence[str], *, is_exploratory: bool = False) -> Judgement:
    """Return the verdict ``no comparison`` of a run that measures something else than speed."""
    smallest = evidence.measure.smallest_effect_pct / 100
    verdict = Verdict(
        word=VerdictWord.NO_COMPARISON,
        headline=_open_headline(evidence, is_exploratory=is_exploratory) + headline,
        reasons=tuple(reasons),
        threshold=smallest,
        smallest_effect=smallest,
        num_pairs=len(evidence.scored),
        is_exploratory=is_exploratory,
    )
    floor = noise_floor(list_log_ratios(evidence.controls, STEP_TIME), alpha=evidence.measure.alpha)
    return Judgement(effects=(), noise_floor=floor, gates=(), verdict=verdict)


def _make_effects(evidence: Evidence) -> tuple[Effect, ...]:
    """Return the effects in order: step time; other costs by name, with Holm's correction; diagnostic metrics."""
    names = {item.metric for pair in evidence.scored for item in pair.metrics if is_cost(item.metric)} - {STEP_TIME}
    secondary = [_make_effect(evidence, name, SECONDARY) for name in sorted(names - set(DIAGNOSTICS))]
    corrected = holm([effect.p_t for effect in secondary])
    found = [replace(effect, p_holm=p) for effect, p in zip(secondary, corrected, strict=True)]
    diagnostic = [_make_effect(evidence, name, DIAGNOSTIC) for name in DIAGNOSTICS if name in names]
    primary = _make_effect(evidence, STEP_TIME, PRIMARY)
    if evidence.is_crossover:
        p_value, p_floor = _randomise(evidence)
        primary = replace(primary, p_value=p_value, p_floor=p_floor)
    return (primary, *found, *diagnostic)


def _randomise(evidence: Evidence) -> tuple[float | None, float | None]:
    blocks = evidence.blocks_of(is_control=False)
    by_session = group((block.session, (block.order, None if block.reason else block.log_ratio)) for block in blocks)
    return randomisation_p(list(by_session.values())) or (None, None)


def _make_effect(evidence: Evidence, metric: str, role: str) -> Effect:
    log_ratios, n = list_log_ratios(evidence.scored, metric), len(evidence.scored)
    note = "" if len(log_ratios) == n else f"comparable in {len(log_ratios)} of {count(n, f'scored {evidence.unit}')}"
    effect = paired_effect(metric, log_ratios, role=role, alpha=evidence.measure.alpha, note=note)
    if not evidence.is_crossover:
        return effect
    if metric == ENERGY and evidence.measure.rules > 1 and not log_ratios:
        effect = replace(effect, note="a scored period lasts less than the 1 s that the counter of energy needs")
    # The sign-flip p assumes a random order within each pair.  A session has a random order of blocks instead.
    effect = replace(effect, p_value=None, p_floor=None)
    wider = widen(effect, evidence.noise.get(metric))
    if wider is None or effect.low is None or effect.high is None:
        return effect
    if evidence.measure.rules > 2:  # a wider interval has no smaller p
        wider = replace(wider, p_t=max(effect.p_t or 0.0, wider.p_t or 0.0))
    alone = format_number(100 * (math.sqrt(effect.high / effect.low) - 1), 2)
    note = f"the noise of blocks sets the interval; the sessions alone give ± {alone} %"
    return replace(wider, note="; ".join(filter(None, (effect.note, note))))


def _choose_word(case: _Case) -> VerdictWord:
    if case.gates_that(GateStatus.FAILED):
        return VerdictWord.NOT_COMPARABLE
    if case.gates_that(GateStatus.UNDECIDED) or case.primary.n < case.least or _mean_disagrees(case):
        return VerdictWord.INCONCLUSIVE
    return _speed_word(case.primary, case)


def _speed_word(effect: Effect, case: _Case) -> VerdictWord:
    return SPEED_WORDS[place_interval(effect, beyond=case.threshold, within=case.smallest)]


def _mean_disagrees(case: _Case) -> bool:
    """Tell whether rare slow steps, which change the mean and not the median, change the verdict."""
    if case.by_mean is None or case.by_mean.n < case.primary.n:
        return False
    word = _speed_word(case.by_mean, case)
    return word in SHOWN and word is not _speed_word(case.primary, case)


def _open_headline(evidence: Evidence, *, is_exploratory: bool) -> str:
    """Say first what was enabled, if it is not RL-Kernel."""
    enabled = f"with {evidence.title}, " if evidence.title else ""
    return f"exploratory: {enabled}" if is_exploratory else enabled


def _headline(case: _Case, word: VerdictWord) -> str:
    if not case.evidence.comparisons:
        return f"no {case.unit} was planned to compare the variants: {_show_noise(case)}"
    if case.never_ran:
        fallen = f"{len(case.evidence.fallen_back)} of {case.num_planned}"
        enabled = case.evidence.title.partition(" in place of ")[0] or case.evidence.serving
        return f"enabled never ran {enabled}: it fell back in {fallen}; {_show_noise(case)}"
    if word is VerdictWord.NOT_COMPARABLE:
        failed = (show_gate(gate, case.unit) for gate in case.gates_that(GateStatus.FAILED))
        return f"not comparable: {name_some(failed)}"
    if word is VerdictWord.INCONCLUSIVE:
        return f"inconclusive: {_why_inconclusive(case)}; {_show_effect(case.primary, case.unit)}"
    if word is VerdictWord.EQUIVALENT:
        alike = f"enabled and baseline are equivalent within {_show_size(case.smallest)}"
        return f"{alike}{_show_small_change(case)}: {_show_effect(case.primary, case.unit)}"
    effect = _show_effect(case.primary, case.unit)
    return f"enabled is {word} than baseline: {effect}, wholly beyond {_show_threshold(case)}"


def _show_small_change(case: _Case) -> str:
    effect = case.primary
    if not case.evidence.is_crossover or effect.ratio is None or effect.low is None or effect.high is None:
        return ""
    if effect.low <= 1 <= effect.high:
        return ""
    return f", enabled {format_number(100 * abs(effect.ratio - 1), 2)} % {'faster' if effect.ratio < 1 else 'slower'}"


def _why_inconclusive(case: _Case) -> str:
    undecided = case.gates_that(GateStatus.UNDECIDED)
    for name in (ACTIVE, OWN_GPUS):
        if told := next((gate.detail for gate in undecided if gate.name == name), ""):
            return told
    if case.primary.n < case.least:
        return f"{count(case.primary.n, f'scored {case.unit}')}, at least {case.least} are needed"
    if undecided:
        return f"undecided gates: {name_some(gate.name for gate in undecided)}"
    if _mean_disagrees(case):
        return "the medians and the means of the step time give different words"
    if case.threshold > case.smallest:
        size = _show_size(case.smallest)
        return f"the interval is not wholly beyond {_show_threshold(case)}, nor wholly within {size}"
    return f"{TOO_NOISY} {_show_size(case.smallest)}"


def _show_noise(case: _Case) -> str:
    floor = case.floor
    if floor.fraction is None:
        return f"noise not measured, {count(floor.n, f'control {case.unit}')}"
    size = f"{_show_size(floor.fraction)} ({format_number(100 * case.primary.confidence)} % interval)"
    return f"{count(floor.n, f'control {case.unit}')} show noise in step time of up to {size}"


def _show_effect(effect: Effect, unit: str) -> str:
    if effect.ratio is None:
        return f"no step time ratio, 0 {unit}s"
    return f"step time ratio enabled / baseline {_show_ratio(effect, unit)}"


def _show_ratio(effect: Effect, unit: str) -> str:
    interval = "no interval"
    if effect.low is not None and effect.high is not None:
        interval = f"{format_number(100 * effect.confidence)} % interval {effect.low:.4f} to {effect.high:.4f}"
    return f"{effect.ratio:.4f} ({interval}, {count(effect.n, unit)})"


def show_gate(gate: Gate, unit: str) -> str:
    if gate.estimate is None or gate.low is None or gate.high is None or gate.margin is None:
        return f"{gate.name}: {gate.detail}"
    numbers = f"{gate.estimate:.4g}, bounds {gate.low:.4g} and {gate.high:.4g}, margin {gate.margin:.4g}"
    unit = "control block" if gate.name == CONTROL_BLOCKS_GATE else unit
    return f"{gate.name}: {gate.detail} ({numbers}, {count(gate.n, unit)})"


def _show_size(fraction: float) -> str:
    return f"{format_number(100 * fraction, 3)} %"


def _show_threshold(case: _Case) -> str:
    what = "the noise floor" if case.threshold > case.smallest else "the smallest effect of interest"
    return f"{what}, {_show_size(case.threshold)}"


def _name_slow_steps(case: _Case, word: VerdictWord) -> str:
    by_mean = case.by_mean
    if by_mean is None or not is_mean_elsewhere(word, case.primary, by_mean, case.smallest):
        return ""
    return f"; means, which count rare slow steps, give {_show_ratio(by_mean, case.unit)}"


def is_mean_elsewhere(word: VerdictWord, by_median: Effect, by_mean: Effect, smallest: float) -> bool:
    """Tell whether the ratio of mean step times, whatever its interval, does not fit a word that medians decided.

    The mean does not fit ``faster`` or ``slower`` if it lies on the other side of 1, nor ``equivalent`` if it differs
    from 1 by more than the smallest effect of interest.
    """
    if by_mean.ratio is None or by_median.ratio is None:
        return False
    if word is VerdictWord.EQUIVALENT:
        return abs(math.log(by_mean.ratio)) > math.log1p(smallest)
    return word in SHOWN and (by_median.ratio < 1) is not (by_mean.ratio < 1)


def _name_lost(case: _Case) -> str:
    text, planned = "", case.num_planned
    for status in (PairStatus.VOID, PairStatus.DROPPED):
        if lost := case.comparisons_that_are(status):
            names = name_some(f"{pair.pair} ({pair.reason})" for pair in lost)
            text += f"; {len(lost)} of {planned} {status}: {names}"
    if case.evidence.fallen_back and not case.never_ran:
        text += f"; {len(case.evidence.fallen_back)} of {planned} fell back"
    return text


def _reasons(case: _Case, *, is_exploratory: bool) -> Iterator[str]:
    if is_exploratory and case.evidence.measure.rules > 1:
        yield OVERRIDDEN
    elif is_exploratory:
        yield "exploratory: the measurement plan was changed after it was fixed"
    yield from _reasons_from_gates(case)
    if case.evidence.scored and case.primary.n < case.least:
        yield f"a verdict on speed needs {case.least} {case.unit}s with a step time, found {case.primary.n}"
    if case.floor.fraction is not None:
        yield f"noise floor {_show_size(case.floor.fraction)}, the {case.floor.note}"
    elif not case.evidence.is_crossover:
        yield case.floor.note
    if case.by_mean is not None and _mean_disagrees(case):
        yield f"means, which count rare slow steps, instead of medians: {_show_effect(case.by_mean, case.unit)}"
    yield from _reasons_from_trials(case)
    p = case.primary.p_value
    if _speed_word(case.primary, case) in SHOWN and p is not None and p > case.evidence.measure.alpha:
        what = "randomisation" if case.evidence.is_crossover else "sign-flip"
        yield f"the exact {what} p is {format_number(p, 3)}: only the interval shows the difference"


def _reasons_from_gates(case: _Case) -> Iterator[str]:
    failed, undecided = case.gates_that(GateStatus.FAILED), case.gates_that(GateStatus.UNDECIDED)
    yield from (f"failed: {show_gate(gate, case.unit)}" for gate in failed)
    if not case.evidence.scored:
        yield f"no {case.unit} was scored, so nothing else could be measured"
        return
    yield from (f"undecided: {show_gate(gate, case.unit)}" for gate in undecided)
    if case.evidence.measure.rules > 1:
        yield count_gates(case.gates)
    elif not failed and not undecided:
        yield "every gate that applies passed"
    yield from (f"{gate.name} was not planned: {gate.detail}" for gate in case.gates_that(GateStatus.NOT_PLANNED))
    yield from (f"{gate.name} does not apply: {gate.detail}" for gate in case.gates_that(GateStatus.NOT_APPLICABLE))


def _reasons_from_trials(case: _Case) -> Iterator[str]:
    for status in (PairStatus.DROPPED, PairStatus.VOID):
        for pair in case.comparisons_that_are(status):
            yield f"{case.unit} {pair.pair} {status}: {pair.reason}"
    fallen_back = case.evidence.fallen_back
    for reason in dict.fromkeys(pair.control_reason for pair in fallen_back):
        names = name_some((pair.pair for pair in fallen_back if pair.control_reason == reason), limit=12)
        yield f"counted as control {case.unit}s: {names}: {reason}"
    for name in case.evidence.scored_trials:
        share = case.evidence.trials[name].throttled_fraction or 0.0
        if share > MAX_THROTTLED_FRACTION:
            yield f"thermal: {name} was throttled in {_show_size(share)} of its samples"
