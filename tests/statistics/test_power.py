"""The power of pairs agrees with scipy's noncentral t."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.verdicts import power_of
from rlk_repro.statistics import power
from rlk_repro.statistics.stats import t_quantile
from tests import ROOT


@pytest.mark.parametrize("num_pairs", [6, 7, 12, 40])
@pytest.mark.parametrize("effect", [0.01, 0.03, 0.08])
def test_power_is_scipys_noncentral_t(num_pairs: int, effect: float) -> None:
    from scipy.stats import nct, t

    shift = (math.log1p(effect) - math.log1p(0.01)) * math.sqrt(num_pairs) / 0.02
    expected = float(nct.sf(t.ppf(0.975, num_pairs - 1), num_pairs - 1, shift))
    found = power_of(effect, num_pairs=num_pairs, pair_sd_pct=2, smallest_effect_pct=1, alpha=0.05)
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("target", [0.8, 0.9])
@pytest.mark.parametrize("alpha", [0.01, 0.05])
@pytest.mark.parametrize("num_pairs", [6, 9, 40])
def test_the_smallest_effect_has_the_power_asked_for(num_pairs: int, alpha: float, target: float) -> None:
    effect = power.smallest_effect(num_pairs, 2.0, 1.0, alpha, target)
    assert effect is not None
    found = power_of(effect, num_pairs=num_pairs, pair_sd_pct=2, smallest_effect_pct=1, alpha=alpha)
    assert found == pytest.approx(target, abs=1e-6)


def test_more_pairs_less_spread_and_less_power_show_smaller_effects() -> None:
    by_pairs = [power.smallest_effect(n, 2.0, 1.0, 0.05) or 0 for n in range(6, 41)]
    by_spread = [power.smallest_effect(6, sd, 1.0, 0.05) or 0 for sd in (0.5, 1, 2, 4)]
    by_power = [power.smallest_effect(6, 2.0, 1.0, 0.05, level) or 0 for level in (0.5, 0.8, 0.9, 0.99)]
    assert by_pairs == sorted(by_pairs, reverse=True)
    assert by_spread == sorted(by_spread)
    assert by_power == sorted(by_power)
    assert 0.01 < by_pairs[-1] < by_pairs[0] < 0.05


def test_power_grows_with_the_effect() -> None:
    chances = [
        power_of(effect / 100, num_pairs=6, pair_sd_pct=2, smallest_effect_pct=1, alpha=0.05) for effect in range(20)
    ]
    assert chances == sorted(chances)
    assert chances[1] == pytest.approx(0.025, abs=1e-6)


@pytest.mark.parametrize("num_pairs", [0, 1, 5])
def test_fewer_than_six_pairs_show_nothing(num_pairs: int) -> None:
    assert power.smallest_effect(num_pairs, 0.1, 1.0, 0.05) is None
    assert power.smallest_effect(40, 1e12, 1.0, 0.05) is None
    assert power_of(0.5, num_pairs=num_pairs, pair_sd_pct=1, smallest_effect_pct=1, alpha=0.05) == 0.0


def test_few_control_pairs_measure_a_high_noise_floor() -> None:
    effects = [power.smallest_effect(6, 2.0, 1.0, 0.05, num_control_pairs=n) or 0 for n in (0, 1, 2, 6, 12)]
    assert effects == pytest.approx([0.0443, 0.0443, 0.387, 0.0649, 0.0525], rel=0.01)


@pytest.mark.parametrize(("num_pairs", "num_control_pairs"), [(6, 2), (6, 6), (20, 3)])
def test_power_with_control_pairs_is_that_of_drawn_experiments(num_pairs: int, num_control_pairs: int) -> None:
    import numpy as np

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
        ("5 % faster, live, 12 pairs", 12, 20, 0.01),
        ("5 % faster, live, 12 pairs of 80 steps", 12, 80, 0.01),
    ],
)
def test_the_gates_of_live_pairs_take_the_power_that_the_simulation_shows(
    scenario: str, num_pairs: int, scored_steps: int, margin: float
) -> None:
    outcomes = json.loads((ROOT / "benchmarks" / "verdicts.json").read_text())["outcomes"]
    simulated = next(item["words"]["faster"] for item in outcomes if item["name"] == scenario)
    gates = power.chance_of_live_gates(
        num_pairs=num_pairs, scored_steps=scored_steps, alpha=0.05, reward_margin=margin, length_margin=0.02
    )
    speed = power_of(0.05, num_pairs=num_pairs, pair_sd_pct=2, smallest_effect_pct=1, alpha=0.05)
    assert gates * speed == pytest.approx(simulated, abs=0.05)


def test_no_gain_is_seen_where_the_gates_alone_stay_undecided_too_often() -> None:
    assert power.smallest_effect(6, 2, 1, 0.05, gates=0.89) is None
    seen, alone = power.smallest_effect(12, 2, 1, 0.05, gates=0.95), power.smallest_effect(12, 2, 1, 0.05)
    assert seen is not None
    assert alone is not None
    assert seen > alone
