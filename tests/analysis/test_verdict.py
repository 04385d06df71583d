"""These tests cover every branch of the verdict, its words, and the data that must never lead to a verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.results import PairStatus, ProofStatus, VerdictWord
from rlk_repro.spec import Measure
from tests.support.judged_pairs import (
    LEVELS,
    MEASURE,
    MadePair,
    around,
    change,
    judge_pairs,
    make_controls,
    make_pair,
    make_pairs,
)

FASTER, SLOWER, EQUIVALENT, INCONCLUSIVE, NOT_COMPARABLE, NO_COMPARISON = VerdictWord
RATIOS = st.lists(st.floats(0.5, 2.0), min_size=6, max_size=10)


RATIO = "step time ratio enabled / baseline"


@pytest.mark.parametrize(
    ("ratio", "proof", "reason", "word", "headline"),
    [
        (0.95, "proved", "", FASTER,
         f"enabled is faster than baseline: {RATIO} 0.9500 (95 % interval 0.9486 to 0.9514, "
         "6 pairs), wholly beyond the smallest effect of interest, 1 %"),
        (1.05, "proved", "", SLOWER, f"enabled is slower than baseline: {RATIO} 1.0500 ("),
        (1.0, "proved", "", EQUIVALENT,
         f"enabled and baseline are equivalent within 1 %: {RATIO} 1.0000 (95 % interval 0.9985 to 1.0015, 6 pairs)"),
        (0.99, "proved", "", INCONCLUSIVE,
         "inconclusive: too noisy to tell whether the change is within or beyond 1 %; "
         f"{RATIO} 0.9900 (95 % interval 0.9885 to 0.9915, 6 pairs)"),
        (0.5, "native", "", INCONCLUSIVE,
         "inconclusive: RL-Kernel's operators ran as plain PyTorch, so this run supports no verdict on speed; "
         f"{RATIO} 0.5000 ("),
        (0.95, "fallback", "ratio_kl fell back", NOT_COMPARABLE,
         "not comparable: rl_kernel_active: RL-Kernel did not run, or not everywhere, in p1"),
        (0.95, "missing", "no ops file", INCONCLUSIVE,
         "inconclusive: no proof that RL-Kernel ran in p1, p2, p3 and 3 more; no step time"),
    ],
)  # fmt: skip
def test_a_headline_has_the_word_and_its_reason(
    ratio: float, proof: str, reason: str, word: VerdictWord, headline: str
) -> None:
    pairs = make_pairs(*around(ratio), proof=ProofStatus(proof))
    if reason:
        pairs = [change(pair, status=PairStatus.VOID, reason=reason) for pair in pairs]
    verdict = judge_pairs(pairs).verdict
    assert verdict.word is word
    assert verdict.headline.startswith(headline)
    lost = f"6 of 6 planned pairs void: p1 ({reason}), p2" if reason else ""
    assert lost in verdict.headline


def test_identical_trials_are_equivalent_with_an_interval_without_width() -> None:
    judgement = judge_pairs(make_pairs(*[1.0] * 6))
    primary = judgement.effects[0]
    assert (primary.ratio, primary.low, primary.high, primary.p_value, primary.p_t) == (1.0, 1.0, 1.0, 1.0, None)
    assert judgement.verdict.word is EQUIVALENT


def test_the_noise_floor_replaces_a_smaller_effect_of_interest() -> None:
    controls = make_controls(1.01, 0.99, 1.02, 0.98, 1.005, 0.995)
    judgement = judge_pairs([*make_pairs(*around(0.985)), *controls])
    assert judgement.noise_floor.n == 6
    assert judgement.verdict.threshold == judgement.noise_floor.fraction == pytest.approx(0.0154, abs=1e-4)
    assert judgement.verdict.word is INCONCLUSIVE
    assert judgement.verdict.headline.startswith(
        "inconclusive: the interval is not wholly beyond the noise floor, 1.54 %, nor wholly within 1 %; step time"
    )
    faster = judge_pairs([*make_pairs(*around(0.95)), *controls]).verdict
    assert faster.word is FASTER
    assert faster.headline.endswith("wholly beyond the noise floor, 1.54 %")
    assert "noise floor 1.54 %, the farther end of the 95 % interval of 6 control pairs" in faster.reasons


def test_a_noise_floor_never_makes_equality_easier() -> None:
    judgement = judge_pairs([*make_pairs(*around(1.02)), *make_controls(1.1, 0.9, 1.05, 0.95)])
    assert (judgement.noise_floor.fraction or 0) > 0.1
    assert judgement.verdict.word is INCONCLUSIVE


@given(st.lists(st.floats(0.2, 5.0), max_size=5), st.floats(0.1, 3.0))
def test_fewer_than_six_pairs_never_yield_a_word_on_speed(ratios: list[float], smallest_pct: float) -> None:
    measure = Measure(pairs=max(1, len(ratios)), scored_steps=3, smallest_effect_pct=smallest_pct)
    verdict = judge_pairs(make_pairs(*ratios), measure=measure).verdict
    assert verdict.word is INCONCLUSIVE


@given(
    st.lists(st.fixed_dictionaries(dict.fromkeys(LEVELS, st.floats())), max_size=8), st.sampled_from([1e-9, 0.05, 0.4])
)
@settings(max_examples=100)
def test_no_number_in_a_log_makes_judging_crash(trials: list[dict[str, float]], alpha: float) -> None:
    pairs = [make_pair(f"p{index}", **levels) for index, levels in enumerate(trials)]  # type: ignore[arg-type]
    judgement = judge_pairs(pairs, measure=MEASURE.model_copy(update={"alpha": alpha}))
    numbers = [value for effect in judgement.effects for value in (effect.ratio, effect.low, effect.high)]
    numbers += [value for gate in judgement.gates for value in (gate.estimate, gate.low, gate.high)]
    assert all(value is None or math.isfinite(value) for value in [*numbers, judgement.verdict.threshold])
    assert judgement.verdict.headline.isprintable()


@given(RATIOS)
@settings(max_examples=20)
def test_a_failed_gate_always_wins(ratios: list[float]) -> None:
    measure = MEASURE.model_copy(update={"pairs": len(ratios)})
    options: tuple[tuple[dict[str, Any], list[Finding]], ...] = (
        ({"raw_reward": 0.3}, []),
        ({"peak_memory_bytes": 7e10}, []),
        ({}, [Finding(Level.BLOCKING, "gpu", "a", "b")]),
        ({"proof": ProofStatus.FALLBACK}, []),
    )
    for of_pairs, differences in options:
        pairs = make_pairs(*ratios, **of_pairs)
        judgement = judge_pairs(pairs, measure=measure, differences=differences)
        assert judgement.verdict.word is NOT_COMPARABLE


@given(RATIOS)
@settings(max_examples=50)
def test_swapping_the_variants_swaps_the_word(ratios: list[float]) -> None:
    measure = MEASURE.model_copy(update={"pairs": len(ratios)})
    swap = {FASTER: SLOWER, SLOWER: FASTER, EQUIVALENT: EQUIVALENT, INCONCLUSIVE: INCONCLUSIVE}
    one = judge_pairs(make_pairs(*ratios), measure=measure)
    effect = one.effects[0]
    edges = (1 / 1.01, 1.01)
    assume(all(abs((bound or 1) - edge) > 1e-9 for bound in (effect.low, effect.high) for edge in edges))
    other = judge_pairs(make_pairs(*(1 / ratio for ratio in ratios)), measure=measure)
    assert other.verdict.word is swap[one.verdict.word]


@given(st.permutations(range(8)))
@settings(max_examples=10)
def test_the_order_of_pairs_does_not_matter(order: list[int]) -> None:
    pairs = [*make_pairs(0.95, 0.97, 0.94, 0.96, 0.93, 0.955), *make_controls(1.01, 0.98)]
    expected, found = judge_pairs(pairs), judge_pairs([pairs[index] for index in order])
    assert (found.effects, found.noise_floor, found.verdict) == (
        (expected.effects, expected.noise_floor, expected.verdict)
    )


def fall_back(pair: MadePair) -> MadePair:
    return change(pair, is_control=True, control_reason="logp fell back everywhere")


def test_enabled_that_never_ran_shows_noise_and_no_speed() -> None:
    pairs = [fall_back(pair) for pair in make_pairs(*around(1.0), proof=ProofStatus.FALLBACK)]
    judgement = judge_pairs(pairs)
    assert judgement.verdict.word is NOT_COMPARABLE
    assert judgement.verdict.headline == (
        "enabled never ran RL-Kernel: it fell back in 6 of 6 planned pairs; "
        "6 control pairs show noise in step time of up to 0.152 % (95 % interval)"
    )
    assert judgement.verdict.reasons[:3] == (
        "failed: rl_kernel_active: RL-Kernel did not run, or not everywhere, in p1, p2, p3 and 3 more",
        "no pair was scored, so nothing else could be measured",
        "noise floor 0.152 %, the farther end of the 95 % interval of 6 control pairs",
    )
    assert "counted as control pairs: p1, p2, p3, p4, p5, p6: logp fell back everywhere" in judgement.verdict.reasons
    assert (judgement.effects[0].n, judgement.noise_floor.n, judgement.verdict.num_pairs) == (0, 6, 0)


@pytest.mark.parametrize("is_exploratory", [False, True])
def test_a_headline_says_what_was_enabled_if_it_is_not_rl_kernel(is_exploratory: bool) -> None:
    pairs, title = make_pairs(*around(0.5)), "torch.compile in place of vime's function"
    judgement = judge_pairs(pairs, title=title, serving="torch.compile", is_exploratory=is_exploratory)
    begin = "exploratory: " if is_exploratory else ""
    headline = judgement.verdict.headline
    assert headline.startswith(f"{begin}with torch.compile in place of vime's function, enabled is faster")
    details = [gate.detail for gate in judgement.gates]
    assert "torch.compile is proved to run in every scored pair" in details
    assert "RL-Kernel" not in " ".join([headline, *judgement.verdict.reasons, *details])


def test_only_dropped_pairs_are_inconclusive() -> None:
    pairs = [
        change(pair, status=PairStatus.DROPPED, reason="enabled: timeout", metrics=())
        for pair in make_pairs(1.0, 1.0, proof=ProofStatus.MISSING)
    ]
    verdict = judge_pairs(pairs, measure=MEASURE.model_copy(update={"pairs": 2})).verdict
    assert verdict.headline == (
        "inconclusive: no scored pair; no step time ratio, 0 pairs"
        "; 2 of 2 planned pairs dropped: p1 (enabled: timeout), p2 (enabled: timeout)"
    )


@pytest.mark.parametrize(
    ("controls", "noise"),
    [
        ((1.01, 0.99, 1.0), "3 control pairs show noise in step time of up to 2.52 % (95 % interval)"),
        ((), "noise not measured, 0 control pairs"),
    ],
)
def test_control_pairs_alone_measure_noise(controls: tuple[float, ...], noise: str) -> None:
    verdict = judge_pairs(make_controls(*controls)).verdict
    assert verdict.word is INCONCLUSIVE
    assert verdict.headline == f"no pair was planned to compare the variants: {noise}"


def stalling(ratio: float, slow: float) -> dict[str, list[float]]:
    return {"step_time_s": [60 * ratio, 60 * ratio, slow]}


def test_a_mean_that_is_shown_slower_withholds_the_word() -> None:
    pairs = [make_pair(f"p{i}", steps=stalling(ratio, 600.0)) for i, ratio in enumerate(around(0.95))]
    verdict = judge_pairs(pairs).verdict
    assert verdict.word is INCONCLUSIVE
    begin = "inconclusive: the medians and the means of the step time give different words; step time"
    assert verdict.headline.startswith(begin)
    assert "means, which count rare slow steps, instead of medians: " in " ".join(verdict.reasons)


def test_a_mean_that_only_seems_slower_is_in_the_headline() -> None:
    slow = (60.0, 60.0, 60.0, 60.0, 60.0, 2000.0)
    pairs = [make_pair(f"p{i}", steps=stalling(ratio, slow[i])) for i, ratio in enumerate(around(0.95))]
    verdict = judge_pairs(pairs).verdict
    assert verdict.word is FASTER
    assert "; means, which count rare slow steps, give 1." in verdict.headline


def test_secondary_effects_are_corrected_among_themselves() -> None:
    effects = judge_pairs(make_pairs(*around(0.95), peak_memory_bytes=5e10)).effects
    assert [(item.metric, item.role) for item in effects] == [
        ("step_time_s", "primary"),
        ("mean_step_time_s", "secondary"),
        ("peak_memory_bytes", "secondary"),
    ]
    primary, by_mean, memory = effects
    assert primary.p_holm is None
    assert by_mean.p_holm == by_mean.p_t
    assert (memory.p_t, memory.p_holm) == (None, None)
