"""The plots draw what the analysis holds, and name what is missing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlk_repro.replay.recorded import load_result
from rlk_repro.report.blocks import Figure
from rlk_repro.report.drawing import BOTTOM, MAX_LABEL, TOP, format_ticks, make_scale
from rlk_repro.report.plots import make_figures, plot_trials
from rlk_repro.report.stack import REST, list_parts
from rlk_repro.report.view import make_view
from tests import ROOT
from tests.support.analysis_examples import EXAMPLES, faster


def _drawn(figure: Figure, tag: str, class_: str) -> list[ET.Element]:
    words = set(class_.split())
    return [item for item in ET.fromstring(figure.svg).iter(tag) if words <= set(item.get("class", "").split())]


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "huge"])
def test_every_plot_is_xml_within_its_frame_or_a_sentence(name: str) -> None:
    for figure in make_figures(make_view(EXAMPLES[name]())):
        if not figure.svg:
            assert figure.caption.endswith("not recorded.") or "not compared, because " in figure.caption
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


@pytest.mark.parametrize("variant", ["baseline", "enabled"])
def test_the_parts_of_a_step_add_up_to_the_step(variant: str) -> None:
    view = make_view(load_result(ROOT / "docs" / "evidence" / "qwen3-4b-random-live-h200.tgz", is_linked=False)[0])
    parts = list_parts(view, variant)
    assert sum(parts.values()) == pytest.approx(view.mean("step_time_s", variant))
    assert {"weight sync", "optimizer", "log-probs of the loss", REST} <= set(parts)
    assert min(parts.values()) >= 0


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
