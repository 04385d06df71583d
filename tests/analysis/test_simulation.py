"""A short run of the simulation of docs/statistics.md keeps its bars; the full one is ``python -m
benchmarks.verdicts``.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.verdicts import (
    SCENARIOS,
    Outcome,
    find_misses,
    plot_power,
    render_power_table,
    render_table,
    simulate,
)
from rlk_repro.rundir.results import VerdictWord
from tests import ROOT

NAMED = {scenario.name: scenario for scenario in SCENARIOS}
REPOSITORY = ROOT


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    numbers = {
        "A/A, live": 250,
        "A/A, 5 pairs": 50,
        "1.2 % faster, quiet (pair sd 0.5 %)": 100,
        "5 % faster, stored rollouts": 250,
        "5 % faster, reward 0.05 lower": 50,
    }
    return {name: simulate(NAMED[name], number) for name, number in numbers.items()}


def test_simulated_experiments_keep_the_bars(outcomes: dict[str, Outcome]) -> None:
    assert find_misses(list(outcomes.values())) == []


def test_five_pairs_never_yield_a_word_on_speed(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["A/A, 5 pairs"].words == {"inconclusive": 1.0}


def test_the_gate_names_a_lower_reward(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["5 % faster, reward 0.05 lower"]
    assert outcome.share(VerdictWord.NOT_COMPARABLE) == outcome.failed["raw_reward"] == 1.0


def test_a_missed_bar_is_reported(outcomes: dict[str, Outcome]) -> None:
    from dataclasses import replace

    broken = replace(outcomes["A/A, live"], words={"faster": 0.2, "inconclusive": 0.8}, coverage=0.8)
    assert find_misses([broken]) == [
        "A/A, live: faster or slower is 0.2000, expected 0.0 to 0.05",
        "A/A, live: coverage is 0.8000, expected 0.93 to 0.97",
    ]


def test_equal_seeds_give_equal_figures() -> None:
    scenario = NAMED["5 % faster, live"]
    assert simulate(scenario, 5) == simulate(scenario, 5)
    assert simulate(scenario, 5) != simulate(scenario, 5, seed=1)


def test_the_page_has_the_sealed_figures() -> None:
    sealed = json.loads((REPOSITORY / "benchmarks" / "verdicts.json").read_text())
    outcomes = [Outcome(**item) for item in sealed["outcomes"]]
    assert [outcome.name for outcome in outcomes] == [scenario.name for scenario in SCENARIOS]
    assert sealed["misses"] == []
    page = (REPOSITORY / "docs" / "statistics.md").read_text()
    assert render_table(outcomes) in page
    assert render_power_table() in page


def test_the_power_curve_is_drawn_without_a_date(tmp_path: Path) -> None:
    plot_power(tmp_path / "power.svg")
    text = (tmp_path / "power.svg").read_text()
    assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "dc:date" not in text
