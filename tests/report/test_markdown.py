"""The Markdown report equals one golden text, and no name can break its tables."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.report.markdown import escape_markdown, render_markdown
from tests.support.analysis_examples import EXAMPLES, hostile


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
