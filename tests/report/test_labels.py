"""All formats of a report write foreign text and numbers in the same way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.report.labels import Numbers, clean, find_label, format_fixed, list_metrics, start_sentence
from rlk_repro.report.view import make_view
from tests.support.analysis_examples import missing_metrics, small


@given(st.text())
def test_cleaned_text_is_one_printable_line(text: str) -> None:
    cleaned = clean(text)
    assert cleaned.isprintable()
    assert clean(cleaned) == cleaned


@given(st.text(alphabet=st.characters(categories=("L", "N", "P", "S"))))
def test_text_without_anything_invisible_stays_as_it_is(text: str) -> None:
    assert clean(text) == text


def test_control_and_direction_characters_show_as_escapes() -> None:
    assert clean("a\nb\t c\x1b[31m\u202ed\ud800") == "a b c\\x1b[31m\\u202ed\\ud800"


def test_a_metric_has_one_number_of_decimals_in_the_whole_report() -> None:
    numbers = Numbers(small())
    assert numbers.format("step_time_s", 41.7) == "41.70"
    assert numbers.format("step_time_s", 9.87654) == "9.88"
    assert numbers.format("mean_step_time_s", 41.7) == "41.70"
    assert numbers.format("peak_memory_bytes", 61.4 * 2**30) == "61.40"


def test_a_missing_number_is_not_recorded_and_never_0() -> None:
    numbers = Numbers(missing_metrics())
    assert numbers.format("raw_reward", None) == "not recorded"
    assert numbers.format_range("raw_reward", []) == "not recorded"


def test_a_range_is_lowest_to_highest_or_the_one_value() -> None:
    numbers = Numbers(small())
    assert numbers.format_range("step_time_s", [41.2, 39.1, 40.0]) == "39.10 – 41.20"
    assert numbers.format_range("step_time_s", [41.2, 41.2]) == "41.20"


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


def test_a_printed_metric_names_its_keys_and_direction() -> None:
    throughput = find_label("tokens_per_s")
    assert throughput.sources == "perf/actor_train_tok_per_s and perf/actor_train_time and perf/step_time"
    assert (throughput.unit, throughput.better) == ("tokens/s", "higher")


def test_an_unknown_metric_is_called_by_its_name() -> None:
    view = make_view(small())
    assert view.name_with_unit("module_new_thing_s") == "module_new_thing_s (s)"
    assert find_label("module_new_thing_s").better == "lower"
    assert view.name_with_unit("surprise") == "surprise"


def test_the_report_speaks_of_every_known_metric() -> None:
    metrics = list_metrics(missing_metrics())
    assert {"step_time_s", "raw_reward", "peak_memory_bytes", "module_optimizer_s", "weight_sync_time_s"} <= set(
        metrics
    )
    assert len(set(metrics)) == len(metrics)


def test_a_sentence_starts_with_a_capital_letter_but_a_name_stays() -> None:
    assert start_sentence("the gate failed") == "The gate failed"
    assert start_sentence("peak_memory_bytes: too large") == "peak_memory_bytes: too large"
