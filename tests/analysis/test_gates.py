"""Every gate can pass, fails only where inferiority is shown, and says why it is undecided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import stdev

import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from rlk_repro.analysis.evidence import plain_gate
from rlk_repro.analysis.gates import CARRIED, TRAINING, _find_worse_side, make_gates
from rlk_repro.analysis.sessions import ADJUSTED, Session, compare_sessions, find_slopes, make_session
from rlk_repro.analysis.verdict import OVERRIDDEN, judge
from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Trial
from rlk_repro.rundir.results import Gate, GateStatus, PairStatus, ProofStatus, count_gates
from rlk_repro.schedule import make_schedule
from rlk_repro.spec import Measure
from rlk_repro.statistics.crossover import BlockNoise, trimmed_interval
from rlk_repro.statistics.stats import ENERGY, MEAN_STEP_TIME, STEP_TIME, UNADJUSTED, t_p_value
from tests.support.judged_pairs import (
    MEASURE,
    MadePair,
    around,
    change,
    gather_sessions,
    judge_pairs,
    make_controls,
    make_pair,
    make_pairs,
    make_whole,
)

PASSED, FAILED, UNDECIDED, NOT_APPLICABLE, NOT_PLANNED = GateStatus
AGREEMENT = "train_rollout_logprob_abs_diff"
OFFSETS = (-0.002, 0.002, -0.001, 0.001, -0.003, 0.003)


def find_gate(name: str, pairs: list[MadePair], **options: object) -> Gate:
    return next(gate for gate in judge_pairs(pairs, **options).gates if gate.name == name)  # type: ignore[arg-type]


def with_levels(metric: str, *levels: float) -> list[MadePair]:
    return [make_pair(f"p{i + 1}", **{metric: level}) for i, level in enumerate(levels)]  # type: ignore[arg-type]


def test_all_gates_pass_for_equal_variants() -> None:
    gates = judge_pairs(make_pairs(*around(1.0))).gates
    names = (
        *("raw_reward", AGREEMENT, "peak_memory_bytes", "response_length_mean"),
        *("manifests", "steps", "rl_kernel_active", "pairs"),
    )
    assert {gate.name: gate.status for gate in gates} == dict.fromkeys(names, PASSED)


@pytest.mark.parametrize(
    ("drop", "spread", "status"),
    [(-0.3, 1.0, PASSED), (0.007, 1.0, PASSED), (0.009, 1.0, UNDECIDED), (0.05, 1.0, FAILED), (0.05, 40.0, UNDECIDED)],
)
def test_reward_is_compared_with_an_absolute_margin(drop: float, spread: float, status: GateStatus) -> None:
    gate = find_gate("raw_reward", with_levels("raw_reward", *(0.5 - drop + spread * x for x in OFFSETS)))
    assert (gate.status, gate.margin) == (status, -0.01)
    assert gate.estimate == pytest.approx(-drop)


def test_a_gate_passes_at_95_percent_and_fails_at_more() -> None:
    drops = [0.01 + x for x in OFFSETS]
    gate = find_gate("raw_reward", with_levels("raw_reward", *(0.5 - drop for drop in drops)))
    error = stdev(drops) / math.sqrt(6)
    assert gate.low == pytest.approx(-(0.01 + t_quantile(0.95) * error))
    assert gate.high == pytest.approx(-(0.01 - t_quantile(1 - 0.05 / 4) * error))


def t_quantile(probability: float) -> float:
    return float(scipy.stats.t.ppf(probability, 5))


@pytest.mark.parametrize(("excess", "status"), [(0.98, UNDECIDED), (1.02, FAILED)])
def test_a_failure_is_shown_at_the_confidence_shared_by_the_gates(excess: float, status: GateStatus) -> None:
    error = stdev(OFFSETS) / math.sqrt(6)
    drop = 0.01 + excess * t_quantile(1 - 0.05 / 4) * error
    rewards = with_levels("raw_reward", *(0.5 - drop + x for x in OFFSETS))
    assert find_gate("raw_reward", rewards).status is status
    ratio = math.log(1.02) + excess * t_quantile(1 - 0.05 / 8) * error
    lengths = with_levels("response_length_mean", *(1500 * math.exp(ratio + x) for x in OFFSETS))
    assert find_gate("response_length_mean", lengths).status is status


@pytest.mark.parametrize(
    ("name", "options", "detail"),
    [
        (AGREEMENT, {"has_rollout_log_probs": False}, "these rollouts hold no log-probs"),
        ("raw_reward", {}, "both variants train on the same stored rollouts"),
        ("response_length_mean", {}, "both variants train on the same stored rollouts"),
    ],
)
def test_gates_that_do_not_apply_to_stored_rollouts(name: str, options: dict[str, bool], detail: str) -> None:
    pairs = make_pairs(*around(1.0), raw_reward=0.1, response_length_mean=3000.0)
    gate = find_gate(name, pairs, lane="train-only", **options)
    assert (gate.status, gate.detail) == (NOT_APPLICABLE, detail)


@pytest.mark.parametrize(
    ("levels", "status"),
    [
        ((0.0102, 0.0103, 0.0101, 0.0102, 0.0103, 0.0101), PASSED),  # ratio 1.02
        ((0.0107, 0.0108, 0.0106, 0.0107, 0.0108, 0.0106), PASSED),  # ratio 1.07, difference 7e-4
        ((0.0130, 0.0131, 0.0129, 0.0130, 0.0131, 0.0129), FAILED),
        ((0.0060, 0.0180, 0.0070, 0.0150, 0.0090, 0.0140), UNDECIDED),
    ],
)
def test_log_prob_agreement_is_worse_only_by_ratio_and_difference(levels: list[float], status: GateStatus) -> None:
    assert find_gate(AGREEMENT, with_levels(AGREEMENT, *levels)).status is status


def test_one_pair_above_the_cap_fails_log_prob_agreement() -> None:
    gate = find_gate(AGREEMENT, with_levels(AGREEMENT, 0.01, 0.01, 0.01, 0.31, 0.01, 0.01))
    assert (gate.status, gate.detail) == (FAILED, "the mean of enabled is 0.31 in pair p4, above the cap 0.1")


@pytest.mark.parametrize(
    ("ratio", "status"), [(1.01, PASSED), (0.99, PASSED), (1.05, FAILED), (0.95, FAILED), (1.02, UNDECIDED)]
)
def test_longer_or_shorter_responses_fail_the_gate(ratio: float, status: GateStatus) -> None:
    lengths = (1500 * (ratio + x) for x in OFFSETS)
    gate = find_gate("response_length_mean", with_levels("response_length_mean", *lengths))
    assert gate.status is status
    assert gate.estimate is not None
    assert gate.margin == pytest.approx(1.02 if gate.estimate >= 1 else 1 / 1.02)


def test_a_gate_of_two_sides_without_a_pair_shows_the_lower_margin_as_sealed_bundles_do() -> None:
    assert find_gate("response_length_mean", []).margin == pytest.approx(1 / 1.02)


@given(st.lists(st.floats(0.8, 1.25), min_size=6, max_size=6))
def test_longer_and_shorter_responses_are_judged_alike(ratios: list[float]) -> None:
    longer = find_gate("response_length_mean", with_levels("response_length_mean", *(1500 * x for x in ratios)))
    ends = [end for end in (longer.low, longer.high) if end is not None]
    assume(all(abs(end - at) > 1e-9 for end in ends for at in (1.02, 1 / 1.02)))  # at a margin, rounding decides
    shorter = find_gate("response_length_mean", with_levels("response_length_mean", *(1500 / x for x in ratios)))
    assert longer.status is shorter.status


@pytest.mark.parametrize("metric", ["raw_reward", AGREEMENT, "peak_memory_bytes"])
def test_a_gate_on_a_missing_metric_is_undecided(metric: str) -> None:
    gate = find_gate(metric, make_pairs(*around(1.0), without=(metric,)))
    assert (gate.status, gate.n, gate.estimate) == (UNDECIDED, 0, None)
    assert gate.detail.endswith(" is not recorded")


def test_a_metric_of_only_some_pairs_may_fail_but_not_pass() -> None:
    rest = make_pairs(*around(1.0)[1:])
    lost = change(make_pair("x", without=("raw_reward",)))
    gate = find_gate("raw_reward", [lost, *rest])
    assert (gate.status, gate.n) == (UNDECIDED, 5)
    assert gate.detail == "mean difference enabled - baseline is comparable in only 5 of 6 scored pairs"
    assert find_gate("raw_reward", [lost, *with_levels("raw_reward", *[0.4] * 5)]).status is FAILED


@pytest.mark.parametrize(
    ("level", "number", "status", "detail"),
    [
        (Level.WARNING, 1, PASSED, "the variants are equal outside the declared switches"),
        (Level.BLOCKING, 5, FAILED, "the variants differ in gpu.0, gpu.1, gpu.2 and 2 more"),
    ],
)
def test_manifests_must_be_equal(level: Level, number: int, status: GateStatus, detail: str) -> None:
    differences = tuple(Finding(level, f"gpu.{index}", "a", "b") for index in range(number))
    gate = find_gate("manifests", make_pairs(*around(1.0)), differences=differences)
    assert (gate.status, gate.detail) == (status, detail)


def test_every_scored_step_must_be_recorded() -> None:
    pairs = [*make_pairs(*around(1.0)[1:]), make_pair("x", steps={"step_time_s": [60.0, math.nan, 60.0]})]
    gate = find_gate("steps", pairs)
    assert (gate.status, gate.detail) == (FAILED, "scored steps missing in x-enabled (2 of 3)")


NOT_RUN = "RL-Kernel did not run, or not everywhere, in p1, p2, p3 and 3 more"


@pytest.mark.parametrize(
    ("proof", "status", "detail"),
    [
        (ProofStatus.PROVED, PASSED, "RL-Kernel is proved to run in every scored pair"),
        (ProofStatus.NATIVE, UNDECIDED,
         "RL-Kernel's operators ran as plain PyTorch, so this run supports no verdict on speed"),
        (ProofStatus.MISSING, UNDECIDED, "no proof that RL-Kernel ran in p1, p2, p3 and 3 more"),
        (ProofStatus.FALLBACK, FAILED, NOT_RUN),
        (ProofStatus.NOT_REQUESTED, FAILED, NOT_RUN),
    ],
)  # fmt: skip
def test_rl_kernel_must_be_proved(proof: ProofStatus, status: GateStatus, detail: str) -> None:
    gate = find_gate("rl_kernel_active", make_pairs(*around(1.0), proof=proof))
    assert (gate.status, gate.detail) == (status, detail)


@pytest.mark.parametrize(
    ("num_planned", "num_lost", "status"),
    [(10, 2, PASSED), (10, 3, UNDECIDED), (10, 10, UNDECIDED), (13, 0, UNDECIDED)],
)
def test_more_than_a_fifth_of_the_pairs_lost_is_undecided(num_planned: int, num_lost: int, status: GateStatus) -> None:
    """Pairs that never started count as lost."""
    pairs = make_pairs(*[1.0] * 10)
    pairs[:num_lost] = [change(pair, status=PairStatus.DROPPED, reason="lost") for pair in pairs[:num_lost]]
    gate = find_gate("pairs", pairs, measure=MEASURE.model_copy(update={"pairs": num_planned}))
    more = ", at most 20 % may be lost" if status is UNDECIDED else ""
    assert (gate.status, gate.detail) == (status, f"{10 - num_lost} of {num_planned} planned pairs scored{more}")


def test_a_comparison_that_fell_back_stands_in_for_no_lost_control_pair() -> None:
    measure = MEASURE.model_copy(update={"pairs": 8, "control_pairs": 4})
    pairs, controls = make_pairs(*[1.0] * 8), make_controls(*[1.0] * 4)
    fallen = [change(pair, is_control=True, control_reason="enabled fell back everywhere") for pair in pairs[:1]]
    lost = [change(pair, status=PairStatus.DROPPED, reason="lost") for pair in controls[:1]]
    gate = find_gate("pairs", [*fallen, *pairs[1:], *lost, *controls[1:]], measure=measure)
    assert (gate.status, gate.detail.partition("; ")[2]) == (UNDECIDED, "3 of 4 planned control pairs scored")


# The rules that a plan has since version 2, each against the rule before.

RULES = Measure(**{**MEASURE.model_dump(), "rules": 2})
MOVING = {"raw_reward": (0.4, 0.5, 0.6), "grad_norm": (1.0, 0.0, 2.0)}


@pytest.mark.parametrize(
    ("steps", "workload", "status", "why"),
    [
        (MOVING, "vime", PASSED, "rewards differ"),
        ({**MOVING, "raw_reward": (0.5, 0.5, 0.5)}, "vime", FAILED, "rewards are the same"),
        ({**MOVING, "grad_norm": (0.0, 1.0, 0.0)}, "vime", FAILED, "gradients are zero"),
        ({"raw_reward": (0.4, 0.5, 0.6)}, "vime", UNDECIDED, "gradients in p1-baseline"),
        ({"raw_reward": (0.5,), "grad_norm": (0.0, 1.0, 0.0)}, "vime", FAILED, "gradients are zero"),
        ({}, "module", NOT_APPLICABLE, "updates no weights"),
    ],
)
def test_training_must_have_moved(
    steps: dict[str, Sequence[float]], workload: str, status: GateStatus, why: str
) -> None:
    pairs = [make_pair(f"p{number}", steps=steps) for number in range(1, 7)]
    moved = []
    for pair in pairs:
        first, second = pair.trials
        trials = (replace(second, name=first.name, variant=first.variant), second)
        moved.append(replace(pair, trials=trials))
    found = judge_pairs(moved, measure=RULES, workload=workload)
    gate = next(gate for gate in found.gates if gate.name == TRAINING)
    assert (gate.status, why in gate.detail) == (status, True)
    assert TRAINING not in [gate.name for gate in judge_pairs(pairs, workload=workload).gates]


def make_sessions(
    *,
    rules: int = 2,
    times: float = 5.0,
    carried: float = 0.0,
    tokens: Sequence[float] = (),
    power: float = 0.5,
    period_steps: int = 1,
    lane: str = "train-only",
) -> tuple[Measure, list[Session]]:
    """Return four sessions; ``carried`` shortens the first enabled step after a change, ``power`` is that of tokens."""
    measure = Measure(design="crossover", rules=rules, period_steps=period_steps)  # type: ignore[arg-type]
    sessions = []
    for place in range(4):
        schedule = make_schedule(measure, place)
        variants = [rollout.variant for rollout in schedule.rollouts]
        counts = [tokens[step % len(tokens)] if tokens else 1e5 for step in range(len(variants))]
        found = []
        for step, variant in enumerate(variants):
            is_first = step > 0 and variant == "enabled" != variants[step - 1]
            wobble = 1 + 0.001 * ((step * 7 + place) % 5)
            found.append(times * wobble * (1 - carried * is_first) * (counts[step] / 1e5) ** power)
        trial = Trial(index=place, pair=f"s{place + 1}", variant="crossover", is_control=False, seed=place)
        whole = make_whole(trial, found, counts, energy_j=[600 * value for value in found])
        sessions.append(make_session(trial, whole, schedule, {}, lane=lane, rules=rules))  # type: ignore[arg-type]
    return measure, sessions


@pytest.mark.parametrize(
    ("carried", "control_blocks", "status"),
    [(0.0, 2, PASSED), (0.02, 2, UNDECIDED), (0.06, 2, FAILED), (-0.06, 2, FAILED), (0.0, 1, UNDECIDED)],
)
def test_periods_of_one_step_need_control_blocks_and_no_carry_over(
    carried: float, control_blocks: int, status: GateStatus
) -> None:
    measure, sessions = make_sessions(carried=carried)
    planned = measure.model_copy(update={"control_blocks": control_blocks})
    gates = {gate.name: gate for gate in make_gates(gather_sessions(planned, sessions))}
    assert gates[CARRIED].status is status
    without = make_gates(gather_sessions(measure.model_copy(update={"control_blocks": 0}), sessions))
    assert NOT_PLANNED in {gate.status for gate in without if gate.name == "control_blocks"}


# of a run beside another one: with the stall of 12 % the mean is positive, the trimmed one negative
STALLED = (-0.0443, 0.0059, -0.0159, 0.1164, -0.0027, 0.0031, 0.0160, -0.0119)


@pytest.mark.parametrize("sign", [1, -1])
def test_one_stalled_block_does_not_hide_the_other_side_of_control_blocks(sign: int) -> None:
    values = [sign * value for value in STALLED]
    bounds = trimmed_interval(values, 0.9)
    assert [_find_worse_side(values, bounds, margin) for margin in (0.01, 0.0132, 0.02)] == [sign, -sign, sign]


@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=12), st.floats(0.001, 0.05))
def test_what_is_within_the_margin_on_the_judged_side_is_within_it_on_both(values: list[float], margin: float) -> None:
    bounds = trimmed_interval(values, 0.9)
    assert bounds is not None
    judged = bounds.high if _find_worse_side(values, bounds, margin) > 0 else -bounds.low
    assert (judged <= margin) == (max(bounds.high, -bounds.low) <= margin)


@pytest.mark.parametrize("rules", [2, 3])
def test_sessions_that_agree_by_luck_widen_no_margin(rules: int) -> None:
    """Sessions scatter less than the noise of blocks says: the interval has its floor, and so has the margin."""
    measure, sessions = make_sessions(rules=rules)
    evidence = gather_sessions(measure, sessions)
    saved = []
    for place, pair in enumerate(evidence.pairs):
        others = tuple(item for item in pair.metrics if item.metric != STEP_TIME)
        step = next(item for item in pair.metrics if item.metric == STEP_TIME)
        saved.append(replace(pair, metrics=(replace(step, log_ratio=-0.03 + 0.004 * (-1) ** place), *others)))
    noise = {STEP_TIME: BlockNoise(error=0.004, df=28)}
    found = judge(replace(evidence, pairs=saved, noise=noise), is_exploratory=False)
    gate = next(gate for gate in found.gates if gate.name == "control_blocks")
    effect = found.effects[0]
    assert effect.high is not None
    assert gate.margin is not None
    assert (abs(math.log(gate.margin)) <= -math.log(effect.high) + 1e-9) == (rules > 2)
    alone = t_p_value([item for pair in saved for item in [pair.metric(STEP_TIME).log_ratio]])  # type: ignore[union-attr,misc]
    assert (effect.p_t is not None and alone is not None and effect.p_t >= alone) == (rules > 2)


@pytest.mark.parametrize(("rules", "is_adjusted"), [(2, False), (3, True)])
def test_the_mean_step_time_of_live_sessions_is_adjusted_for_tokens(rules: int, is_adjusted: bool) -> None:
    """Equal variants, of whose rollouts one has up to 60 % more tokens than the other."""
    measure, sessions = make_sessions(rules=rules, tokens=(1e5, 1.3e5, 0.8e5), power=0.5, lane="live")
    found = [pair.metric(MEAN_STEP_TIME) for pair in gather_sessions(measure, sessions, "live").pairs]
    sizes = [abs(item.log_ratio) for item in found if item is not None and item.log_ratio is not None]
    assert len(sizes) == len(sessions)
    assert (max(sizes) < 0.01) == is_adjusted


def test_control_blocks_are_counted_as_blocks() -> None:
    """The plan has four sessions of two control blocks; one block is lost."""
    measure, sessions = make_sessions()
    evidence = gather_sessions(measure, sessions)
    first = next(block for block in evidence.blocks if block.is_control)
    lost = replace(first, log_ratio=None, reason="lost")
    blocks = [lost if block is first else block for block in evidence.blocks]
    gate = next(item for item in make_gates(replace(evidence, blocks=blocks)) if item.name == "control_blocks")
    assert (gate.status, gate.n) == (PASSED, 7)
    noisy = [replace(block, log_ratio=0.05 * (-1) ** place) for place, block in enumerate(blocks)]
    gate = next(item for item in make_gates(replace(evidence, blocks=noisy)) if item.name == "control_blocks")
    assert (gate.status, " control blocks would " in gate.detail) == (UNDECIDED, True)


def test_a_live_session_without_tokens_counts_as_lost() -> None:
    measure, sessions = make_sessions(lane="live", tokens=(1e5, 1.3e5, 0.8e5), power=0.5)
    evidence = gather_sessions(measure.model_copy(update={"sessions": 4}), sessions, "live")
    without = [
        replace(pair, metrics=tuple(item for item in pair.metrics if item.metric != STEP_TIME)) if not place else pair
        for place, pair in enumerate(evidence.pairs)
    ]
    gate = next(item for item in make_gates(replace(evidence, pairs=without)) if item.name == "sessions")
    assert (gate.status, gate.detail.partition(",")[0]) == (UNDECIDED, "3 of 4 planned sessions scored")


def test_older_rules_and_longer_periods_have_no_gate_on_carry_over() -> None:
    for options in ({"rules": 1}, {"period_steps": 2}):
        names = [gate.name for gate in make_gates(gather_sessions(*make_sessions(**options)))]  # type: ignore[arg-type]
        assert CARRIED not in names


@pytest.mark.parametrize(
    ("tokens", "power", "slope", "before"),
    [
        ((1e5, 1.3e5, 0.8e5), 0.5, 0.5, 0.5),
        ((1e5, 1.3e5, 0.8e5), -0.5, 0.0, -0.5),
        ((1e5, 1.3e5, 0.8e5), 1.7, 1.0, 1.7),
        ((1e5, 1.004e5, 0.999e5), 0.5, None, 0.5),
    ],
)
def test_a_slope_on_tokens_is_between_0_and_1_or_left_out(
    tokens: Sequence[float], power: float, slope: float | None, before: float
) -> None:
    for rules, expected in ((2, slope), (1, before)):
        _, sessions = make_sessions(rules=rules, tokens=tokens, power=power, period_steps=2, lane="live")
        found = find_slopes(sessions)
        if expected is None:
            assert found == {}
            assert all(pair.metric(UNADJUSTED) is None for pair in compare_sessions(sessions)[0])
        else:
            assert found[STEP_TIME] == pytest.approx(expected, abs=0.5 if rules == 1 and slope is None else 0.05)
            assert set(found) <= set(ADJUSTED)


@pytest.mark.parametrize(("times", "n"), [(0.3, 0), (0.99, 0), (1.01, 4)])
def test_energy_counts_only_over_scored_periods_of_a_second(times: float, n: int) -> None:
    effects = {item.metric: item for item in judge(gather_sessions(*make_sessions(times=times))).effects}
    assert effects[ENERGY].n == n
    assert ("1 s" in effects[ENERGY].note) is (n == 0)
    before = {item.metric: item for item in judge(gather_sessions(*make_sessions(times=times, rules=1))).effects}
    assert before[ENERGY].n == 4


def test_headline_and_reasons_count_the_gates() -> None:
    pairs = make_pairs(*around(0.9), steps=MOVING)
    found = judge_pairs(pairs, measure=RULES, lane="train-only", is_exploratory=True)
    counted = count_gates(found.gates)
    assert counted.startswith("6 of 9 gates passed, 1 failed (training_moved), 2 do not apply")
    assert found.verdict.headline.endswith(f"; {counted}")
    assert found.verdict.reasons[0] == OVERRIDDEN
    assert "every gate that applies passed" not in found.verdict.reasons


@pytest.mark.parametrize(
    ("status", "detail", "word"),
    [
        (NOT_APPLICABLE, "no control block was planned", "not planned"),
        (NOT_APPLICABLE, "both variants train on the same stored rollouts", "does not apply"),
        (NOT_PLANNED, "no shadow step was planned", "not planned"),
    ],
)
def test_reports_tell_what_does_not_apply_from_what_was_not_planned(status: GateStatus, detail: str, word: str) -> None:
    assert plain_gate("x", status, detail, 0).shown.word == word
