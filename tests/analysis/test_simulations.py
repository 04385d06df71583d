"""Short runs of the simulations of docs/statistics.md keep their bars, and the package decides as they do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import verdicts
from benchmarks.rules import CASES, Array, Case, Outcome, draw_times, estimate, list_lost, simulate
from rlk_repro.analysis.gates import CARRIED
from rlk_repro.analysis.sessions import Session, compare_sessions, make_session
from rlk_repro.analysis.shadows import CASES as SHADOWS
from rlk_repro.analysis.verdict import Judgement, judge
from rlk_repro.plan import Trial
from rlk_repro.rundir.results import GateStatus, ShadowResult, VerdictWord
from rlk_repro.schedule import Schedule, make_schedule
from rlk_repro.statistics.stats import STEP_TIME, UNADJUSTED
from tests import ROOT
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
def test_the_verdict_has_the_interval_and_the_gate_of_the_simulation(case: Case) -> None:
    source = np.random.default_rng(5)
    for seed in range(4):
        sessions = []
        for place in range(case.sessions):
            schedule = make_schedule(case.measure, seed + place)
            (times,) = draw_times(case, [schedule], np.array([0]), source)
            sessions.append(make(place, schedule, np.exp(times), case if not place else None))
        error, alone, floor, *carried = estimate(sessions)
        judgement = judge_sessions(case, sessions)
        found, width = judgement.effects[0], max(alone, floor)
        assert found.low == pytest.approx(math.exp(error - width), abs=1e-9)
        assert found.high == pytest.approx(math.exp(error + width), abs=1e-9)
        assert ("sessions alone" in found.note) is (floor > alone)
        gates = [item.status for item in judgement.gates if item.name == CARRIED]
        assert len(gates) == (case.period_steps == 1)
        if gates:
            errors, widths, floors = (np.array([value]) for value in (error, alone, floor))
            outcome = Outcome(case=case, errors=errors, alone=widths, floors=floors, carried=np.array([carried]))
            assert (gates[0] is GateStatus.PASSED) is bool(outcome.pass_gate(0.0)[0])


def make(
    place: int, schedule: Schedule, times: Array, lossy: Case | None = None, tokens: Array | None = None
) -> Session:
    trial = Trial(index=place, pair=f"s{place + 1}", variant="crossover", is_control=False, seed=0)
    faults = dict.fromkeys(list_lost(lossy, schedule) if lossy else (), "void")
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
        (0.02, {"stall": True}, VerdictWord.FASTER),
        (0.02, {"token_sd": 0.05}, VerdictWord.FASTER),
        (1 / 1.02 - 1, {}, VerdictWord.SLOWER),
    ],
)
def test_quiet_runs_get_the_true_word(gain: float, options: dict[str, float], word: VerdictWord) -> None:
    source = np.random.default_rng(11)
    lane = "live" if "token_sd" in options else "train-only"
    runs = [make_run(source, gain=gain, **options) for _ in range(15)]  # type: ignore[arg-type]
    words = [judge_sessions(QUIET, run, lane).verdict.word for run in runs]
    assert words.count(word) >= 14
    assert set(words) <= {word, VerdictWord.INCONCLUSIVE}


def test_live_sessions_are_adjusted_for_tokens_and_show_the_unadjusted_effect_too() -> None:
    source = np.random.default_rng(7)
    widths = {STEP_TIME: 0.0, UNADJUSTED: 0.0}
    for _ in range(8):
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


# Pairs: what ``python -m benchmarks.verdicts`` simulates.

NUMBERS = {
    "A/A, live": 120,
    "A/A, 5 pairs": 30,
    "1.2 % faster, quiet (pair sd 0.5 %)": 50,
    "5 % faster, stored rollouts": 250,
    "5 % faster, reward 0.05 lower": 30,
}


def test_simulated_experiments_keep_the_bars() -> None:
    named = {scenario.name: scenario for scenario in verdicts.SCENARIOS}
    outcomes = {name: verdicts.simulate(named[name], number) for name, number in NUMBERS.items()}
    assert verdicts.find_misses(list(outcomes.values())) == []
    assert outcomes["A/A, 5 pairs"].words == {"inconclusive": 1.0}
    worse = outcomes["5 % faster, reward 0.05 lower"]
    assert worse.share(VerdictWord.NOT_COMPARABLE) == worse.failed["raw_reward"] == 1.0


def test_the_page_has_a_row_for_each_scenario() -> None:
    empty = [
        verdicts.Outcome(name=item.name, num_experiments=0, words={}, coverage=0.0, pair_sd=0.0, failed={})
        for item in verdicts.SCENARIOS
    ]
    head, line, *rows = verdicts.render_table(empty).splitlines()
    _, _, found = (ROOT / "docs" / "statistics.md").read_text().partition(f"{head}\n{line}\n")
    for row, shown in zip(rows, found.splitlines(), strict=False):
        assert shown.startswith(row.partition(" | ")[0])
