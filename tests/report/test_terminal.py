"""The terminal summary is readable at 80 and 120 columns, with and without colour."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from rlk_repro.report import Context
from rlk_repro.report.terminal import print_summary
from rlk_repro.rundir.results import Analysis
from tests.support.analysis_examples import EXAMPLES, faster, hostile, with_failures

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
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    assert "…" not in text


def test_colour_adds_nothing_but_colour() -> None:
    coloured = _render(with_failures(), 80, is_coloured=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == _render(with_failures(), 80)
    assert coloured != _render(with_failures(), 80)


def test_markup_in_names_is_text() -> None:
    assert "lrow [bold]" in _render(hostile(), 120)


def test_the_next_commands_can_be_copied_whole() -> None:
    bundle = "runs/" + "long-" * 20 + "name/bundle.tgz"
    assert f"\nrlk-repro replay {bundle} --analyze-only\n" in _render(faster(), 80, context=Context(bundle=bundle))
