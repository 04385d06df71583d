"""One report per verdict word and kind of run reads as recorded; ``make goldens`` rewrites them.

Each text is the summary for a pull request, then what the terminal shows.
"""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Callable

import pytest
from rich.console import Console

from rlk_repro.replay.recorded import load_result
from rlk_repro.report.markdown import render_markdown, render_summary
from rlk_repro.report.terminal import print_summary
from rlk_repro.report.view import Context
from rlk_repro.rundir.results import Analysis
from tests import ROOT, TESTS
from tests.support import analysis_examples as made

FOLDER = TESTS / "assets" / "report"
RECORDED = {
    "faster": "qwen3-4b-random-five-h200",
    "faster-in-pairs": "module-qwen3-4b-pairs-h200",
    "inconclusive": "qwen3-4b-random-live-h200",
    "operators": "operators-h200",
    "agreement": "vime-agreement-r3-off-h200",
    "largest-microbatch": "qwen3-4b-memory-h200",
}
MADE: dict[str, Callable[[], Analysis]] = {
    "slower": made.slower,
    "equivalent": made.equivalent,
    "not-comparable": made.not_comparable,
    "failures": made.with_failures,
    "fallback": made.all_fallback,
}


def compare(name: str, text: str) -> None:
    file = FOLDER / f"{name}.txt"
    if os.environ.get("RLK_REPRO_GOLDENS") == "write":
        file.write_text(text, encoding="utf-8")
    recorded = file.read_text(encoding="utf-8")
    assert text == recorded, "\n".join(difflib.unified_diff(recorded.splitlines(), text.splitlines(), lineterm=""))


@pytest.mark.parametrize("name", [*RECORDED, *MADE])
def test_a_result_reads_as_recorded(name: str) -> None:
    if name in MADE:
        analysis, context = MADE[name](), Context()
    else:
        analysis, context = load_result(ROOT / "docs" / "evidence" / f"{RECORDED[name]}.tgz", is_linked=False)
    stream = io.StringIO()
    print_summary(analysis, Console(file=stream, width=100, highlight=False, no_color=True), context)
    compare(name, f"{render_summary(analysis, context)}\n\f\n{stream.getvalue()}".replace(f"{ROOT}/", ""))


def test_a_whole_report_reads_as_recorded() -> None:
    compare("small", render_markdown(made.small()))
