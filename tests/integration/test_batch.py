"""Where the old log-probs of a microbatch belong among its packed rows, and when there are none to take.

A wrong place would change no number, since rows that are far off are computed again: only these tests see it.
"""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from rlk_repro.integration.route.batch import CurrentBatch

LENGTHS = ((7, 3), (4, 0), (9, 5))  # prompt and response together, response
NUM_ROWS = 24  # with four of padding


def make_batch(**changes: Any) -> dict[str, Any]:
    return {
        "log_probs": [torch.full((response,), -1.0 - index) for index, (_, response) in enumerate(LENGTHS)],
        "rollout_log_probs": [torch.full((response,), -9.0) for _, response in LENGTHS],
        "total_lengths": [total for total, _ in LENGTHS],
        "response_lengths": [response for _, response in LENGTHS],
    } | changes


def find(batch: dict[str, Any], num_rows: int = NUM_ROWS, **options: Any) -> torch.Tensor | None:
    current = CurrentBatch()
    with current.hold(argparse.Namespace(**options), batch):
        return current.find_old_log_probs(num_rows)


def test_they_stand_in_the_rows_that_predict_the_response() -> None:
    found = find(make_batch())
    assert found is not None
    assert found.tolist() == [0, 0, 0, -1, -1, -1, 0, *[0] * 4, 0, 0, 0, -3, -3, -3, -3, -3, 0, *[0] * 4]


def test_they_are_the_rollout_s_where_the_loss_takes_those() -> None:
    found = find(make_batch(), use_rollout_logprobs=True)
    assert found is not None
    assert set(found.tolist()) == {0.0, -9.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"log_probs": None},
        {"log_probs": []},
        {"response_lengths": [3, 0, 4]},
        {"total_lengths": [7, 4, 90]},
        {"total_lengths": [3, 4, 9]},
    ],
    ids=["absent", "empty", "other lengths", "more rows than there are", "no prompt"],
)
def test_an_unknown_layout_gives_no_old_log_probs(changes: dict[str, Any]) -> None:
    assert find(make_batch(**changes)) is None
