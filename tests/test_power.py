"""What pairs can show, against scipy's noncentral t."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from rlk_repro import power


@pytest.mark.parametrize("num_pairs", [6, 7, 12, 40])
@pytest.mark.parametrize("effect", [0.01, 0.03, 0.08])
def test_power_is_scipys_noncentral_t(num_pairs: int, effect: float) -> None:
    from scipy.stats import nct, t

    shift = (math.log1p(effect) - math.log1p(0.01)) * math.sqrt(num_pairs) / 0.02
    expected = float(nct.sf(t.ppf(0.975, num_pairs - 1), num_pairs - 1, shift))
    found = power.power_of(effect, num_pairs=num_pairs, pair_sd_pct=2, smallest_effect_pct=1, alpha=0.05)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("target", [0.8, 0.9])
@pytest.mark.parametrize("alpha", [0.01, 0.05])
@pytest.mark.parametrize("num_pairs", [6, 9, 40])
def test_the_smallest_effect_has_the_power_asked_for(num_pairs: int, alpha: float, target: float) -> None:
    effect = power.smallest_effect(num_pairs, 2.0, 1.0, alpha, target)
    assert effect is not None
    found = power.power_of(effect, num_pairs=num_pairs, pair_sd_pct=2, smallest_effect_pct=1, alpha=alpha)
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
        power.power_of(effect / 100, num_pairs=6, pair_sd_pct=2, smallest_effect_pct=1, alpha=0.05)
        for effect in range(20)
    ]
    assert chances == sorted(chances)
    assert chances[1] == pytest.approx(0.025, abs=1e-6)


@pytest.mark.parametrize("num_pairs", [0, 1, 5])
def test_fewer_than_six_pairs_show_nothing(num_pairs: int) -> None:
    assert power.smallest_effect(num_pairs, 0.1, 1.0, 0.05) is None
    assert power.power_of(0.5, num_pairs=num_pairs, pair_sd_pct=1, smallest_effect_pct=1, alpha=0.05) == 0.0


def test_few_control_pairs_cost_more_than_they_tell() -> None:
    floors = [power.expected_noise_floor(n, 2.0, 0.05) for n in range(5)]
    assert floors[:2] == [None, None]
    assert floors[2:] == pytest.approx([0.167, 0.0547, 0.0380], rel=0.01)
    without, two, twelve = (power.smallest_effect(6, 2.0, 1.0, 0.05, num_control_pairs=n) or 0 for n in (0, 2, 12))
    assert without < twelve < two
    assert two > 0.2


def test_pairs_to_decide_follow_the_spread() -> None:
    assert power.pairs_to_decide(0.01, 0.01, 0.05) == 8
    assert power.pairs_to_decide(0.02, 0.01, 0.05) == 27
    assert power.pairs_to_decide(0.1, 0.01, 0.05) is None
    assert power.pairs_to_decide(0.0, 0.01, 0.05) == 2


def test_planning_imports_neither_numpy_nor_scipy() -> None:
    code = """
import sys
from rlk_repro.power import smallest_effect
smallest_effect(6, 2.0, 1.0, 0.05)
print({'numpy', 'scipy'} & {*sys.modules})
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "set()\n"
