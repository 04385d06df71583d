"""One report per verdict word and kind of run reads as recorded; ``make goldens`` rewrites them.

Each text is the summary for a pull request, then what the terminal shows.
"""

from __future__ import annotations

import difflib
import io
import os

import pytest
from rich.console import Console

from rlk_repro.replay.recorded import load_result
from rlk_repro.report.markdown import render_markdown, render_summary
from rlk_repro.report.terminal import print_summary
from rlk_repro.report.view import Context
from tests import ROOT, TESTS
from tests.support.analysis_examples import made

GOLDENS = TESTS / "assets" / "reports.txt"
HEAD = "\N{SYMBOL FOR START OF HEADING}"
"""Stands before the name of a report and before its text."""
RECORDED = {
    "faster": "qwen3-4b-random-027c809-h200",
    "faster-in-pairs": "module-qwen3-4b-pairs-h200",
    "inconclusive": "qwen3-4b-random-live-h200",
    "operators": "operators-h200",
    "agreement": "vime-agreement-r3-off-h200",
    "largest-microbatch": "qwen3-4b-memory-h200",
}
MADE = {"slower": "slower", "equivalent": "equivalent", "not-comparable": "not-comparable", "failures": "with-failures",
        "fallback": "all-fallback"}  # fmt: skip


def load() -> dict[str, str]:
    parts = iter(GOLDENS.read_text(encoding="utf-8").split(HEAD)[1:])
    return {name.removesuffix("\n"): next(parts) for name in parts}


def compare(name: str, text: str) -> None:
    goldens = load()
    if os.environ.get("RLK_REPRO_GOLDENS") == "write":
        goldens[name] = text
        pieces = [f"{HEAD}{name}\n{HEAD}{goldens[name]}" for name in sorted(goldens)]
        GOLDENS.write_text("".join(pieces), encoding="utf-8")
    recorded = goldens[name]
    assert text == recorded, "\n".join(difflib.unified_diff(recorded.splitlines(), text.splitlines(), lineterm=""))


@pytest.mark.parametrize("name", [*RECORDED, *MADE])
def test_a_result_reads_as_recorded(name: str) -> None:
    if name in MADE:
        analysis, context = made(MADE[name]), Context()
    else:
        analysis, context = load_result(ROOT / "docs" / "evidence" / f"{RECORDED[name]}.tgz", is_linked=False)
    stream = io.StringIO()
    print_summary(analysis, Console(file=stream, width=100, highlight=False, no_color=True), context)
    compare(name, f"{render_summary(analysis, context)}\n\f\n{stream.getvalue()}".replace(f"{ROOT}/", ""))


def test_a_whole_report_reads_as_recorded() -> None:
    compare("small", render_markdown(made("small")))
