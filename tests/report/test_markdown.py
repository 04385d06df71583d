"""The Markdown report equals one golden text, and no name can break its tables."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from rlk_repro.report import Context
from rlk_repro.report.labels import clean, format_fixed
from rlk_repro.report.markdown import escape_markdown, render_markdown
from rlk_repro.report.terminal import print_summary
from rlk_repro.rundir.results import Analysis
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
