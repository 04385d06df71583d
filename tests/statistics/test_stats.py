"""The arithmetic agrees with scipy, numpy and brute force, and has the properties that verdicts rely on."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.statistics import power, stats
from rlk_repro.statistics.crossover import block_effect, common_slope, hodges_lehmann, randomisation_p, trimmed_interval
from rlk_repro.statistics.stats import t_quantile
from tests import ROOT
from tests.support.judged_pairs import make_pair

VALUES = st.lists(st.floats(-5, 5).map(lambda x: round(x, 6)), min_size=2, max_size=8)


@given(st.lists(st.floats(-1e6, 1e6), min_size=200, max_size=220))
@settings(max_examples=20)
def test_percentiles_are_numpys_linear_ones(values: list[float]) -> None:
    for percent in (50, 90, 99):
        expected = float(np.percentile(values, percent, method="linear"))
        found = stats.percentile(values, percent)
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize(("percent", "least"), [(90, 20), (99, 200)])
def test_percentiles_need_enough_steps(percent: int, least: int) -> None:
    assert stats.percentile([1.0] * (least - 1), percent) is None
    assert stats.percentile([1.0] * least, percent) == 1.0


def test_a_summary_counts_only_recorded_steps() -> None:
    summary = stats.summarise("step_time_s", [3.0, None, 1.0, math.nan, 2.0, math.inf])
    assert summary is not None
    found = (summary.n, summary.mean, summary.median, summary.stdev, summary.minimum, summary.maximum)
    assert found == (3, 2.0, 2.0, 1.0, 1.0, 3.0)
    assert (summary.p50, summary.p90, summary.p99) == (2.0, None, None)
    assert stats.summarise("step_time_s", [None, math.nan]) is None
    one = stats.summarise("step_time_s", [4.0])
    assert one is not None
    assert (one.n, one.median, one.stdev, one.num_outliers) == (1, 4.0, None, 0)


@pytest.mark.parametrize(("last", "number"), [(6.0, 0), (6.01, 1), (95.0, 1), (-2.01, 1)])
def test_outliers_beyond_the_fences_are_counted_and_kept(last: float, number: int) -> None:
    summary = stats.summarise("step_time_s", [0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, last])
    assert summary is not None
    assert (summary.num_outliers, summary.n) == (number, 9)
    assert last in (summary.minimum, summary.maximum)


def test_equal_values_have_no_spread_at_all() -> None:
    for value, n in itertools.product((0.1, 1 / 3, 59.7, 1e-9, 6.4e10), (2, 3, 6, 7, 49)):
        assert (stats.stdev([value] * n), stats.mean([value] * n)) == (0.0, value)
    interval = stats.t_interval([0.25] * 6, 0.95)
    assert interval is not None
    assert (interval.estimate, interval.low, interval.high, interval.stdev) == (0.25, 0.25, 0.25, 0.0)
    assert stats.t_p_value([0.25] * 6) is None
    assert stats.t_interval([0.25], 0.95) is None


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 11, 30, 63])
def test_t_quantiles_are_scipys(df: int) -> None:
    for confidence in (0.2, 0.9, 0.95, 0.975, 0.99, 0.999):
        expected = float(scipy.stats.t.ppf((1 + confidence) / 2, df))
        assert stats.t_quantile(confidence, df) == pytest.approx(expected, rel=1e-9)


@given(VALUES)
def test_the_interval_and_its_p_are_those_of_the_paired_t_test(values: list[float]) -> None:
    if stats.stdev(values) < 1e-3:
        return
    expected = scipy.stats.ttest_rel(values, [0.0] * len(values))
    bounds = expected.confidence_interval(0.95)
    interval = stats.t_interval(values, 0.95)
    assert interval is not None
    found = (interval.low, interval.high)
    assert found == pytest.approx((bounds.low, bounds.high), rel=1e-7, abs=1e-9)
    assert stats.t_p_value(values) == pytest.approx(max(1e-9, float(expected.pvalue)), abs=1e-8)


@given(VALUES)
def test_the_sign_flip_p_is_the_brute_force_one(values: list[float]) -> None:
    seen = abs(sum(values)) - 1e-9 * sum(map(abs, values))
    patterns = list(itertools.product((1, -1), repeat=len(values)))
    extreme = sum(abs(sum(s * v for s, v in zip(signs, values, strict=True))) >= seen for signs in patterns)
    assert stats.sign_flip_p(values) == extreme / len(patterns)


def test_the_sign_flip_p_has_a_floor_and_an_end() -> None:
    assert stats.sign_flip_p([0.01] * 6) == stats.sign_flip_floor(6) == 2 / 2**6
    assert stats.sign_flip_p([0.01] * 16) == stats.sign_flip_floor(16) == 2 / 2**16
    assert stats.sign_flip_p([0.0, 0.0]) == 1.0
    assert stats.sign_flip_p([0.01] * 17) is stats.sign_flip_floor(17) is None
    assert stats.sign_flip_p([]) is stats.sign_flip_floor(0) is None


def test_holm_steps_down_and_skips_what_is_missing() -> None:
    assert stats.holm([0.03, None, 0.01, 0.04]) == [0.06, None, 0.03, 0.06]
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]


@given(VALUES, st.randoms())
def test_swapping_the_variants_negates_the_effect_and_order_does_not_matter(values: list[float], random) -> None:
    shuffled = random.sample(values, len(values))
    effect = stats.paired_effect("step_time_s", values, role="primary", alpha=0.05)
    assert stats.paired_effect("step_time_s", shuffled, role="primary", alpha=0.05) == effect
    swapped = stats.paired_effect("step_time_s", [-value for value in values], role="primary", alpha=0.05)
    assert (swapped.p_value, swapped.p_t, swapped.sd_log) == (effect.p_value, effect.p_t, effect.sd_log)
    for one, other in ((effect.ratio, swapped.ratio), (effect.low, swapped.high), (effect.high, swapped.low)):
        assert one is not None
        assert other is not None
        assert math.log(one) == pytest.approx(-math.log(other), abs=1e-9)


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    effect = stats.paired_effect("step_time_s", [math.log(0.5)], role="primary", alpha=0.05)
    assert (effect.n, effect.ratio, effect.low, effect.high, effect.p_t) == (1, 0.5, None, None, None)
    assert stats.paired_effect("step_time_s", [], role="primary", alpha=0.05).ratio is None


def test_the_noise_floor_is_the_farther_end_of_the_control_interval() -> None:
    values = [0.01, -0.02, 0.005, -0.015]
    interval = stats.t_interval(values, 0.95)
    assert interval is not None
    floor = stats.noise_floor(values, alpha=0.05)
    assert floor.fraction == pytest.approx(math.exp(-interval.low) - 1)
    assert stats.noise_floor([-value for value in values], alpha=0.05) == floor
    assert floor.note == "farther end of the 95 % interval of 4 control pairs"
    for few, note in (([], "no control pairs: "), ([0.01], "1 control pair gives no interval: ")):
        floor = stats.noise_floor(few, alpha=0.05)
        assert (floor.is_measured, floor.fraction, floor.n) == (False, None, len(few))
        assert floor.note == f"{note}the noise floor was not measured"


def test_a_trial_is_represented_by_median_maximum_or_mean() -> None:
    steps = {"step_time_s": [60.0, 60.0, 600.0], "peak_memory_bytes": [1e9, 2e9, 3e9], "raw_reward": [-0.3, 0.0, 0.6]}
    pair = make_pair("p1", steps=steps).result
    found = {item.metric: item.second for item in pair.metrics}
    assert found["step_time_s"] == 60.0
    assert found["mean_step_time_s"] == 240.0
    assert found["peak_memory_bytes"] == 3e9
    assert found["raw_reward"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("steps", "first", "second"), [([0.5, math.nan, 0.5], None, None), ([0.0] * 3, 0.5, 0.0), ([-0.4] * 3, 0.5, -0.4)]
)
def test_unequal_numbers_of_steps_zero_and_negative_values_have_no_log_ratio(
    steps: list[float], first: float | None, second: float | None
) -> None:
    item = make_pair("p1", steps={"raw_reward": steps}).result.metric("raw_reward")
    assert item is not None
    assert (item.first, item.second, item.log_ratio) == (first, second, None)


def test_a_ratio_beyond_all_numbers_is_none() -> None:
    one, two = make_pair("p1", raw_reward=5e-324).trials
    item = next(item for item in stats.pair_metrics(two, one) if item.metric == "raw_reward")
    assert (item.first, item.second, item.log_ratio) == (5e-324, 0.5, None)


def test_a_ratio_of_absurd_values_is_a_finite_number_above_0() -> None:
    low, high = stats.to_ratio(-1400.0), stats.to_ratio(1400.0)
    assert 0 < low < 1e-300
    assert 1e300 < high < math.inf
    assert low * high == pytest.approx(1)


# The power of pairs agrees with scipy's noncentral t.


@pytest.mark.parametrize(("num_pairs", "effect"), [(6, 0.01), (6, 0.08), (12, 0.03), (40, 0.03)])
def test_power_is_scipys_noncentral_t(num_pairs: int, effect: float) -> None:
    shift = (math.log1p(effect) - math.log1p(0.01)) * math.sqrt(num_pairs) / 0.02
    critical = scipy.stats.t.ppf(0.975, num_pairs - 1)
    found = power.Design(num_pairs, 0.02, 0.01, 0.05, 0).power(math.log1p(effect))
    assert found == pytest.approx(float(scipy.stats.nct.sf(critical, num_pairs - 1, shift)), abs=1e-9)


@pytest.mark.parametrize(("num_pairs", "alpha", "target"), [(6, 0.05, 0.9), (9, 0.01, 0.8), (40, 0.05, 0.8)])
def test_the_smallest_effect_has_the_power_asked_for(num_pairs: int, alpha: float, target: float) -> None:
    effect = power.smallest_effect(num_pairs, 2.0, 1.0, alpha, target)
    assert effect is not None
    found = power.Design(num_pairs, 0.02, 0.01, alpha, 0).power(math.log1p(effect))
    assert found == pytest.approx(target, abs=1e-6)


def test_more_pairs_less_spread_and_less_power_show_smaller_effects() -> None:
    by_pairs = [power.smallest_effect(n, 2.0, 1.0, 0.05) or 0 for n in range(6, 41)]
    by_spread = [power.smallest_effect(6, sd, 1.0, 0.05) or 0 for sd in (0.5, 1, 2, 4)]
    by_power = [power.smallest_effect(6, 2.0, 1.0, 0.05, level) or 0 for level in (0.5, 0.8, 0.9, 0.99)]
    assert by_pairs == sorted(by_pairs, reverse=True)
    assert by_spread == sorted(by_spread)
    assert by_power == sorted(by_power)
    assert 0.01 < by_pairs[-1] < by_pairs[0] < 0.05


@pytest.mark.parametrize("num_pairs", [0, 1, 5])
def test_fewer_than_six_pairs_show_nothing(num_pairs: int) -> None:
    assert power.smallest_effect(num_pairs, 0.1, 1.0, 0.05) is None
    assert power.smallest_effect(40, 1e12, 1.0, 0.05) is None


def test_few_control_pairs_measure_a_high_noise_floor() -> None:
    effects = [power.smallest_effect(6, 2.0, 1.0, 0.05, num_control_pairs=n) or 0 for n in (0, 2, 12)]
    assert effects == pytest.approx([0.0443, 0.387, 0.0525], rel=0.01)


@pytest.mark.parametrize(("num_pairs", "num_control_pairs"), [(6, 2), (6, 6), (20, 3)])
def test_power_with_control_pairs_is_that_of_drawn_experiments(num_pairs: int, num_control_pairs: int) -> None:
    generator = np.random.default_rng(1)
    effect = power.smallest_effect(num_pairs, 2.0, 1.0, 0.05, num_control_pairs=num_control_pairs) or 0.0
    controls = generator.normal(0.0, 0.02, (20_000, num_control_pairs))
    gains = generator.normal(math.log1p(effect), 0.02, (20_000, num_pairs))
    floor = abs(controls.mean(1)) + _half_width(controls)
    threshold = np.maximum(floor, math.log1p(0.01))
    assert np.mean(gains.mean(1) - _half_width(gains) > threshold) == pytest.approx(0.9, abs=0.015)


def _half_width(values: Any) -> Any:
    n = values.shape[1]
    return t_quantile(0.95, n - 1) * values.std(1, ddof=1) / math.sqrt(n)


def test_pairs_to_decide_follow_the_spread() -> None:
    assert power.pairs_to_decide(0.01, 0.01, 0.05) == 8
    assert power.pairs_to_decide(0.02, 0.01, 0.05) == 27
    assert power.pairs_to_decide(0.1, 0.01, 0.05) is None
    assert power.pairs_to_decide(0.0, 0.01, 0.05) == 2


def test_planning_imports_neither_numpy_nor_scipy() -> None:
    code = """
import sys
from rlk_repro.statistics.power import smallest_effect
smallest_effect(6, 2.0, 1.0, 0.05)
print({'numpy', 'scipy'} & {*sys.modules})
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "set()\n"


@pytest.mark.parametrize(
    ("scenario", "num_pairs", "scored_steps", "margin"),
    [
        ("5 % faster, live", 6, 20, 0.01),
        ("5 % faster, live, reward margin 0.03", 6, 20, 0.03),
        ("5 % faster, live, 12 pairs of 80 steps", 12, 80, 0.01),
    ],
)
def test_the_gates_of_live_pairs_take_the_power_that_the_simulation_shows(
    scenario: str, num_pairs: int, scored_steps: int, margin: float
) -> None:
    page = (ROOT / "docs" / "statistics.md").read_text()
    _, _, row = page.partition(f"| {scenario} | 500 | ")
    simulated = float(row.partition(" | ")[0]) / 100
    sizes = {"num_pairs": num_pairs, "scored_steps": scored_steps}
    gates = power.chance_of_live_gates(**sizes, alpha=0.05, reward_margin=margin, length_margin=0.02)
    speed = power.Design(num_pairs, 0.02, 0.01, 0.05, 0).power(math.log1p(0.05))
    assert gates * speed == pytest.approx(simulated, abs=0.05)


def test_no_gain_is_seen_where_the_gates_alone_stay_undecided_too_often() -> None:
    assert power.smallest_effect(6, 2, 1, 0.05, gates=0.89) is None
    seen, alone = power.smallest_effect(12, 2, 1, 0.05, gates=0.95), power.smallest_effect(12, 2, 1, 0.05)
    assert seen is not None
    assert alone is not None
    assert seen > alone


# The arithmetic of sessions.

SIZES = st.floats(-2.0, 2.0).map(lambda value: round(value, 3))


def test_a_block_effect_leaves_linear_drift_out() -> None:
    drift = [math.exp(0.1 * step) for step in range(4)]
    for order in ("ABBA", "BAAB"):
        values = [step * (0.5 if label == "B" else 1.0) for step, label in zip(drift, order, strict=True)]
        assert block_effect(order, values) == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.inf, math.nan])
def test_a_block_with_a_value_that_has_no_logarithm_has_no_effect(value: float | None) -> None:
    assert block_effect("ABBA", [1.0, value, 1.0, 1.0]) is None


@given(st.lists(SIZES, min_size=1, max_size=12))
def test_hodges_lehmann_is_the_median_of_all_means_of_two(values: Sequence[float]) -> None:
    means = [(one + other) / 2 for one, other in itertools.combinations_with_replacement(values, 2)]
    assert hodges_lehmann(values) == pytest.approx(float(np.median(means)), abs=1e-12)


@given(st.lists(SIZES, min_size=5, max_size=30, unique=True))
def test_the_trimmed_interval_is_yuen_s(values: Sequence[float]) -> None:
    found = trimmed_interval(values, 0.9)
    n, cut = len(values), len(values) // 5
    assert found is not None
    assert found.estimate == pytest.approx(float(scipy.stats.trim_mean(values, 0.2)), abs=1e-9)
    winsorised = np.asarray(scipy.stats.mstats.winsorize(np.array(values), limits=(cut / n, cut / n)))
    error = winsorised.std(ddof=1) / ((1 - 2 * cut / n) * math.sqrt(n))
    half = scipy.stats.t.ppf(0.95, n - 2 * cut - 1) * error
    assert found.high - found.estimate == pytest.approx(float(half), rel=1e-6, abs=1e-9)


def test_too_few_values_are_not_trimmed() -> None:
    assert trimmed_interval([1.0], 0.9) is None
    few = trimmed_interval([1.0, 2.0, 4.0], 0.9)
    assert few is not None
    assert few.estimate == pytest.approx(7 / 3)


def test_the_common_slope_pairs_blocks_of_one_session_only() -> None:
    first = [(0.0, 1.0), (1.0, 1.5), (2.0, 2.0)]
    second = [(value, effect + 100.0) for value, effect in first]
    assert common_slope([first, second]) == pytest.approx(0.5)
    assert common_slope([[(1.0, 2.0), (1.0, 3.0)]]) is None
    assert common_slope([]) is None
    assert common_slope([[(0.0, -0.03), (1.8e-15, -0.01), (-1.8e-15, -0.02)]]) is None
    assert common_slope([[(0.0, 2.0), (1e-15, 3.0), (1.0, 4.0)]]) == pytest.approx(1.5)


def count_by_force(sessions: Sequence[Sequence[tuple[str, float | None]]]) -> tuple[float, float]:
    """Count every assignment of orders with as many ABBA as BAAB in each session, one by one."""
    choices = []
    for blocks in sessions:
        n = len(blocks)
        choices.append([signs for signs in itertools.product((1, -1), repeat=n) if abs(sum(signs)) == n % 2])
    signed = [[(1 if order[0] == "A" else -1) * (effect or 0.0) for order, effect in blocks] for blocks in sessions]
    seen = abs(sum(effect or 0.0 for blocks in sessions for _, effect in blocks))
    totals = [
        sum(sign * value for signs, values in zip(picked, signed, strict=True)
            for sign, value in zip(signs, values, strict=True))
        for picked in itertools.product(*choices)
    ]  # fmt: skip
    extreme = sum(abs(total) >= seen - 1e-9 for total in totals)
    return extreme / len(totals), 2 / len(totals)


BLOCKS = st.lists(
    st.tuples(st.sampled_from(["ABBA", "BAAB"]), st.none() | SIZES.filter(lambda value: abs(value) > 0.01)),
    min_size=1,
    max_size=5,
)


@given(st.lists(BLOCKS, min_size=1, max_size=3))
def test_the_randomisation_p_counts_every_drawing(sessions: list[list[tuple[str, float | None]]]) -> None:
    found = randomisation_p(sessions)
    if all(effect is None for blocks in sessions for _, effect in blocks):
        assert found is None
        return
    p_value, p_floor = count_by_force(sessions)
    assert found == pytest.approx((p_value, min(1.0, p_floor)))


def test_the_randomisation_p_may_be_small_and_is_none_where_it_takes_too_long() -> None:
    session = [("ABBA" if number % 2 else "BAAB", 0.05) for number in range(200)]
    p_value, p_floor = randomisation_p([session[:8]] * 4) or (1.0, 1.0)
    assert p_value == p_floor == pytest.approx(2 / 70**4)
    assert randomisation_p([session] * 25) is None
