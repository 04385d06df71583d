"""Which steps a profiler outside the trainer records."""

from __future__ import annotations

import pytest

from rlk_repro.integration.vime import ProfiledSteps


@pytest.mark.parametrize(
    ("steps", "expected"), [("2:5", [(1, True), (4, False)]), ("1:4", [(0, True), (3, False)]), ("", [])]
)
def test_recording_begins_before_the_first_and_ends_after_the_last(
    steps: str, expected: list[tuple[int, bool]]
) -> None:
    seen: list[tuple[int, bool]] = []
    for rollout_id in range(8):
        profiled = ProfiledSteps(steps, lambda is_on, number=rollout_id: seen.append((number, is_on)))  # type: ignore[misc]
        profiled.end_step(rollout_id)
    assert seen == expected
