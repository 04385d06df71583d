"""All formats of a report write foreign text and numbers in the same way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.report.labels import clean, format_fixed, list_metrics
from tests.support.analysis_examples import missing_metrics


@given(st.text())
def test_cleaned_text_is_one_printable_line(text: str) -> None:
    cleaned = clean(text)
    assert cleaned.isprintable()
    assert clean(cleaned) == cleaned


def test_control_and_direction_characters_show_as_escapes() -> None:
    assert clean("a\nb\t c\x1b[31m\u202ed\ud800") == "a b c\\x1b[31m\\u202ed\\ud800"


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (52310.4, 0, "52,310"),
        (0.0, 3, "0.000"),
        (0.00001, 3, "1.000e-05"),
        (-0.00001, 3, "-1.000e-05"),
        (0.0625, 4, "0.0625"),
        (float("nan"), 2, "nan"),
    ],
)
def test_small_numbers_are_not_rounded_away(value: float, decimals: int, text: str) -> None:
    assert format_fixed(value, decimals) == text


def test_the_report_speaks_of_every_known_metric() -> None:
    metrics = list_metrics(missing_metrics())
    assert {"step_time_s", "raw_reward", "peak_memory_bytes", "module_optimizer_s", "weight_sync_time_s"} <= set(
        metrics
    )
    assert len(set(metrics)) == len(metrics)
