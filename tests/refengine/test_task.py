"""The additions, their spelling and the rule that rewards them."""

from __future__ import annotations

import pytest

from rlk_repro.refengine import task


def test_questions_depend_on_seed_and_rollout_alone() -> None:
    first = task.make_questions(1, 2, 50, 99)
    assert task.make_questions(1, 2, 50, 99) == first
    assert task.make_questions(1, 3, 50, 99) != first
    assert task.make_questions(2, 2, 50, 99) != first
    assert task.make_questions(1, 2, 3, 99) == first[:3]


def test_every_answer_is_the_sum_and_operands_stay_in_range() -> None:
    for question in task.make_questions(5, 0, 200, 12):
        a, b = question.prompt.removesuffix("=").split("+")
        assert question.answer == str(int(a) + int(b))
        assert max(int(a), int(b)) <= 12


def test_text_survives_the_tokenizer_and_other_ids_read_as_unknown() -> None:
    assert task.decode(task.encode(task.SYMBOLS)) == task.SYMBOLS
    assert task.decode([task.END_ID, task.PAD_ID, len(task.SYMBOLS) + 2, 10_000]) == "$???"
    assert max(task.encode(task.SYMBOLS)) == len(task.SYMBOLS) + 1


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("17$", 1.0),
        ("17", 2 / 3),
        ("1$", 1 / 3),
        ("27$", 2 / 3),
        ("177$", 0.5),
        ("$", 0.0),
        ("71$", 1 / 3),
        ("17?$", 0.5),
    ],
)
def test_reward_is_the_share_of_right_positions(response: str, reward: float) -> None:
    assert task.score(response, "17") == reward
