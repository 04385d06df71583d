"""The intervals of simulated runs keep their bars; intervals, gate and words of the package are the simulated ones."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.rules import (
    CASES,
    NUM_SCHEDULES,
    Array,
    Case,
    Outcome,
    draw_times,
    estimate,
    find_block_effects,
    find_gaps,
    list_kept,
    simulate,
)
from rlk_repro.analysis.gates import CARRIED
from rlk_repro.analysis.sessions import Session, compare_sessions, make_session
from rlk_repro.analysis.shadows import CASES as SHADOWS
from rlk_repro.analysis.verdict import Judgement, judge
from rlk_repro.plan import Trial
from rlk_repro.rundir.results import GateStatus, ShadowResult, VerdictWord
from rlk_repro.schedule import Schedule, make_schedule
from rlk_repro.statistics.stats import STEP_TIME, UNADJUSTED
from tests.support.judged_pairs import gather_sessions, make_whole

NAMES = [f"{case.name}, {case.sessions} sessions, spread {case.between}" for case in CASES]
QUIET = Case(name="quiet")
TOKENS = 1e5


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_intervals_with_a_floor_keep_the_bars_over_20000_runs(case: Case) -> None:
    assert simulate(case).find_misses() == []


@pytest.mark.parametrize("case", CASES[4:5] + CASES[20:21] + CASES[28:32], ids=lambda case: case.name)
def test_the_vectorised_formulas_are_those_of_the_package(case: Case) -> None:
    source = np.random.default_rng(5)
    schedules = [make_schedule(case.measure, number) for number in range(NUM_SCHEDULES)]
    picks = [source.integers(NUM_SCHEDULES, size=8) for _ in range(case.sessions)]
    times = [draw_times(case, schedules, chosen, source) for chosen in picks]
    effects = [
        find_block_effects(Case() if place else case, schedules, values, chosen, case.period_steps)
        for place, (values, chosen) in enumerate(zip(times, picks, strict=True))
    ]
    gaps = [find_gaps(schedules, values, chosen) for values, chosen in zip(times, picks, strict=True)]
    errors, alone, floors = estimate(effects)
    outcome = Outcome(case=case, errors=errors, alone=alone, floors=floors, carried=np.stack(gaps, axis=1))
    for run in range(8):
        sessions = []
        for place in range(case.sessions):
            schedule = schedules[picks[place][run]]
            sessions.append(make(place, schedule, np.exp(times[place][run]), case if not place else None))
        judgement = judge_sessions(case, sessions)
        found = judgement.effects[0]
        assert found.low == pytest.approx(math.exp(errors[run] - outcome.widths[run]), abs=1e-9)
        assert found.high == pytest.approx(math.exp(errors[run] + outcome.widths[run]), abs=1e-9)
        assert ("sessions alone" in found.note) is bool(floors[run] > alone[run])
        gate = next((item for item in judgement.gates if item.name == CARRIED), None)
        assert (gate is not None) is (case.period_steps == 1)
        if gate is not None:
            assert (gate.status is GateStatus.PASSED) is bool(outcome.pass_gate(0.0)[run])


def make(
    place: int, schedule: Schedule, times: Array, lossy: Case | None = None, tokens: Array | None = None
) -> Session:
    trial = Trial(index=place, pair=f"s{place + 1}", variant="crossover", is_control=False, seed=0)
    kept = list_kept(lossy, schedule) if lossy else range(len(schedule.blocks))
    faults = {
        number: "void" for number, block in enumerate(schedule.blocks) if not block.is_control and number not in kept
    }
    counts = [TOKENS] * len(times) if tokens is None else tokens.tolist()
    lane = "train-only" if tokens is None else "live"
    return make_session(trial, make_whole(trial, times.tolist(), counts), schedule, faults, lane=lane, rules=2)  # type: ignore[arg-type]


def judge_sessions(case: Case, sessions: list[Session], lane: str = "train-only") -> Judgement:
    shadows = [
        ShadowResult(session=session.trial.pair, case=name, num_ranks=1, error="", log_prob_max=0.0, log_prob_mean=0.0,
                     gradient_share=0.0)
        for session in sessions for name in SHADOWS
    ]  # fmt: skip
    return judge(gather_sessions(case.measure, sessions, lane, shadows=shadows))  # type: ignore[arg-type]


def make_run(
    source: np.random.Generator, *, gain: float = 0.0, stall: bool = False, token_sd: float = 0
) -> list[Session]:
    """Four quiet sessions; with ``token_sd`` the live lane, whose steps take as long as the root of their tokens."""
    sessions = []
    for place in range(QUIET.sessions):
        schedule = make_schedule(QUIET.measure, int(source.integers(2**31)))
        (times,) = draw_times(QUIET, [schedule], np.array([0]), source)
        enabled = np.array([rollout.variant == "enabled" for rollout in schedule.rollouts])
        tokens = TOKENS * np.exp(source.normal(scale=token_sd, size=len(times)))
        values = 5 * np.exp(times - math.log1p(gain) * enabled) * np.sqrt(tokens / TOKENS)
        if stall and not place:
            values[schedule.steps_of_blocks[1][QUIET.period_steps - 1]] *= 5
        sessions.append(make(place, schedule, values, None, tokens if token_sd else None))
    return sessions


@pytest.mark.parametrize(
    ("gain", "options", "word"),
    [
        (0.0, {}, VerdictWord.EQUIVALENT),
        (0.02, {}, VerdictWord.FASTER),
        (0.02, {"stall": True}, VerdictWord.FASTER),
        (0.02, {"token_sd": 0.05}, VerdictWord.FASTER),
        (1 / 1.02 - 1, {}, VerdictWord.SLOWER),
    ],
)
def test_quiet_runs_get_the_true_word(gain: float, options: dict[str, float], word: VerdictWord) -> None:
    source = np.random.default_rng(11)
    lane = "live" if "token_sd" in options else "train-only"
    words = [
        judge_sessions(QUIET, make_run(source, gain=gain, **options), lane).verdict.word  # type: ignore[arg-type]
        for _ in range(30)
    ]
    assert words.count(word) >= 28
    assert set(words) <= {word, VerdictWord.INCONCLUSIVE}


def test_live_sessions_are_adjusted_for_tokens_and_show_the_unadjusted_effect_too() -> None:
    source = np.random.default_rng(7)
    widths = {STEP_TIME: 0.0, UNADJUSTED: 0.0}
    for _ in range(20):
        judgement = judge_sessions(QUIET, make_run(source, token_sd=0.05), "live")
        effects = {effect.metric: effect for effect in judgement.effects}
        for metric in widths:
            assert effects[metric].n == QUIET.sessions
            widths[metric] += effects[metric].sd_log or 0.0
        assert effects[UNADJUSTED].role == "diagnostic"
    assert widths[STEP_TIME] < widths[UNADJUSTED] / 2


def test_a_live_session_without_a_count_of_tokens_has_no_adjusted_effect() -> None:
    first, *others = make_run(np.random.default_rng(7), token_sd=0.05)
    step = first.schedule.steps_of_blocks[0][first.schedule.period_steps - 1]
    tokens = [None if number == step else count for number, count in enumerate(first.values["tokens"])]
    uncounted = replace(first, values={**first.values, "tokens": tokens})
    pairs, _ = compare_sessions([uncounted, *others])
    found = [pair.metric(STEP_TIME) for pair in pairs]
    assert [item is not None and item.log_ratio is not None for item in found] == [False, *[True] * len(others)]
