"""The plots draw what the analysis holds, and name what is missing."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlk_repro.report.figure import BOTTOM, TOP, Figure
from rlk_repro.report.plots import make_figures, plot_trials
from rlk_repro.report.svg import MAX_LABEL, Scale, format_ticks, make_scale
from rlk_repro.report.view import make_view
from rlk_repro.rundir.results import Analysis
from tests.support.analysis_examples import EXAMPLES, faster, missing_metrics


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


def test_absurd_numbers_are_left_out_of_plots() -> None:
    analysis = _with_step_times(missing_metrics(), (1.7e308, -1.7e308, 41.0, 42.0))
    summary = dataclasses.replace(analysis.trials[0].summaries[0], mean=1.7e308, maximum=1.7e308)
    trial = dataclasses.replace(analysis.trials[0], summaries=(summary,))
    analysis = dataclasses.replace(analysis, trials=(trial, *analysis.trials[1:]))
    assert all("nan" not in figure.svg and "inf" not in figure.svg for figure in make_figures(make_view(analysis)))


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
