"""The Markdown report equals one golden text, and no name can break its tables."""

from __future__ import annotations

import difflib
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.report.markdown import code_span, escape_markdown, render_markdown
from tests import TESTS
from tests.support.analysis_examples import EXAMPLES, hostile, small

GOLDEN = TESTS / "assets" / "report" / "small.md"


def test_the_small_example_reads_as_recorded() -> None:
    text = render_markdown(small())
    if os.environ.get("RLK_REPRO_GOLDENS") == "write":
        GOLDEN.write_text(text, encoding="utf-8")
    recorded = GOLDEN.read_text(encoding="utf-8")
    assert text == recorded, "\n".join(difflib.unified_diff(recorded.splitlines(), text.splitlines(), lineterm=""))


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


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "huge"])
def test_the_text_names_word_and_every_trial(name: str) -> None:
    analysis = EXAMPLES[name]()
    text = render_markdown(analysis)
    assert text.splitlines()[0].endswith(f": {analysis.verdict.word}")
    assert all(f"{trial.index:02d}-" in text for trial in analysis.trials)


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


@pytest.mark.parametrize(("text", "span"), [("a", "`a`"), ("a`b", "`` a`b ``"), ("a|b", r"`a\|b`")])
def test_a_code_span_holds_any_text(text: str, span: str) -> None:
    assert code_span(text) == span
