"""The intervals of simulated runs keep their bars, and the vectorised formulas are those of the package."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.crossover import make_whole
from benchmarks.rules import (
    CASES,
    NUM_SCHEDULES,
    Case,
    Outcome,
    draw_times,
    estimate,
    find_block_effects,
    find_gaps,
    list_kept,
    simulate,
)
from rlk_repro.analysis.gates import CARRIED, Evidence
from rlk_repro.analysis.noise import find_noise
from rlk_repro.analysis.sessions import Session, compare_sessions, make_session
from rlk_repro.analysis.verdict import Judgement, judge
from rlk_repro.plan import Trial
from rlk_repro.rundir.results import GateStatus
from rlk_repro.schedule import Schedule, make_schedule

NAMES = [f"{case.name}, {case.sessions} sessions, spread {case.between}" for case in CASES]


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
        find_block_effects(case, schedules, values, chosen, has_lost=place == 0)
        for place, (values, chosen) in enumerate(zip(times, picks, strict=True))
    ]
    gaps = [find_gaps(schedules, values, chosen) for values, chosen in zip(times, picks, strict=True)]
    errors, alone, floors = estimate(effects)
    for run in range(8):
        sessions = []
        for place in range(case.sessions):
            schedule = schedules[picks[place][run]]
            sessions.append(make(place, schedule, np.exp(times[place][run]).tolist(), case if not place else None))
        judgement = judge_sessions(case, sessions)
        found = judgement.effects[0]
        half = max(alone[run], floors[run])
        assert found.low == pytest.approx(math.exp(errors[run] - half), abs=1e-9)
        assert found.high == pytest.approx(math.exp(errors[run] + half), abs=1e-9)
        assert ("sessions alone" in found.note) is bool(floors[run] > alone[run])
        gate = next((item for item in judgement.gates if item.name == CARRIED), None)
        assert (gate is not None) is (case.period_steps == 1)
        if gate is not None:
            outcome = Outcome(case=case, errors=errors, alone=alone, widths=alone, floors=floors,
                              carried=np.stack(gaps, axis=1))  # fmt: skip
            assert (gate.status is GateStatus.PASSED) is bool(outcome.pass_gate(0.0)[run])


def make(place: int, schedule: Schedule, times: list[float], lossy: Case | None) -> Session:
    trial = Trial(index=place, pair=f"s{place + 1}", variant="crossover", is_control=False, seed=0)
    kept = list_kept(lossy, schedule) if lossy else range(len(schedule.blocks))
    faults = {
        number: "void" for number, block in enumerate(schedule.blocks) if not block.is_control and number not in kept
    }
    whole = make_whole(trial, times, [1e5] * len(times))
    return make_session(trial, whole, schedule, faults, lane="train-only", rules=2)


def judge_sessions(case: Case, sessions: list[Session]) -> Judgement:
    pairs, blocks = compare_sessions(sessions)
    return judge(
        Evidence(
            measure=case.measure,
            lane="train-only",
            pairs=pairs,
            trials={arm.name: arm for session in sessions for arm in session.arms},
            differences=(),
            blocks=blocks,
            noise=find_noise(sessions, [pair.pair for pair in pairs]),
        )
    )
