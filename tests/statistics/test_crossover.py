"""The arithmetic of sessions agrees with brute force, NumPy, SciPy and hand-made numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rlk_repro.statistics.crossover import (
    block_effect,
    common_slope,
    hodges_lehmann,
    randomisation_p,
    trimmed_interval,
)

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


def test_one_stalled_block_of_eight_hardly_moves_a_session() -> None:
    calm = [0.01, 0.011, 0.009, 0.012, 0.008, 0.0105, 0.0095, 0.01]
    assert hodges_lehmann([*calm[:-1], 0.8]) == pytest.approx(hodges_lehmann(calm), abs=0.001)


@given(st.lists(SIZES, min_size=5, max_size=30, unique=True))
def test_the_trimmed_interval_is_yuen_s(values: Sequence[float]) -> None:
    found = trimmed_interval(values, 0.9)
    n, cut = len(values), len(values) // 5
    assert found is not None
    assert found.estimate == pytest.approx(float(stats.trim_mean(values, 0.2)), abs=1e-9)
    winsorised = np.asarray(stats.mstats.winsorize(np.array(values), limits=(cut / n, cut / n)))
    error = winsorised.std(ddof=1) / ((1 - 2 * cut / n) * math.sqrt(n))
    half = stats.t.ppf(0.95, n - 2 * cut - 1) * error
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
    assert found is not None
    p_value, p_floor = count_by_force(sessions)
    assert found[0] == pytest.approx(p_value)
    assert found[1] == pytest.approx(min(1.0, p_floor))


def test_four_sessions_of_eight_blocks_can_reach_a_small_p() -> None:
    sessions = [[("ABBA" if number % 2 else "BAAB", 0.05) for number in range(8)] for _ in range(4)]
    p_value, p_floor = randomisation_p(sessions) or (1.0, 1.0)
    assert p_value == p_floor == pytest.approx(2 / 70**4)


def test_a_p_value_that_takes_too_long_to_count_is_none() -> None:
    session = [("ABBA" if number % 2 else "BAAB", 0.05) for number in range(200)]
    assert randomisation_p([session] * 25) is None
