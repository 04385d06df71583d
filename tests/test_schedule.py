"""The schedule of a session is balanced, comes from the seed alone, and gives both variants the same work in half a
block.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.schedule import ORDERS, make_schedule
from rlk_repro.spec import Measure

SMALL = Measure(design="crossover", blocks=2, control_blocks=1)


@st.composite
def measures(draw: st.DrawFn) -> Measure:
    return Measure(
        design="crossover",
        warmup_steps=draw(st.integers(2, 6)),
        blocks=draw(st.integers(1, 9)),
        control_blocks=draw(st.integers(0, 4)),
        period_steps=draw(st.integers(1, 3)),
        shadow_steps=draw(st.integers(0, 3)),
    )


def test_the_text_of_a_seed_never_changes() -> None:
    assert make_schedule(SMALL, 1234).text == "beeebbbbeebbbbbbbbbbeeeebbss"
    assert len({make_schedule(Measure(design="crossover", blocks=20), seed).text for seed in range(40)}) == 40


@given(measure=measures(), seed=st.integers(0, 2**31))
def test_blocks_are_balanced_and_control_blocks_run_the_baseline(measure: Measure, seed: int) -> None:
    schedule = make_schedule(measure, seed)
    for is_control, number in ((False, measure.blocks), (True, measure.control_blocks)):
        orders = Counter(block.order for block in schedule.blocks if block.is_control is is_control)
        assert sum(orders.values()) == number
        assert abs(orders[ORDERS[0]] - orders[ORDERS[1]]) == number % 2
    assert len(schedule.rollouts) == len(schedule.text) == measure.num_steps
    for number, rollout in enumerate(schedule.rollouts):
        if rollout.block is None:
            continue
        is_enabled = rollout.label == "B" and not schedule.blocks[rollout.block].is_control
        assert schedule.variant_of(number) == ("enabled" if is_enabled else "baseline")


@given(measure=measures(), seed=st.integers(0, 2**31))
def test_the_last_rollout_of_a_period_is_scored_and_nothing_outside_blocks(measure: Measure, seed: int) -> None:
    schedule = make_schedule(measure, seed)
    scored = [number for number in range(measure.num_steps) if schedule.is_scored(number)]
    first, step = measure.warmup_steps, measure.period_steps
    assert scored == list(range(first + step - 1, measure.num_steps - measure.shadow_steps, step))
    assert len(scored) == measure.num_scored
    assert {schedule.variant_of(number) for number in range(first)} == {"baseline", "enabled"}
    assert schedule.text[first:].count("s") == measure.shadow_steps
    assert schedule.text.rstrip("s").count("s") == 0


@given(measure=measures(), seed=st.integers(0, 2**31))
def test_both_periods_of_half_a_block_have_the_same_stored_rollouts(measure: Measure, seed: int) -> None:
    rollouts = [rollout for rollout in make_schedule(measure, seed).rollouts if rollout.block is not None]
    size = measure.period_steps
    periods = [[item.stored for item in rollouts[at : at + size]] for at in range(0, len(rollouts), size)]
    assert all(first == second for first, second in zip(periods[::2], periods[1::2], strict=True))
    distinct = [number for period in periods[::2] for number in period]
    assert distinct == list(range(measure.num_stored))


def test_every_balanced_arrangement_is_drawn_about_as_often_as_any_other() -> None:
    measure = Measure(design="crossover", blocks=4, control_blocks=0)
    drawn = Counter(tuple(block.order for block in make_schedule(measure, seed).blocks) for seed in range(1200))
    assert len(drawn) == 6
    assert all(150 < number < 250 for number in drawn.values())
    odd = Measure(design="crossover", blocks=3, control_blocks=0)
    more = Counter(sum(block.order == ORDERS[0] for block in make_schedule(odd, seed).blocks) for seed in range(1000))
    assert set(more) == {1, 2}
    assert 430 < more[1] < 570
