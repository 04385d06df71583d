"""The rules that a plan has since version 2, each against the rule before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlk_repro.analysis.gates import CARRIED, TRAINING, make_gates
from rlk_repro.analysis.sessions import ADJUSTED, Session, compare_sessions, find_slopes, make_session
from rlk_repro.analysis.verdict import OVERRIDDEN, judge
from rlk_repro.plan import Trial
from rlk_repro.rundir.results import Gate, GateStatus, Series, TrialResult, count_gates
from rlk_repro.schedule import make_schedule
from rlk_repro.spec import Measure
from rlk_repro.statistics.stats import ENERGY, STEP_TIME, UNADJUSTED
from tests.support.judged_pairs import MEASURE, around, gather_sessions, judge_pairs, make_pair, make_pairs, make_whole

PASSED, FAILED, UNDECIDED, NOT_APPLICABLE, NOT_PLANNED = GateStatus
RULES = Measure(**{**MEASURE.model_dump(), "rules": 2})
MOVING = {"raw_reward": (0.4, 0.5, 0.6), "grad_norm": (1.0, 0.0, 2.0)}


@pytest.mark.parametrize(
    ("steps", "workload", "status", "why"),
    [
        (MOVING, "vime", PASSED, "rewards differ"),
        ({**MOVING, "raw_reward": (0.5, 0.5, 0.5)}, "vime", FAILED, "rewards are the same"),
        ({**MOVING, "grad_norm": (0.0, 1.0, 0.0)}, "vime", FAILED, "gradients are zero"),
        ({"raw_reward": (0.4, 0.5, 0.6)}, "vime", UNDECIDED, "gradients in p1-baseline"),
        ({}, "module", NOT_APPLICABLE, "updates no weights"),
    ],
)
def test_training_must_have_moved(
    steps: dict[str, Sequence[float]], workload: str, status: GateStatus, why: str
) -> None:
    pairs = [make_pair(f"p{number}", steps=steps) for number in range(1, 7)]
    moved = []
    for pair in pairs:
        first, second = pair.trials
        trials = (replace(second, name=first.name, variant=first.variant), second)
        moved.append(replace(pair, trials=trials))
    found = judge_pairs(moved, measure=RULES, workload=workload)
    gate = next(gate for gate in found.gates if gate.name == TRAINING)
    assert (gate.status, why in gate.detail) == (status, True)
    assert TRAINING not in [gate.name for gate in judge_pairs(pairs, workload=workload).gates]


def make_sessions(
    *,
    rules: int = 2,
    times: float = 5.0,
    carried: float = 0.0,
    tokens: Sequence[float] = (),
    power: float = 0.5,
    period_steps: int = 1,
    lane: str = "train-only",
) -> tuple[Measure, list[Session]]:
    """Return four sessions; ``carried`` shortens the first enabled step after a change, ``power`` is that of tokens."""
    measure = Measure(design="crossover", rules=rules, period_steps=period_steps)  # type: ignore[arg-type]
    sessions = []
    for place in range(4):
        schedule = make_schedule(measure, place)
        variants = [rollout.variant for rollout in schedule.rollouts]
        counts = [tokens[step % len(tokens)] if tokens else 1e5 for step in range(len(variants))]
        found = []
        for step, variant in enumerate(variants):
            is_first = step > 0 and variant == "enabled" != variants[step - 1]
            wobble = 1 + 0.001 * ((step * 7 + place) % 5)
            found.append(times * wobble * (1 - carried * is_first) * (counts[step] / 1e5) ** power)
        trial = Trial(index=place, pair=f"s{place + 1}", variant="crossover", is_control=False, seed=place)
        series = {
            STEP_TIME: found,
            "actor_train_time_s": found,
            "train_tokens_per_s": [number / value for number, value in zip(counts, found, strict=True)],
            ENERGY: [600 * value for value in found],
            "peak_memory_bytes": [6e10] * len(found),
        }
        sessions.append(
            make_session(trial, make_result(trial, series), schedule, {}, lane=lane, rules=rules)  # type: ignore[arg-type]
        )
    return measure, sessions


def make_result(trial: Trial, series: dict[str, list[float]]) -> TrialResult:
    whole = make_whole(trial, series[STEP_TIME], [1e5] * len(series[STEP_TIME]))
    others = [item for item in whole.series if item.metric not in series]
    own = [
        Series(metric=name, source="", values=tuple(values), lines=(None,) * len(values))
        for name, values in series.items()
    ]
    return replace(whole, series=(*others, *own))


@pytest.mark.parametrize(
    ("carried", "control_blocks", "status"),
    [
        (0.0, 2, PASSED),
        (0.02, 2, UNDECIDED),
        (0.06, 2, FAILED),
        (-0.06, 2, FAILED),
        (0.0, 1, UNDECIDED),
        (0.0, 0, UNDECIDED),
    ],
)
def test_periods_of_one_step_need_control_blocks_and_no_carry_over(
    carried: float, control_blocks: int, status: GateStatus
) -> None:
    measure, sessions = make_sessions(carried=carried)
    planned = measure.model_copy(update={"control_blocks": control_blocks})
    gates = {gate.name: gate for gate in make_gates(gather_sessions(planned, sessions))}
    assert gates[CARRIED].status is status
    assert gates["control_blocks"].status is (NOT_PLANNED if not control_blocks else gates["control_blocks"].status)


def test_older_rules_and_longer_periods_have_no_gate_on_carry_over() -> None:
    for options in ({"rules": 1}, {"period_steps": 2}):
        names = [gate.name for gate in make_gates(gather_sessions(*make_sessions(**options)))]  # type: ignore[arg-type]
        assert CARRIED not in names


@pytest.mark.parametrize(
    ("tokens", "power", "slope", "before"),
    [
        ((1e5, 1.3e5, 0.8e5), 0.5, 0.5, 0.5),
        ((1e5, 1.3e5, 0.8e5), -0.5, 0.0, -0.5),
        ((1e5, 1.3e5, 0.8e5), 1.7, 1.0, 1.7),
        ((1e5, 1.004e5, 0.999e5), 0.5, None, 0.5),
    ],
)
def test_a_slope_on_tokens_is_between_0_and_1_or_left_out(
    tokens: Sequence[float], power: float, slope: float | None, before: float
) -> None:
    for rules, expected in ((2, slope), (1, before)):
        _, sessions = make_sessions(rules=rules, tokens=tokens, power=power, period_steps=2, lane="live")
        found = find_slopes(sessions)
        if expected is None:
            assert found == {}
            assert all(pair.metric(UNADJUSTED) is None for pair in compare_sessions(sessions)[0])
        else:
            assert found[STEP_TIME] == pytest.approx(expected, abs=0.5 if rules == 1 and slope is None else 0.05)
            assert set(found) <= set(ADJUSTED)


@pytest.mark.parametrize(("times", "n"), [(0.3, 0), (0.99, 0), (1.01, 4)])
def test_energy_counts_only_over_scored_periods_of_a_second(times: float, n: int) -> None:
    effects = {item.metric: item for item in judge(gather_sessions(*make_sessions(times=times))).effects}
    assert effects[ENERGY].n == n
    assert ("1 s" in effects[ENERGY].note) is (n == 0)
    before = {item.metric: item for item in judge(gather_sessions(*make_sessions(times=times, rules=1))).effects}
    assert before[ENERGY].n == 4


def test_headline_and_reasons_count_the_gates() -> None:
    pairs = make_pairs(*around(0.9), steps=MOVING)
    found = judge_pairs(pairs, measure=RULES, lane="train-only", is_exploratory=True)
    counted = count_gates(found.gates)
    assert counted.startswith("6 of 9 gates passed, 1 failed (training_moved), 2 do not apply")
    assert found.verdict.headline.endswith(f"; {counted}")
    assert found.verdict.reasons[0] == OVERRIDDEN
    assert "every gate that applies passed" not in found.verdict.reasons


@pytest.mark.parametrize(
    ("status", "detail", "word"),
    [
        (NOT_APPLICABLE, "no control block was planned", "not planned"),
        (NOT_APPLICABLE, "both variants train on the same stored rollouts", "does not apply"),
        (NOT_PLANNED, "no shadow step was planned", "not planned"),
        (PASSED, "", "passed"),
    ],
)
def test_reports_tell_what_does_not_apply_from_what_was_not_planned(status: GateStatus, detail: str, word: str) -> None:
    gate = Gate(name="x", status=status, detail=detail, estimate=None, low=None, high=None, margin=None, n=0)
    assert gate.shown.word == word
