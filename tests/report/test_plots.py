"""The plots draw what the analysis holds, and name what is missing."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlk_repro.report.figure import BOTTOM, LEFT, RIGHT, TOP, Figure
from rlk_repro.report.plots import make_figures, plot_steps, plot_trials
from rlk_repro.report.row_plots import plot_modules, plot_pairs
from rlk_repro.report.svg import MAX_LABEL, Scale, format_ticks, make_scale
from rlk_repro.report.view import make_view
from rlk_repro.rundir.results import Analysis
from tests.support.analysis_examples import EXAMPLES, all_fallback, faster, inconclusive, missing_metrics, with_failures


def _drawn(figure: Figure, tag: str, class_: str) -> list[ET.Element]:
    words = set(class_.split())
    return [item for item in ET.fromstring(figure.svg).iter(tag) if words <= set(item.get("class", "").split())]


def _with_step_times(analysis: Analysis, values: tuple[float | None, ...]) -> Analysis:
    first = analysis.trials[0]
    series = tuple(
        dataclasses.replace(item, values=values) if item.metric == "step_time_s" else item for item in first.series
    )
    return dataclasses.replace(analysis, trials=(dataclasses.replace(first, series=series), *analysis.trials[1:]))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "huge"])
def test_every_plot_is_xml_within_its_frame_or_a_sentence(name: str) -> None:
    for figure in make_figures(make_view(EXAMPLES[name]())):
        if not figure.svg:
            assert figure.caption.endswith("not recorded.")
            continue
        root = ET.fromstring(figure.svg)
        _, _, width, height = map(float, root.get("viewBox", "").split())
        for item in root.iter():
            for key, limit in (("x", width), ("cx", width), ("x1", width), ("y", height), ("cy", height)):
                assert 0 <= float(item.get(key, "0")) <= limit, (figure.key, item.attrib)


def test_ids_of_two_plots_do_not_clash() -> None:
    ids = [found for figure in make_figures(make_view(faster())) for found in re.findall(r' id="([^"]+)"', figure.svg)]
    assert len(set(ids)) == len(ids) > 0


def test_every_trial_is_a_mark_of_its_variant() -> None:
    figure = plot_trials(make_view(faster()), "step_time_s")
    assert len(_drawn(figure, "circle", "dot baseline")) == 14 + 1  # plus the legend's mark
    assert len(_drawn(figure, "polygon", "dot enabled")) == 6 + 1
    assert "n = 20 trials of 20 scored steps" in figure.caption
    assert "The axis does not start at 0." in figure.caption


def test_a_trial_without_a_value_is_a_cross_with_its_reason() -> None:
    figure = plot_trials(make_view(with_failures()), "step_time_s")
    tips = [title.text for item in _drawn(figure, "path", "absent") for title in item.iter("title")]
    assert tips == [
        "09-p1-enabled: out of memory, rank 3: torch.OutOfMemoryError while allocating 2.32 GiB",
        "14-p4-enabled: interrupted, SIGTERM from the scheduler, 120 s before the time limit",
        "19-p6-baseline: missing, never started",
    ]


def test_steps_are_drawn_per_trial_with_the_warm_up_shaded() -> None:
    figure = plot_steps(make_view(faster()), "step_time_s")
    assert len(_drawn(figure, "polyline", "path baseline")) == 14
    assert len(_drawn(figure, "polyline", "path enabled")) == 6
    (shade,) = _drawn(figure, "rect", "warmup")
    assert float(shade.get("x", "")) == LEFT
    assert float(shade.get("width", "")) == pytest.approx((RIGHT - LEFT) * 2 / 22, abs=0.1)
    assert figure.caption.endswith("Warm-up steps with values beyond the axis are not shown.")


def test_a_hole_in_a_series_breaks_its_line() -> None:
    analysis = _with_step_times(missing_metrics(), (50.0, 41.0, 42.0, None, 40.0, float("nan"), 41.0, 42.0))
    figure = plot_steps(make_view(analysis), "step_time_s")
    pieces = [item.get("points", "").split() for item in _drawn(figure, "polyline", "path baseline")]
    assert [len(points) for points in pieces[:2]] == [3, 2]
    assert len(_drawn(figure, "circle", "dot baseline")) == 1


def test_the_pair_plot_shows_pairs_limits_and_interval() -> None:
    figure = plot_pairs(make_view(faster()))
    assert len(_drawn(figure, "circle", "dot neutral")) == 6 + 1
    assert len(_drawn(figure, "circle", "dot hollow")) == 4 + 1
    assert len(_drawn(figure, "line", "floor")) == 2
    assert len(_drawn(figure, "line", "interval")) == 1
    assert figure.caption == (
        "The band is the smallest effect of interest, -0.99 % to +1.00 %. The dashed lines are the noise floor, "
        "-1.29 % to +1.31 %, from 4 control pairs. The diamond is the effect over n = 6 scored pairs with its "
        "95 % interval (paired t on log ratios)."
    )


def test_without_control_pairs_the_pair_plot_says_that_the_floor_was_not_measured() -> None:
    figure = plot_pairs(make_view(inconclusive()))
    assert "The noise floor was not measured." in figure.caption
    assert _drawn(figure, "line", "floor") == []


def test_a_void_pair_is_crossed_out_and_a_dropped_one_is_a_word() -> None:
    figure = plot_pairs(make_view(with_failures()))
    assert len(_drawn(figure, "path", "absent")) == 1
    assert [item.text for item in _drawn(figure, "text", "tick")].count("dropped") == 3


def test_a_run_of_control_pairs_alone_has_no_effect_row() -> None:
    figure = plot_pairs(make_view(all_fallback()))
    assert _drawn(figure, "polygon", "dot neutral") == []
    assert len(_drawn(figure, "circle", "dot hollow")) == 2 + 1


def test_module_times_start_at_0_and_are_said_to_nest() -> None:
    figure = plot_modules(make_view(faster()))
    assert "The axis starts at 0. A timer measures one function. The GRPO loss contains log-prob" in figure.caption
    labels = [item.text for item in _drawn(figure, "text", "tick")]
    assert labels[:4] == ["0", "1", "2", "3"]
    assert labels[4:7] == ["log-prob, forward", "log-prob, backward", "log-prob, no grad"]


def test_absurd_numbers_are_left_out_of_plots() -> None:
    analysis = _with_step_times(missing_metrics(), (1.7e308, -1.7e308, 41.0, 42.0))
    summary = dataclasses.replace(analysis.trials[0].summaries[0], mean=1.7e308, maximum=1.7e308)
    trial = dataclasses.replace(analysis.trials[0], summaries=(summary,))
    analysis = dataclasses.replace(analysis, trials=(trial, *analysis.trials[1:]))
    assert all("nan" not in figure.svg and "inf" not in figure.svg for figure in make_figures(make_view(analysis)))


def test_plots_without_data_are_sentences() -> None:
    captions = [figure.caption for figure in make_figures(make_view(missing_metrics())) if not figure.svg]
    assert captions == [
        "Module times: not recorded.",
        "Throughput: not recorded.",
        "Peak memory: not recorded.",
        "raw_reward: not recorded.",
        "train_rollout_logprob_abs_diff: not recorded.",
    ]


@given(st.lists(st.floats(-1e299, 1e299), min_size=1, max_size=20))
def test_a_scale_holds_its_values_and_has_labelled_ticks(values: list[float]) -> None:
    scale = make_scale(values, BOTTOM, TOP)
    assert all(TOP - 1e-6 <= scale(value) <= BOTTOM + 1e-6 for value in values)
    ticks = scale.ticks(5)
    assert 1 <= len(ticks) <= 11
    labels = format_ticks(ticks)
    assert len(set(labels)) == len(ticks)


@given(st.floats(1e-8, 1e9), st.floats(0, 1))
@example(1e-4, 0.0)
def test_the_margin_holds_every_label(value: float, spread: float) -> None:
    labels = format_ticks(make_scale((value, value * (1 + spread)), BOTTOM, TOP).ticks(5))
    assert max(map(len, labels)) <= MAX_LABEL
    shown = [float(label.replace(",", "")) for label in labels]
    assert shown == sorted(set(shown))


def test_a_difference_below_one_percent_does_not_fill_the_axis() -> None:
    """These memory peaks differ by 32 KiB, as on an H200; a plot once drew them far apart, with labels beyond the
    margin.
    """
    scale = make_scale((10.02714, 10.02717), BOTTOM, TOP)
    assert scale(10.02714) - scale(10.02717) < 1
    assert format_ticks(scale.ticks(5)) == ["9.95", "10.00", "10.05", "10.10"]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 10, "0 2 4 6 8 10"),
        (0, 1, "0.0 0.2 0.4 0.6 0.8 1.0"),
        (22_900, 26_100, "23,000 24,000 25,000 26,000"),
        (0.0114, 0.0131, "0.0115 0.0120 0.0125 0.0130"),
        (-6.7, 1.9, "-6 -4 -2 0"),
        (1_234_567, 1_300_000, "1.24e6 1.26e6 1.28e6 1.30e6"),
        (0.0000662, 0.0000665, "6.62e-5 6.63e-5 6.64e-5 6.65e-5"),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, labels: str) -> None:
    assert " ".join(format_ticks(Scale(low, high, 0, 1).ticks(5))) == labels
