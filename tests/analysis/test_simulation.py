"""A short run of the simulation of docs/statistics.md keeps its bars; the full one is ``python -m
benchmarks.verdicts``.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.verdicts import (
    SCENARIOS,
    Outcome,
    find_misses,
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


def test_the_page_has_the_sealed_figures() -> None:
    sealed = json.loads((REPOSITORY / "benchmarks" / "verdicts.json").read_text())
    outcomes = [Outcome(**item) for item in sealed["outcomes"]]
    assert [outcome.name for outcome in outcomes] == [scenario.name for scenario in SCENARIOS]
    assert sealed["misses"] == []
    page = (REPOSITORY / "docs" / "statistics.md").read_text()
    assert render_table(outcomes) in page
    assert render_power_table() in page
