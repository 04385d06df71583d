"""The Markdown report equals one golden text, and no name can break its tables."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from rlk_repro.replay.recorded import load_result
from rlk_repro.report import Context
from rlk_repro.report.blocks import Figure
from rlk_repro.report.drawing import BOTTOM, MAX_LABEL, TOP, format_ticks, make_scale
from rlk_repro.report.labels import clean, format_fixed
from rlk_repro.report.markdown import escape_markdown, render_markdown
from rlk_repro.report.plots import make_figures, plot_trials
from rlk_repro.report.stack import REST, list_parts
from rlk_repro.report.terminal import print_summary
from rlk_repro.report.view import make_view
from rlk_repro.rundir.results import Analysis
from tests import ROOT
from tests.support.analysis_examples import EXAMPLES, faster, hostile, made


def _tables(text: str) -> list[list[str]]:
    tables: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            tables[-1].append(line)
        elif tables[-1]:
            tables.append([])
    return [table for table in tables if table]


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "huge"])
def test_every_row_of_a_table_has_as_many_cells_as_its_head(name: str) -> None:
    for table in _tables(render_markdown(EXAMPLES[name]())):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, table[0]


def test_hostile_names_do_not_become_markup() -> None:
    text = render_markdown(hostile())
    outside_code = re.sub(r"(`+).+?\1", "", text)
    assert "<script>" not in outside_code.replace(r"\<script\>", "")
    assert "\x1b" not in text


@given(st.text())
def test_escaped_text_has_no_live_markup(text: str) -> None:
    escaped = escape_markdown(text)
    assert "\n" not in escaped
    plain = re.sub(r"\\.", "", escaped.replace("<!-- -->", ""))
    assert plain.translate(str.maketrans("", "", "`*[]<>|&~\\")) == plain


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("step_time_s and _this_", r"step_time_s and \_this\_"),
        ("# not a heading", r"\# not a heading"),
        ("1. not a list", r"\1. not a list"),
        ("a | b", r"a \| b"),
        ("@team: #1 at www.site.example", "@<!-- -->team: #<!-- -->1 at www.<!-- -->site.example"),
        ("https://site.example GH-1 $x$", "https:<!-- -->//site.example GH-<!-- -->1 $<!-- -->x$<!-- -->"),
    ],
)
def test_only_what_would_be_markup_is_escaped(text: str, escaped: str) -> None:
    assert escape_markdown(text) == escaped


# All formats of a report write foreign text and numbers in the same way.


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


# The terminal summary is readable at 80 and 120 columns, with and without colour.

NAMES = [name for name in EXAMPLES if name != "huge"]


def _render(analysis: Analysis, width: int, *, is_coloured: bool = False, context: Context | None = None) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, force_terminal=is_coloured, no_color=not is_coloured)
    print_summary(analysis, console, context)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    text = _render(EXAMPLES[name](), width)
    assert max(cell_len(line) for line in text.splitlines() if not line.startswith("what now")) <= width
    assert "\x1b" not in text
    assert "…" not in text


def test_colour_adds_nothing_but_colour() -> None:
    coloured = _render(made("with-failures"), 80, is_coloured=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == _render(made("with-failures"), 80)
    assert coloured != _render(made("with-failures"), 80)


def test_markup_in_names_is_text() -> None:
    assert "lrow [bold]" in _render(hostile(), 120)


def test_the_next_commands_can_be_copied_whole() -> None:
    bundle = "runs/" + "long-" * 20 + "name/bundle.tgz"
    assert f" rlk-repro replay {bundle} --analyze-only\n" in _render(faster(), 80, context=Context(bundle=bundle))


# The plots draw what the analysis holds, and name what is missing.


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
    assert len(_drawn(figure, "circle", "dot baseline")) == 14
    assert len(_drawn(figure, "polygon", "dot enabled")) == 6
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
