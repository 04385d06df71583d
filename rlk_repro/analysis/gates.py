"""Decide the gates, which are the conditions of a speed verdict: passed, failed or undecided.

A gate may also not apply to a run, or the run may have planned nothing that could decide it.

A measured gate judges the mean degradation over scored pairs: how much worse enabled is than baseline.  The gate passes
when the upper bound of the mean is within the margin, and fails when its lower bound is beyond the margin.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from rlk_repro.analysis.evidence import Evidence, list_log_ratios, plain_gate
from rlk_repro.analysis.shadows import judge_shadows
from rlk_repro.base.findings import Level
from rlk_repro.base.units import count, format_number, group, name_some
from rlk_repro.rundir.results import NO_CONTROL_BLOCK, Gate, GateStatus, PairStatus, ProofStatus
from rlk_repro.statistics.crossover import MIN_BLOCKS, trimmed_interval
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
OWN_GPUS: Final = "own_gpus"
STEPS: Final = "steps"
ACTIVE: Final = "rl_kernel_active"
PAIRS: Final = "pairs"
SESSIONS: Final = "sessions"
BLOCKS: Final = "blocks"
CONTROL_BLOCKS: Final = "control_blocks"
CARRIED: Final = "carry_over"
TRAINING: Final = "training_moved"
LEAST_CONTROL_BLOCKS: Final = 2

NUM_MEASURED_GATES: Final = 4
RATIO: Final = "mean ratio enabled / baseline"
DIFFERENCE: Final = "mean difference enabled - baseline"
GIVEN_TO_BOTH: Final = {"module": "both variants compute on the same random batches"}
ONE_POLICY: Final = "both variants of a session train one policy; only measure.design: parallel compares this metric"
LENIENT_FIRST: Final = (GateStatus.PASSED, GateStatus.UNDECIDED, GateStatus.FAILED)


def make_gates(evidence: Evidence) -> tuple[Gate, ...]:
    gates = [*make_measured_gates(evidence), _manifests_gate(evidence)]
    if evidence.measure.rules > 1:
        gates.append(_training_gate(evidence))
        if evidence.is_crossover and evidence.measure.period_steps == 1:
            gates.append(_carry_over_gate(evidence))
    if evidence.is_crossover:
        gates += [_blocks_gate(evidence), _control_blocks_gate(evidence), judge_shadows(evidence)]
    else:
        gates.append(_steps_gate(evidence))
    if disturbed := [pair.pair for pair in evidence.scored if pair.pair in evidence.disturbed]:
        detail = f"the times of {name_some(disturbed)} do not count, because another run could use the same GPUs"
        gates.append(plain_gate(OWN_GPUS, GateStatus.UNDECIDED, detail, len(evidence.scored)))
    return (*gates, _active_gate(evidence), _units_gate(evidence))


def make_measured_gates(evidence: Evidence) -> list[Gate]:
    """Judge what enabled may worsen."""
    return [
        _reward_gate(evidence),
        _abs_diff_gate(evidence),
        _judge_ratio(evidence, PEAK_MEMORY, evidence.measure.margins.peak_memory_ratio),
        _length_gate(evidence),
    ]


def make_pooled_gates(evidence: Evidence) -> tuple[Gate, ...]:
    """Judge live pairs of several runs together; that their variants differ only as declared, each run has judged."""
    return (*make_measured_gates(evidence), _units_gate(evidence))


def _choose(name: str, n: int, *rows: tuple[object, GateStatus, str]) -> Gate:
    """Return the gate of the first row whose condition holds; the last row's always does."""
    status, detail = next(row[1:] for row in rows if row[0])
    return plain_gate(name, status, detail, n)


def _reward_gate(evidence: Evidence) -> Gate:
    if evidence.lane != "live" or evidence.is_crossover:
        return _stored_gate(evidence, RAW_REWARD)
    drops = [before - after for before, after in _list_sides(evidence, RAW_REWARD)]
    margin = evidence.measure.margins.raw_reward
    return _judge_mean(evidence, RAW_REWARD, drops, margin, DIFFERENCE, show=lambda drop: -drop)


def _abs_diff_gate(evidence: Evidence) -> Gate:
    if not evidence.has_rollout_log_probs:
        return plain_gate(ABS_DIFF, GateStatus.NOT_APPLICABLE, "these rollouts hold no log-probs", 0)
    margins = evidence.measure.margins
    differences = [after - before for before, after in _list_sides(evidence, ABS_DIFF)]
    margin = margins.logprob_abs_diff_difference
    by_difference = _judge_mean(evidence, ABS_DIFF, differences, margin, DIFFERENCE, show=lambda difference: difference)
    if above := _above_cap(evidence):
        return replace(by_difference, status=GateStatus.FAILED, detail=above)
    by_ratio = _judge_ratio(evidence, ABS_DIFF, margins.logprob_abs_diff_ratio)
    return min(by_ratio, by_difference, key=lambda gate: LENIENT_FIRST.index(gate.status))


def _above_cap(evidence: Evidence) -> str:
    """Return which pair's enabled variant is farthest above the cap, or an empty text."""
    cap = evidence.measure.margins.logprob_abs_diff_cap
    worst, found = cap, ""
    for pair in evidence.scored:
        item = pair.metric(ABS_DIFF)
        if item is None or item.second is None or item.second <= worst:
            continue
        is_baseline_above = (item.first or 0) > cap
        # A session trains one policy: if the baseline's mean exceeds the cap too, enabled is not the cause.
        if is_baseline_above and evidence.is_crossover:
            continue
        worst = item.second
        found = f"the mean of enabled is {format_number(worst)} in {evidence.unit} {pair.pair}, above the cap {cap:g}"
        found += ", as is the mean of baseline" if is_baseline_above else ""
    return found


def _length_gate(evidence: Evidence) -> Gate:
    if evidence.lane != "live" or evidence.is_crossover:
        return _stored_gate(evidence, RESPONSE_LENGTH)
    # Longer and shorter responses both change the step time.
    ratio = 1 + evidence.measure.margins.response_length_pct / 100
    return _judge_ratio(evidence, RESPONSE_LENGTH, ratio, is_two_sided=True)


def _list_sides(evidence: Evidence, metric: str) -> list[tuple[float, float]]:
    """Return the values of baseline and enabled of each scored pair that has both."""
    items = [pair.metric(metric) for pair in evidence.scored]
    return [
        (item.first, item.second)
        for item in items
        if item is not None and item.first is not None and item.second is not None
    ]


def _judge_ratio(evidence: Evidence, name: str, ratio: float, *, is_two_sided: bool = False) -> Gate:
    log_ratios = list_log_ratios(evidence.scored, name)
    return _judge_mean(evidence, name, log_ratios, math.log(ratio), RATIO, is_two_sided=is_two_sided)


def _judge_mean(
    evidence: Evidence,
    name: str,
    values: Sequence[float],
    margin: float,
    what: str,
    *,
    show: Callable[[float], float] = to_ratio,
    is_two_sided: bool = False,
) -> Gate:
    """Compare the mean degradation with the margin; ``show`` turns a degradation into what the gate shows.

    The values are of scored sessions or pairs, but of ``control_blocks`` each is one block's.
    Of a metric of which neither more nor less is better, the worse side is judged, so both are within the margin.
    """
    alpha, is_of_blocks = evidence.measure.alpha, name == CONTROL_BLOCKS
    find_interval = trimmed_interval if is_of_blocks else t_interval
    sign = _find_worse_side(values, find_interval(values, 1 - 2 * alpha), margin) if is_two_sided else 1
    degradations = [sign * value for value in values]
    num_tests = 2 * NUM_MEASURED_GATES if is_two_sided else NUM_MEASURED_GATES
    n = len(degradations)
    unit, num_scored = ("control block", n) if is_of_blocks else (evidence.unit, len(evidence.scored))
    passing = find_interval(degradations, 1 - 2 * alpha)
    # Bonferroni: alpha is divided by the number of tests, so that any gate fails by chance in at most alpha of runs.
    failing = find_interval(degradations, 1 - 2 * alpha / num_tests)
    if passing is None or failing is None:
        gate = _choose(
            name,
            n,
            (n, GateStatus.UNDECIDED, f"{what} has 1 {unit}, which gives no bound"),
            (num_scored, GateStatus.UNDECIDED, f"{what} is not recorded"),
            (True, GateStatus.UNDECIDED, f"{what} has no scored {unit}"),
        )
        estimate = show(sign * degradations[0]) if n else None
        return replace(gate, estimate=estimate, margin=show(sign * margin))
    advice = _advice(passing, margin, alpha, unit)
    comparable = f"{what} is comparable in only {n} of {num_scored} scored {unit}s"
    gate = _choose(
        name,
        n,
        (failing.low > margin, GateStatus.FAILED, f"{what} is shown to be beyond the margin"),
        (passing.high > margin, GateStatus.UNDECIDED, f"{what} may be beyond the margin{advice}"),
        (n < num_scored, GateStatus.UNDECIDED, comparable),
        (True, GateStatus.PASSED, f"{what} is within the margin"),
    )
    low, high = sorted((show(sign * failing.low), show(sign * passing.high)))
    return replace(gate, estimate=show(sign * passing.estimate), low=low, high=high, margin=show(sign * margin))


def _find_worse_side(values: Sequence[float], bounds: Interval | None, margin: float) -> int:
    """Return the sign of the mean, or the other one if only the bound there is beyond the margin.

    One stalled block can draw the mean of control blocks, but not their trimmed mean, to the wrong side.
    """
    sign = 1 if values and mean(values) >= 0 else -1
    if bounds is None:
        return sign
    ends = {1: bounds.high, -1: -bounds.low}
    return -sign if ends[sign] <= margin < ends[-sign] else sign


def _advice(interval: Interval, margin: float, alpha: float, unit: str) -> str:
    if margin <= 0:
        return ""
    needed = pairs_to_decide(interval.stdev, margin, alpha)
    if needed is None:
        return f"; more than 200 {unit}s would be needed to decide at this spread"
    return f"; about {needed} {unit}s would decide at this spread" if needed > interval.n else ""


def _stored_gate(evidence: Evidence, name: str) -> Gate:
    given = GIVEN_TO_BOTH.get(evidence.workload, "both variants train on the same stored rollouts")
    detail = ONE_POLICY if evidence.lane == "live" else given
    return plain_gate(name, GateStatus.NOT_APPLICABLE, detail, 0)


def _manifests_gate(evidence: Evidence) -> Gate:
    blocking = [item.where for item in evidence.differences if item.level is Level.BLOCKING]
    missing = name_some(evidence.missing)
    return _choose(
        MANIFESTS,
        len(evidence.scored),
        (blocking, GateStatus.FAILED, f"the variants differ in {name_some(blocking)}"),
        (missing, GateStatus.UNDECIDED, f"the variants were not compared; missing: {missing}"),
        (evidence.is_crossover, GateStatus.PASSED, "the same processes ran both variants"),
        (True, GateStatus.PASSED, "the variants are equal outside the declared switches"),
    )


def _steps_gate(evidence: Evidence) -> Gate:
    expected, n = evidence.measure.scored_steps, len(evidence.scored)
    short = []
    for name in evidence.scored_trials:
        summary = evidence.trials[name].summary(STEP_TIME)
        found = 0 if summary is None else summary.n
        if found != expected:
            short.append(f"{name} ({found} of {expected})")
    return _choose(
        STEPS,
        n,
        (not n, GateStatus.UNDECIDED, "no scored pair"),
        (short, GateStatus.FAILED, f"scored steps missing in {name_some(short)}"),
        (True, GateStatus.PASSED, f"every trial has all {expected} scored steps"),
    )


def _active_gate(evidence: Evidence) -> Gate:
    serving, unit, n = evidence.serving, evidence.unit, len(evidence.scored)
    if evidence.switch:
        detail = f"the variants differ in {evidence.switch}; neither uses RL-Kernel"
        return plain_gate(ACTIVE, GateStatus.NOT_APPLICABLE, detail, 0)
    finished = [pair for pair in evidence.comparisons if pair.status is not PairStatus.DROPPED]
    by_proof = group((evidence.proof(pair), pair.pair) for pair in evidence.scored or finished)
    refuted = by_proof.get(ProofStatus.FALLBACK, []) + by_proof.get(ProofStatus.NOT_REQUESTED, [])
    missing = by_proof.get(ProofStatus.MISSING, [])
    native = "RL-Kernel's operators ran as plain PyTorch, so this run supports no verdict on speed"
    verb = "are" if " and " in serving else "is"
    return _choose(
        ACTIVE,
        n,
        (refuted, GateStatus.FAILED, f"{serving} did not run, or not everywhere, in {name_some(refuted)}"),
        (missing, GateStatus.UNDECIDED, f"no proof that {serving} ran in {name_some(missing)}"),
        (ProofStatus.NATIVE in by_proof, GateStatus.UNDECIDED, native),
        (not n, GateStatus.UNDECIDED, f"no scored {unit}"),
        (True, GateStatus.PASSED, f"{serving} {verb} proved to run in every scored {unit}"),
    )


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
    return plain_gate(BLOCKS, GateStatus.UNDECIDED if few or too_many or not n else GateStatus.PASSED, detail, n)


def _control_blocks_gate(evidence: Evidence) -> Gate:
    if not evidence.measure.control_blocks:
        return plain_gate(CONTROL_BLOCKS, evidence.not_planned, NO_CONTROL_BLOCK, 0)
    found = evidence.blocks_of(is_control=True)
    values = [block.log_ratio for block in found if block.log_ratio is not None and not block.reason]
    if len(values) < MIN_BLOCKS:
        detail = f"{len(values)} control blocks found in all sessions, {MIN_BLOCKS} are needed"
        return plain_gate(CONTROL_BLOCKS, GateStatus.UNDECIDED, detail, len(values))
    what = "trimmed mean ratio B / A of the baseline's periods"
    return _judge_mean(evidence, CONTROL_BLOCKS, values, _find_session_margin(evidence), what, is_two_sided=True)


def _carry_over_gate(evidence: Evidence) -> Gate:
    """Judge periods of one step, whose first step after a change of the variant is scored."""
    if evidence.measure.control_blocks < LEAST_CONTROL_BLOCKS:
        detail = f"periods of one step need {LEAST_CONTROL_BLOCKS} control blocks in a session"
        return plain_gate(CARRIED, GateStatus.UNDECIDED, detail, 0)
    what = "mean ratio of a first step after a change to the next step, enabled / baseline"
    log_ratios = list_log_ratios(evidence.scored, CARRY_OVER)
    return _judge_mean(evidence, CARRIED, log_ratios, _find_session_margin(evidence), what, is_two_sided=True)


def _training_gate(evidence: Evidence) -> Gate:
    n = len(evidence.scored)
    if evidence.workload in GIVEN_TO_BOTH:
        return plain_gate(TRAINING, GateStatus.NOT_APPLICABLE, "this workload updates no weights", 0)
    rows: list[tuple[object, GateStatus, str]] = []
    for metric, what, how in (
        (RAW_REWARD, "rewards", "the same in every scored step"),
        (GRADIENT, "gradients", "zero in most scored steps"),
    ):
        missing, still = [], []
        for name in evidence.scored_trials:
            item = evidence.trials[name].summary(metric)
            if item is None or item.n < 2:
                missing.append(name)
            elif item.minimum == item.maximum if metric == RAW_REWARD else item.median <= 0:
                still.append(name)
        few = f"fewer than 2 scored steps have {what} in {name_some(missing)}"
        rows.append((missing, GateStatus.UNDECIDED, few))
        stuck = f"training did not move: {what} are {how} in {name_some(still)}"
        rows.append((still, GateStatus.FAILED, stuck))
    rows.sort(key=lambda row: row[1] is not GateStatus.FAILED)
    rows.append((not n, GateStatus.UNDECIDED, f"no scored {evidence.unit}"))
    moved = "rewards differ between steps, and gradients are not zero"
    return _choose(TRAINING, n, *rows, (True, GateStatus.PASSED, moved))


def _find_session_margin(evidence: Evidence) -> float:
    """Return the smallest effect of interest, or the distance of the step time's interval from 0 if that is larger."""
    interval = t_interval(list_log_ratios(evidence.scored, STEP_TIME), 1 - evidence.measure.alpha)
    nearest = 0.0 if interval is None else max(0.0, interval.low, -interval.high)
    noise = evidence.noise.get(STEP_TIME) if evidence.measure.rules > 2 else None
    if interval is not None and noise is not None:  # sessions that agree by luck must not widen the margin
        nearest = min(nearest, max(0.0, abs(interval.estimate) - noise.half_width(1 - evidence.measure.alpha)))
    return max(math.log1p(evidence.measure.smallest_effect_pct / 100), nearest)


def _units_gate(evidence: Evidence) -> Gate:
    planned, n = evidence.num_planned, len(evidence.scored)
    if evidence.is_crossover:  # a session without a count of tokens has no adjusted effect
        n = len(list_log_ratios(evidence.scored, STEP_TIME))
    detail = f"{n} of {count(planned, f'planned {evidence.unit}')} scored"
    too_many = planned - n > evidence.measure.max_dropped_fraction * planned
    status = GateStatus.UNDECIDED if too_many or not n else GateStatus.PASSED
    if too_many:
        detail += f", at most {100 * evidence.measure.max_dropped_fraction:g} % may be lost"
    controls = 0 if evidence.is_crossover else evidence.measure.control_pairs
    num_controls = len(evidence.controls) - len(evidence.fallen_back)
    if controls - num_controls > evidence.measure.max_dropped_fraction * controls:
        status = GateStatus.UNDECIDED
        detail += f"; {num_controls} of {count(controls, 'planned control pair')} scored"
    return plain_gate(SESSIONS if evidence.is_crossover else PAIRS, status, detail, n)
