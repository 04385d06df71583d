"""Decide the gates, which are the conditions of a speed verdict: passed, failed or undecided.

A gate may also not apply to a run, or the run may have planned nothing that could decide it.

A measured gate judges the mean degradation over scored pairs: how much worse enabled is than baseline.  The gate passes
when the upper bound of the mean is within the margin, and fails when its lower bound is beyond the margin.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rlk_repro.analysis.shadows import ROUTES, make_shadow_gate
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import count, format_number, group, name_some
from rlk_repro.operators import RL_KERNEL, TITLES
from rlk_repro.rundir.results import (
    NO_CONTROL_BLOCK,
    BlockResult,
    Gate,
    GateStatus,
    PairMetric,
    PairResult,
    PairStatus,
    ProofStatus,
    ShadowResult,
    TrialResult,
)
from rlk_repro.spec import Lane, Measure
from rlk_repro.spec.values import CROSSOVER, ENABLED
from rlk_repro.statistics.crossover import MIN_BLOCKS, BlockNoise, trimmed_interval
from rlk_repro.statistics.power import pairs_to_decide
from rlk_repro.statistics.stats import (
    ABS_DIFF,
    CARRY_OVER,
    GRADIENT,
    PEAK_MEMORY,
    RAW_REWARD,
    RESPONSE_LENGTH,
    STEP_TIME,
    Interval,
    mean,
    t_interval,
    to_ratio,
)

MANIFESTS: Final = "manifests"
STEPS: Final = "steps"
ACTIVE: Final = "rl_kernel_active"
PAIRS: Final = "pairs"
SESSIONS: Final = "sessions"
BLOCKS: Final = "blocks"
CONTROL_BLOCKS: Final = "control_blocks"
CARRIED: Final = "carry_over"
TRAINING: Final = "training_moved"
STILL: Final = {RAW_REWARD: "the same in every scored step", GRADIENT: "zero in most scored steps"}
LEAST_CONTROL_BLOCKS: Final = 2

NUM_MEASURED_GATES: Final = 4
RATIO: Final = "mean ratio enabled / baseline"
DIFFERENCE: Final = "mean difference enabled - baseline"
GIVEN_TO_BOTH: Final = {"module": "both variants compute on the same random batches"}
ONE_POLICY: Final = "both variants of a session train one policy; only measure.design: parallel compares this metric"
LENIENT_FIRST: Final = (GateStatus.PASSED, GateStatus.UNDECIDED, GateStatus.FAILED)

Reading = Callable[[PairMetric], float | None]
Bound = Callable[[Sequence[float], float], Interval | None]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The values from which the gates are decided.

    Attributes:
        differences: differences of the variants outside the declared switches; None if the variants were not compared.
        missing: absent records of scored pairs; without these records the variants cannot be compared.
        switch: the setting in which the variants differ, if it is not RL-Kernel; else empty.
        title: the plan's ``implementation_title``.
        serving: what must be proved to have run.
        noise: the noise of blocks by metric, which limits the intervals; empty under rules 1.
    """

    measure: Measure
    lane: Lane
    workload: str = ""
    pairs: Sequence[PairResult]
    trials: Mapping[str, TrialResult]
    differences: Sequence[Finding] | None
    missing: Sequence[str] = ()
    blocks: Sequence[BlockResult] = ()
    shadows: Sequence[ShadowResult] = ()
    switch: str = ""
    title: str = ""
    serving: str = TITLES[RL_KERNEL]
    has_rollout_log_probs: bool = True
    noise: Mapping[str, BlockNoise] = field(default_factory=dict)

    @property
    def is_crossover(self) -> bool:
        return self.measure.design == CROSSOVER

    @property
    def not_planned(self) -> GateStatus:
        return GateStatus.NOT_PLANNED if self.measure.rules > 1 else GateStatus.NOT_APPLICABLE

    @property
    def unit(self) -> str:
        return "session" if self.is_crossover else "pair"

    @property
    def scored(self) -> list[PairResult]:
        return [pair for pair in self.pairs if pair.is_counted]

    @property
    def controls(self) -> list[PairResult]:
        return [pair for pair in self.pairs if pair.status is PairStatus.SCORED and pair.is_control]

    @property
    def comparisons(self) -> list[PairResult]:
        """The pairs that were planned to compare the variants, with any status."""
        return [pair for pair in self.pairs if not pair.is_control or self.has_enabled(pair)]

    @property
    def num_planned(self) -> int:
        planned = self.measure.sessions if self.is_crossover else self.measure.pairs
        return max(planned, len(self.comparisons)) if self.comparisons else 0

    def has_enabled(self, pair: PairResult) -> bool:
        return pair.second in self.trials and self.trials[pair.second].variant == ENABLED

    def proof(self, pair: PairResult) -> ProofStatus:
        return self.trials[pair.second].proof if pair.second in self.trials else ProofStatus.MISSING

    def blocks_of(self, *, is_control: bool) -> list[BlockResult]:
        names = {pair.pair for pair in self.scored}
        return [block for block in self.blocks if block.session in names and block.is_control is is_control]


def make_gates(evidence: Evidence) -> tuple[Gate, ...]:
    measured: tuple[Gate, ...] = (
        _reward_gate(evidence),
        _abs_diff_gate(evidence),
        _memory_gate(evidence),
        _length_gate(evidence),
        _manifests_gate(evidence),
    )
    if evidence.measure.rules > 1:
        measured = (*measured, _training_gate(evidence))
    last = (_active_gate(evidence), _units_gate(evidence))
    if evidence.is_crossover:
        unplanned = None
        if evidence.switch:
            unplanned = GateStatus.NOT_APPLICABLE
        elif not evidence.measure.shadow_steps:
            unplanned = evidence.not_planned
        shadows = make_shadow_gate(
            evidence.shadows,
            sessions=[pair.pair for pair in evidence.scored],
            unplanned=unplanned,
            margins=evidence.measure.margins,
            routes=evidence.title.replace(" in place of ", " and ") or ROUTES,
        )
        if evidence.measure.rules > 1 and evidence.measure.period_steps == 1:
            measured = (*measured, _carry_over_gate(evidence))
        return (*measured, _blocks_gate(evidence), _control_blocks_gate(evidence), shadows, *last)
    return (*measured, _steps_gate(evidence), *last)


def _reward_gate(evidence: Evidence) -> Gate:
    if evidence.lane != "live" or evidence.is_crossover:
        return _stored_gate(evidence, RAW_REWARD)
    margin = evidence.measure.margins.raw_reward
    drops = _readings(evidence, RAW_REWARD, lambda item: _difference(item.second, item.first))
    return _present(_non_inferior(evidence, RAW_REWARD, drops, margin, DIFFERENCE), lambda drop: -drop)


def _abs_diff_gate(evidence: Evidence) -> Gate:
    if not evidence.has_rollout_log_probs:
        return _plain_gate(ABS_DIFF, GateStatus.NOT_APPLICABLE, "these rollouts hold no log-probs", 0)
    margins = evidence.measure.margins
    ratios = _readings(evidence, ABS_DIFF, lambda item: item.log_ratio)
    differences = _readings(evidence, ABS_DIFF, lambda item: _difference(item.first, item.second))
    by_ratio = _non_inferior(evidence, ABS_DIFF, ratios, math.log(margins.logprob_abs_diff_ratio), RATIO)
    by_ratio = _present(by_ratio, to_ratio)
    by_difference = _non_inferior(evidence, ABS_DIFF, differences, margins.logprob_abs_diff_difference, DIFFERENCE)
    if above := _above_cap(evidence):
        return replace(by_difference, status=GateStatus.FAILED, detail=above)
    return min(by_ratio, by_difference, key=lambda gate: LENIENT_FIRST.index(gate.status))


def _above_cap(evidence: Evidence) -> str:
    cap = evidence.measure.margins.logprob_abs_diff_cap
    found = [
        (pair.pair, item)
        for pair in evidence.scored
        if (item := pair.metric(ABS_DIFF)) and (item.second or 0) > cap
        # A session trains one policy; if the baseline's mean exceeds the cap too, the enabled variant is not the cause.
        if not (evidence.is_crossover and (item.first or 0) > cap)
    ]
    if not found:
        return ""
    name, worst = max(found, key=lambda entry: entry[1].second or 0)
    also = ", as is the mean of baseline" if (worst.first or 0) > cap else ""
    mean_of = f"the mean of enabled is {format_number(worst.second or 0)} in {evidence.unit} {name}"
    return f"{mean_of}, above the cap {cap:g}{also}"


def _memory_gate(evidence: Evidence) -> Gate:
    ratios = _readings(evidence, PEAK_MEMORY, lambda item: item.log_ratio)
    gate = _non_inferior(evidence, PEAK_MEMORY, ratios, math.log(evidence.measure.margins.peak_memory_ratio), RATIO)
    return _present(gate, to_ratio)


def _length_gate(evidence: Evidence) -> Gate:
    if evidence.lane != "live" or evidence.is_crossover:
        return _stored_gate(evidence, RESPONSE_LENGTH)
    margin = math.log1p(evidence.measure.margins.response_length_pct / 100)
    ratios = _readings(evidence, RESPONSE_LENGTH, lambda item: item.log_ratio)
    # Longer and shorter responses both change the step time.
    return _two_sided(evidence, RESPONSE_LENGTH, ratios, margin, RATIO)


def _readings(evidence: Evidence, metric: str, read: Reading) -> list[float]:
    items = (pair.metric(metric) for pair in evidence.scored)
    return [value for item in items if item is not None and (value := read(item)) is not None]


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _non_inferior(
    evidence: Evidence,
    name: str,
    degradations: Sequence[float],
    margin: float,
    what: str,
    *,
    num_sides: int = 1,
    bound: Bound = t_interval,
) -> Gate:
    alpha, n = evidence.measure.alpha, len(degradations)
    passing = bound(degradations, 1 - 2 * alpha)
    # Bonferroni: alpha is divided by the number of tests, so that any gate fails by chance in at most alpha of runs.
    failing = bound(degradations, 1 - 2 * alpha / NUM_MEASURED_GATES / num_sides)
    if passing is None or failing is None:
        detail = f"{what} has 1 {evidence.unit}, which gives no bound" if n else f"{what} has no scored {evidence.unit}"
        if evidence.scored and not n:
            detail = f"{what} is not recorded"
        gate = _plain_gate(name, GateStatus.UNDECIDED, detail, n)
        return replace(gate, estimate=mean(degradations) if degradations else None, margin=margin)
    status, detail = GateStatus.PASSED, f"{what} is within the margin"
    if failing.low > margin:
        status, detail = GateStatus.FAILED, f"{what} is shown to be beyond the margin"
    elif passing.high > margin:
        status = GateStatus.UNDECIDED
        detail = f"{what} may be beyond the margin{_advice(passing, margin, alpha, evidence.unit)}"
    elif n < len(evidence.scored):
        status = GateStatus.UNDECIDED
        detail = f"{what} is comparable in only {n} of {len(evidence.scored)} scored {evidence.unit}s"
    return Gate(
        name=name,
        status=status,
        detail=detail,
        estimate=passing.estimate,
        low=failing.low,
        high=passing.high,
        margin=margin,
        n=n,
    )


def _two_sided(
    evidence: Evidence, name: str, log_ratios: Sequence[float], margin: float, what: str, bound: Bound = t_interval
) -> Gate:
    sign = 1 if log_ratios and mean(log_ratios) >= 0 else -1
    degradations = [sign * value for value in log_ratios]
    gate = _non_inferior(evidence, name, degradations, margin, what, num_sides=2, bound=bound)
    return _present(gate, lambda degradation: to_ratio(sign * degradation))


def _advice(interval: Interval, margin: float, alpha: float, unit: str) -> str:
    if margin <= 0:
        return ""
    needed = pairs_to_decide(interval.stdev, margin, alpha)
    if needed is None:
        return f"; more than 200 {unit}s would be needed to decide at this spread"
    return f"; about {needed} {unit}s would decide at this spread" if needed > interval.n else ""


def _present(gate: Gate, convert: Callable[[float], float]) -> Gate:
    bounds = sorted(convert(item) for item in (gate.low, gate.high) if item is not None)
    low, high = bounds or (None, None)
    return replace(
        gate,
        estimate=None if gate.estimate is None else convert(gate.estimate),
        low=low,
        high=high,
        margin=None if gate.margin is None else convert(gate.margin),
    )


def _plain_gate(name: str, status: GateStatus, detail: str, n: int) -> Gate:
    return Gate(name=name, status=status, detail=detail, estimate=None, low=None, high=None, margin=None, n=n)


def _stored_gate(evidence: Evidence, name: str) -> Gate:
    given = GIVEN_TO_BOTH.get(evidence.workload, "both variants train on the same stored rollouts")
    detail = ONE_POLICY if evidence.lane == "live" else given
    return _plain_gate(name, GateStatus.NOT_APPLICABLE, detail, 0)


def _manifests_gate(evidence: Evidence) -> Gate:
    if evidence.differences is None:
        return _plain_gate(MANIFESTS, GateStatus.UNDECIDED, "the variants were not compared", len(evidence.scored))
    blocking = [item.where for item in evidence.differences if item.level is Level.BLOCKING]
    if blocking:
        detail = f"the variants differ in {name_some(blocking)}"
        return _plain_gate(MANIFESTS, GateStatus.FAILED, detail, len(evidence.scored))
    if evidence.missing:
        detail = f"the variants were not compared; missing: {name_some(evidence.missing)}"
        return _plain_gate(MANIFESTS, GateStatus.UNDECIDED, detail, len(evidence.scored))
    equal = "the variants are equal outside the declared switches"
    detail = "the same processes ran both variants" if evidence.is_crossover else equal
    return _plain_gate(MANIFESTS, GateStatus.PASSED, detail, len(evidence.scored))


def _steps_gate(evidence: Evidence) -> Gate:
    expected, n = evidence.measure.scored_steps, len(evidence.scored)
    if not n:
        return _plain_gate(STEPS, GateStatus.UNDECIDED, "no scored pair", 0)
    found = {
        name: summary.n if (summary := evidence.trials[name].summary(STEP_TIME)) else 0
        for pair in evidence.scored
        for name in (pair.first, pair.second)
    }
    short = [f"{name} ({number} of {expected})" for name, number in found.items() if number != expected]
    if short:
        return _plain_gate(STEPS, GateStatus.FAILED, f"scored steps missing in {name_some(short)}", n)
    return _plain_gate(STEPS, GateStatus.PASSED, f"every trial has all {expected} scored steps", n)


def _active_gate(evidence: Evidence) -> Gate:
    if evidence.switch:
        detail = f"the variants differ in {evidence.switch}; neither uses RL-Kernel"
        return _plain_gate(ACTIVE, GateStatus.NOT_APPLICABLE, detail, 0)
    finished = [pair for pair in evidence.comparisons if pair.status is not PairStatus.DROPPED]
    pairs, n = evidence.scored or finished, len(evidence.scored)
    by_proof = group((evidence.proof(pair), pair.pair) for pair in pairs)
    refuted = by_proof.get(ProofStatus.FALLBACK, []) + by_proof.get(ProofStatus.NOT_REQUESTED, [])
    if refuted:
        detail = f"{evidence.serving} did not run, or not everywhere, in {name_some(refuted)}"
        return _plain_gate(ACTIVE, GateStatus.FAILED, detail, n)
    if ProofStatus.MISSING in by_proof:
        detail = f"no proof that {evidence.serving} ran in {name_some(by_proof[ProofStatus.MISSING])}"
        return _plain_gate(ACTIVE, GateStatus.UNDECIDED, detail, n)
    if ProofStatus.NATIVE in by_proof:
        detail = "RL-Kernel's operators ran as plain PyTorch, so this run supports no verdict on speed"
        return _plain_gate(ACTIVE, GateStatus.UNDECIDED, detail, n)
    if not n:
        return _plain_gate(ACTIVE, GateStatus.UNDECIDED, f"no scored {evidence.unit}", 0)
    verb = "are" if " and " in evidence.serving else "is"
    detail = f"{evidence.serving} {verb} proved to run in every scored {evidence.unit}"
    return _plain_gate(ACTIVE, GateStatus.PASSED, detail, n)


def _blocks_gate(evidence: Evidence) -> Gate:
    found = evidence.blocks_of(is_control=False)
    lost = [block for block in found if block.reason]
    n = len(found) - len(lost)
    counted = Counter(block.session for block in found if not block.reason)
    few = [f"{pair.pair} ({counted[pair.pair]})" for pair in evidence.scored if counted[pair.pair] < MIN_BLOCKS]
    detail = f"{n} of {count(len(found), 'block')} count"
    if few:
        detail += f"; fewer than the {MIN_BLOCKS} blocks that a session needs: {name_some(few)}"
    if lost:
        reasons = (f"{block.session} block {block.number}: {block.reason}" for block in lost)
        detail += f"; lost: {name_some(reasons)}"
    too_many = len(lost) > evidence.measure.max_dropped_fraction * len(found)
    return _plain_gate(BLOCKS, GateStatus.UNDECIDED if few or too_many or not n else GateStatus.PASSED, detail, n)


def _control_blocks_gate(evidence: Evidence) -> Gate:
    if not evidence.measure.control_blocks:
        return _plain_gate(CONTROL_BLOCKS, evidence.not_planned, NO_CONTROL_BLOCK, 0)
    found = evidence.blocks_of(is_control=True)
    values = [block.log_ratio for block in found if block.log_ratio is not None and not block.reason]
    if len(values) < MIN_BLOCKS:
        detail = f"{len(values)} control blocks found in all sessions, {MIN_BLOCKS} are needed"
        return _plain_gate(CONTROL_BLOCKS, GateStatus.UNDECIDED, detail, len(values))
    margin = max(math.log1p(evidence.measure.smallest_effect_pct / 100), _nearest_end(evidence))
    what = "trimmed mean ratio B / A of the baseline's periods"
    return _two_sided(evidence, CONTROL_BLOCKS, values, margin, what, trimmed_interval)


def _carry_over_gate(evidence: Evidence) -> Gate:
    """Judge periods of one step, whose first step after a change of the variant is scored."""
    if evidence.measure.control_blocks < LEAST_CONTROL_BLOCKS:
        detail = f"periods of one step need {LEAST_CONTROL_BLOCKS} control blocks in a session"
        return _plain_gate(CARRIED, GateStatus.UNDECIDED, detail, 0)
    values = _readings(evidence, CARRY_OVER, lambda item: item.log_ratio)
    margin = max(math.log1p(evidence.measure.smallest_effect_pct / 100), _nearest_end(evidence))
    what = "mean ratio of a first step after a change to the next step, enabled / baseline"
    return _two_sided(evidence, CARRIED, values, margin, what)


def _training_gate(evidence: Evidence) -> Gate:
    if evidence.workload in GIVEN_TO_BOTH:
        return _plain_gate(TRAINING, GateStatus.NOT_APPLICABLE, "this workload updates no weights", 0)
    names, n = [name for pair in evidence.scored for name in (pair.first, pair.second)], len(evidence.scored)
    for metric, what in ((RAW_REWARD, "rewards"), (GRADIENT, "gradients")):
        found = {name: summary for name in names if (summary := evidence.trials[name].summary(metric)) is not None}
        if missing := [name for name in names if name not in found or found[name].n < 2]:
            detail = f"fewer than 2 scored steps have {what} in {name_some(missing)}"
            return _plain_gate(TRAINING, GateStatus.UNDECIDED, detail, n)
        is_reward = metric == RAW_REWARD
        moves = {name: item.minimum < item.maximum if is_reward else item.median > 0 for name, item in found.items()}
        if still := [name for name, does_move in moves.items() if not does_move]:
            detail = f"training did not move: {what} are {STILL[metric]} in {name_some(still)}"
            return _plain_gate(TRAINING, GateStatus.FAILED, detail, n)
    if not n:
        return _plain_gate(TRAINING, GateStatus.UNDECIDED, f"no scored {evidence.unit}", 0)
    return _plain_gate(TRAINING, GateStatus.PASSED, "rewards differ between steps, and gradients are not zero", n)


def _nearest_end(evidence: Evidence) -> float:
    """Return the distance of the step time's interval from 0, as a log ratio."""
    log_ratios = _readings(evidence, STEP_TIME, lambda item: item.log_ratio)
    interval = t_interval(log_ratios, 1 - evidence.measure.alpha)
    return 0.0 if interval is None else max(0.0, interval.low, -interval.high)


def _units_gate(evidence: Evidence) -> Gate:
    planned, n = evidence.num_planned, len(evidence.scored)
    detail = f"{n} of {count(planned, f'planned {evidence.unit}')} scored"
    too_many = planned - n > evidence.measure.max_dropped_fraction * planned
    status = GateStatus.UNDECIDED if too_many or not n else GateStatus.PASSED
    if too_many:
        detail += f", at most {100 * evidence.measure.max_dropped_fraction:g} % may be lost"
    controls = 0 if evidence.is_crossover else evidence.measure.control_pairs
    if controls - len(evidence.controls) > evidence.measure.max_dropped_fraction * controls:
        status = GateStatus.UNDECIDED
        detail += f"; {len(evidence.controls)} of {count(controls, 'planned control pair')} scored"
    return _plain_gate(SESSIONS if evidence.is_crossover else PAIRS, status, detail, n)
