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
from rlk_repro.workloads import WORKLOADS
from tests.support.analysis_examples import EXAMPLES, all_fallback, faster, hostile, missing_metrics, with_failures

REFERENCE = WORKLOADS["reference"]

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


@pytest.mark.parametrize("name", NAMES)
def test_the_word_stands_alone_and_every_trial_is_listed(name: str) -> None:
    analysis = EXAMPLES[name]()
    text = _render(analysis, 120)
    assert f"\n{analysis.verdict.word.upper()}\n" in text
    assert all(f"{trial.index:02d}-" in text for trial in analysis.trials)


def test_colour_adds_nothing_but_colour() -> None:
    coloured = _render(with_failures(), 80, is_coloured=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == _render(with_failures(), 80)
    assert coloured != _render(with_failures(), 80)


def test_numbers_of_a_metric_stay_on_one_line() -> None:
    lines = _render(faster(), 80).splitlines()
    row = next(line for line in lines if line.startswith("step time (s)"))
    assert re.fullmatch(r"step time \(s\) +\d+\.\d\d\.\.\d+\.\d\d +\d+\.\d\d\.\.\d+\.\d\d +-\d\.\d\d %", row)


def test_missing_metrics_are_named() -> None:
    assert "not recorded: train_time_s, train_wait_time_s," in _render(missing_metrics(), 120)


def test_failures_come_with_their_reasons() -> None:
    text = _render(with_failures(), 80)
    assert "09-p1-enabled   out of memory   7/22  not recorded  missing" in text
    assert "- 09-p1-enabled: rank 3: torch.OutOfMemoryError while allocating 2.32 GiB" in text
    assert "- warning: nodes.node-1.gpu.driver: expected 575.57.08, found 580.65.06" in text


def test_the_reference_trainer_is_named_as_such() -> None:
    assert REFERENCE.WORDS.scope in _render(all_fallback(), 200)


def test_markup_in_names_is_text() -> None:
    assert "lrow [bold]" in _render(hostile(), 120)


def test_the_next_commands_can_be_copied_whole() -> None:
    bundle = "runs/" + "long-" * 20 + "name/bundle.tgz"
    assert f"\nrlk-repro replay {bundle} --analyze-only\n" in _render(faster(), 80, context=Context(bundle=bundle))
