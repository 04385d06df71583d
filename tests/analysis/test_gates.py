"""Every gate can pass, fails only where inferiority is shown, and says why it is undecided."""

from __future__ import annotations

import math
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.results import Gate, GateStatus, PairStatus, ProofStatus
from tests.support.judged_pairs import MEASURE, MadePair, around, change, judge_pairs, make_pair, make_pairs

PASSED, FAILED, UNDECIDED, NOT_APPLICABLE, NOT_PLANNED = GateStatus
OFFSETS = (-0.002, 0.002, -0.001, 0.001, -0.003, 0.003)


def find_gate(name: str, pairs: list[MadePair], **options: object) -> Gate:
    return next(gate for gate in judge_pairs(pairs, **options).gates if gate.name == name)  # type: ignore[arg-type]


def with_levels(metric: str, *levels: float) -> list[MadePair]:
    return [make_pair(f"p{i + 1}", **{metric: level}) for i, level in enumerate(levels)]  # type: ignore[arg-type]


def test_all_gates_pass_for_equal_variants() -> None:
    gates = judge_pairs(make_pairs(*around(1.0))).gates
    assert {gate.name: gate.status for gate in gates} == dict.fromkeys(
        (
            "raw_reward",
            "train_rollout_logprob_abs_diff",
            "peak_memory_bytes",
            "response_length_mean",
            "manifests",
            "steps",
            "rl_kernel_active",
            "pairs",
        ),
        PASSED,
    )


@pytest.mark.parametrize(
    ("drop", "spread", "status"),
    [
        (0.0, 1.0, PASSED),
        (-0.3, 1.0, PASSED),
        (0.007, 1.0, PASSED),
        (0.009, 1.0, UNDECIDED),
        (0.05, 1.0, FAILED),
        (0.05, 40.0, UNDECIDED),
        (0.0, 20.0, UNDECIDED),
    ],
)
def test_reward_is_compared_with_an_absolute_margin(drop: float, spread: float, status: GateStatus) -> None:
    gate = find_gate("raw_reward", with_levels("raw_reward", *(0.5 - drop + spread * x for x in OFFSETS)))
    assert gate.status is status
    assert gate.margin == -0.01
    assert gate.estimate == pytest.approx(-drop)


def test_a_gate_passes_at_95_percent_and_fails_at_more() -> None:
    from scipy.stats import t

    drops = [0.01 + x for x in OFFSETS]
    gate = find_gate("raw_reward", with_levels("raw_reward", *(0.5 - drop for drop in drops)))
    error = stdev(drops) / math.sqrt(6)
    assert gate.low == pytest.approx(-(0.01 + float(t.ppf(0.95, 5)) * error))
    assert gate.high == pytest.approx(-(0.01 - float(t.ppf(1 - 0.05 / 4, 5)) * error))


@pytest.mark.parametrize(("excess", "status"), [(0.98, UNDECIDED), (1.02, FAILED)])
def test_a_failure_is_shown_at_the_confidence_shared_by_the_gates(excess: float, status: GateStatus) -> None:
    from scipy.stats import t

    error = stdev(OFFSETS) / math.sqrt(6)
    drop = 0.01 + excess * float(t.ppf(1 - 0.05 / 4, 5)) * error
    assert find_gate("raw_reward", with_levels("raw_reward", *(0.5 - drop + x for x in OFFSETS))).status is status
    ratio = math.log(1.02) + excess * float(t.ppf(1 - 0.05 / 8, 5)) * error
    lengths = [1500 * math.exp(ratio + x) for x in OFFSETS]
    assert find_gate("response_length_mean", with_levels("response_length_mean", *lengths)).status is status


def test_without_rollout_log_probs_the_agreement_gate_does_not_apply() -> None:
    pairs = make_pairs(*around(1.0), train_rollout_logprob_abs_diff=None)
    gate = find_gate("train_rollout_logprob_abs_diff", pairs, lane="train-only", has_rollout_log_probs=False)
    assert (gate.status, gate.detail) == (NOT_APPLICABLE, "these rollouts hold no log-probs")


@pytest.mark.parametrize("lane", ["fixed-rollout", "train-only"])
def test_rewards_and_lengths_do_not_apply_to_stored_rollouts(lane: str) -> None:
    pairs = make_pairs(*around(1.0), raw_reward=0.1, response_length_mean=3000.0)
    for name in ("raw_reward", "response_length_mean"):
        gate = find_gate(name, pairs, lane=lane)
        assert (gate.status, gate.detail) == (NOT_APPLICABLE, "both variants train on the same stored rollouts")


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
    assert (
        find_gate("train_rollout_logprob_abs_diff", with_levels("train_rollout_logprob_abs_diff", *levels)).status
        is status
    )


def test_one_pair_above_the_cap_fails_log_prob_agreement() -> None:
    pairs = with_levels("train_rollout_logprob_abs_diff", 0.01, 0.01, 0.01, 0.31, 0.01, 0.01)
    gate = find_gate("train_rollout_logprob_abs_diff", pairs)
    assert (gate.status, gate.detail) == (FAILED, "the mean of enabled is 0.31 in pair p4, above the cap 0.1")


@pytest.mark.parametrize(
    ("ratio", "status"),
    [(1.0, PASSED), (1.01, PASSED), (0.99, PASSED), (1.05, FAILED), (0.95, FAILED), (1.02, UNDECIDED)],
)
def test_longer_or_shorter_responses_fail_the_gate(ratio: float, status: GateStatus) -> None:
    gate = find_gate(
        "response_length_mean", with_levels("response_length_mean", *(1500 * (ratio + x) for x in OFFSETS))
    )
    assert gate.status is status
    assert gate.estimate is not None
    assert gate.margin == pytest.approx(1.02 if gate.estimate >= 1 else 1 / 1.02)


@given(st.lists(st.floats(0.8, 1.25), min_size=6, max_size=6))
def test_longer_and_shorter_responses_are_judged_alike(ratios: list[float]) -> None:
    longer = find_gate("response_length_mean", with_levels("response_length_mean", *(1500 * x for x in ratios)))
    shorter = find_gate("response_length_mean", with_levels("response_length_mean", *(1500 / x for x in ratios)))
    assert longer.status is shorter.status


@pytest.mark.parametrize("metric", ["raw_reward", "train_rollout_logprob_abs_diff", "peak_memory_bytes"])
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
    ("differences", "status", "detail"),
    [
        (None, UNDECIDED, "the variants were not compared"),
        ((), PASSED, "the variants are equal outside the declared switches"),
        (
            (Finding(Level.WARNING, "host.kernel", "6.8", "6.9"),),
            PASSED,
            "the variants are equal outside the declared switches",
        ),
        (
            tuple(Finding(Level.BLOCKING, f"gpu.{i}", "a", "b") for i in range(5)),
            FAILED,
            "the variants differ in gpu.0, gpu.1, gpu.2 and 2 more",
        ),
    ],
)
def test_manifests_must_be_equal(differences: tuple[Finding, ...] | None, status: GateStatus, detail: str) -> None:
    gate = find_gate("manifests", make_pairs(*around(1.0)), differences=differences)
    assert (gate.status, gate.detail) == (status, detail)


def test_every_scored_step_must_be_recorded() -> None:
    pairs = [*make_pairs(*around(1.0)[1:]), make_pair("x", steps={"step_time_s": [60.0, math.nan, 60.0]})]
    gate = find_gate("steps", pairs)
    assert (gate.status, gate.detail) == (FAILED, "scored steps missing in x-enabled (2 of 3)")


@pytest.mark.parametrize(
    ("proof", "status", "detail"),
    [
        (ProofStatus.PROVED, PASSED, "RL-Kernel is proved to run in every scored pair"),
        (
            ProofStatus.NATIVE,
            UNDECIDED,
            "RL-Kernel's operators ran as plain PyTorch, so this run supports no verdict on speed",
        ),
        (ProofStatus.MISSING, UNDECIDED, "no proof that RL-Kernel ran in p1, p2, p3 and 3 more"),
        (ProofStatus.FALLBACK, FAILED, "RL-Kernel did not run, or not everywhere, in p1, p2, p3 and 3 more"),
        (ProofStatus.NOT_REQUESTED, FAILED, "RL-Kernel did not run, or not everywhere, in p1, p2, p3 and 3 more"),
    ],
)
def test_rl_kernel_must_be_proved(proof: ProofStatus, status: GateStatus, detail: str) -> None:
    gate = find_gate("rl_kernel_active", make_pairs(*around(1.0), proof=proof))
    assert (gate.status, gate.detail) == (status, detail)


@pytest.mark.parametrize(("num_lost", "status"), [(0, PASSED), (2, PASSED), (3, UNDECIDED), (10, UNDECIDED)])
def test_more_than_a_fifth_of_the_pairs_lost_is_undecided(num_lost: int, status: GateStatus) -> None:
    measure = MEASURE.model_copy(update={"pairs": 10})
    pairs = make_pairs(*[1.0] * 10)
    pairs[:num_lost] = [change(pair, status=PairStatus.DROPPED, reason="lost") for pair in pairs[:num_lost]]
    gate = find_gate("pairs", pairs, measure=measure)
    assert gate.status is status
    more = ", at most 20 % may be lost" if num_lost > 2 else ""
    assert gate.detail == f"{10 - num_lost} of 10 planned pairs scored{more}"


def test_pairs_that_never_started_count_as_lost() -> None:
    gate = find_gate("pairs", make_pairs(*[1.0] * 6), measure=MEASURE.model_copy(update={"pairs": 8}))
    assert (gate.status, gate.detail) == (UNDECIDED, "6 of 8 planned pairs scored, at most 20 % may be lost")
