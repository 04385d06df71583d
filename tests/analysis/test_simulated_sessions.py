"""A short simulation of the crossover design keeps its bars; the full one is ``python -m benchmarks.crossover``."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks import crossover
from benchmarks.crossover import SCENARIOS, Outcome, compare_costs, find_misses, judge_one, render_table, simulate
from rlk_repro.analysis.sessions import Session, compare_sessions
from rlk_repro.rundir.results import BlockResult, PairResult
from rlk_repro.statistics.stats import STEP_TIME, UNADJUSTED
from tests import ROOT

NAMED = {scenario.name: scenario for scenario in SCENARIOS}
SEALED = json.loads((ROOT / "benchmarks" / "crossover.json").read_text())


@pytest.mark.parametrize("name", ["A/A, sessions spread 0 ×", "gain 2 %", "gain 2 %, one stall of 5 ×"])
def test_simulated_sessions_keep_the_bars(name: str) -> None:
    outcome = simulate(NAMED[name], 60)
    assert find_misses([replace(outcome, coverage=0.95)]) == []  # 60 runs are too few for a coverage


def test_the_page_has_the_sealed_figures() -> None:
    outcomes = [Outcome(**item) for item in SEALED["outcomes"]]
    assert [outcome.name for outcome in outcomes] == [scenario.name for scenario in SCENARIOS]
    assert SEALED["misses"] == []
    assert render_table(outcomes) in (ROOT / "docs" / "statistics.md").read_text()


def test_an_answer_costs_less_than_a_tenth() -> None:
    assert all(ours < theirs / 10 for _, ours, theirs in compare_costs())


def test_live_sessions_are_adjusted_for_tokens_and_show_the_unadjusted_effect_too() -> None:
    scenario = NAMED["A/A, live, tokens 5 %"]
    source = random.Random(7)
    widths = {STEP_TIME: 0.0, UNADJUSTED: 0.0}
    for _ in range(20):
        effects = {effect.metric: effect for effect in judge_one(scenario, source).effects}
        for metric in widths:
            assert effects[metric].n == scenario.sessions
            widths[metric] += effects[metric].sd_log or 0.0
        assert effects[UNADJUSTED].role == "diagnostic"
    assert widths[STEP_TIME] < widths[UNADJUSTED] / 2


def test_a_live_session_without_a_count_of_tokens_has_no_adjusted_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Session] = []

    def compare(sessions: Sequence[Session]) -> tuple[list[PairResult], list[BlockResult]]:
        seen.extend(sessions)
        return compare_sessions(sessions)

    monkeypatch.setattr(crossover, "compare_sessions", compare)
    judge_one(NAMED["A/A, live, tokens 5 %"], random.Random(7))
    first, *others = seen
    step = first.schedule.steps_of_blocks[0][first.schedule.period_steps - 1]
    tokens = [None if number == step else count for number, count in enumerate(first.values["tokens"])]
    uncounted = replace(first, values={**first.values, "tokens": tokens})
    pairs, _ = compare_sessions([uncounted, *others])
    found = [pair.metric(STEP_TIME) for pair in pairs]
    assert [item is not None and item.log_ratio is not None for item in found] == [False, *[True] * len(others)]
