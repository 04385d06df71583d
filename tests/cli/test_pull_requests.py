"""Continuous integration gets from bundles a summary for a pull request, JSON by its schema, and a gate."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlk_repro.replay.gate import DiffGate, judge_analyses
from rlk_repro.replay.recorded import load_result
from rlk_repro.report.answer import describe_words
from rlk_repro.report.markdown import render_summary
from rlk_repro.rundir.results import Analysis
from rlk_repro.statistics.stats import STEP_TIME
from tests import ROOT

Call = Callable[..., tuple[int, str, str]]
EVIDENCE = ROOT / "docs" / "evidence"
BUNDLES = sorted(EVIDENCE.glob("*.tgz"))
SESSIONS, REPLAY = (str(EVIDENCE / f"module-qwen3-4b-{which}-h200.tgz") for which in ("sessions", "replay"))
MARGIN = 0.01


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return load_result(Path(SESSIONS), is_linked=False)[0]


def shift(analysis: Analysis, factor: float) -> Analysis:
    """Return the same result, with the step time ratio and its interval multiplied by ``factor``."""
    effects = [
        replace(item, ratio=item.ratio * factor, low=item.low * factor, high=item.high * factor)
        if item.metric == STEP_TIME and item.ratio and item.low and item.high
        else item
        for item in analysis.effects
    ]
    return replace(analysis, effects=tuple(effects))


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.stem)
def test_a_summary_fits_a_pull_request(bundle: Path) -> None:
    found, context = load_result(bundle, is_linked=False)
    text = render_summary(found, context)
    assert len(text.splitlines()) <= 60
    assert len(text) < 65_536
    assert text.startswith(f"### {found.run}: {describe_words(found)}")
    assert f"(id {context.bundle_id[:12]})" in text


def test_the_json_of_a_report_has_its_result(call: Call) -> None:
    code, out, _ = call("report", SESSIONS, str(EVIDENCE / "operators-h200.tgz"), "--summary", "--json")
    records = json.loads(out)
    assert code == 0
    assert [record["verdict"] for record in records] == ["faster", "no comparison"]
    assert records[0]["bundle_id"].startswith("23fb06c17127")
    assert records[0]["report"] == ""
    assert {effect["metric"]: effect["n"] for effect in records[0]["effects"]}[STEP_TIME] == 4


def test_the_gate_opens_for_a_result_that_is_not_worse(call: Call) -> None:
    code, out, _ = call("diff", "--gate", REPLAY, SESSIONS)
    assert code == 0
    assert out.startswith(
        "gate open: the later result is not worse by more than 1 %: step time ratio 0.2212 in the reference, "
        "0.219 in the later result;"
    )
    gate = json.loads(call("diff", "--gate", SESSIONS, SESSIONS, "--json")[1])
    assert (gate["is_open"], gate["reference_verdict"], gate["later_verdict"]) == (True, "faster", "faster")


def test_the_gate_closes_for_another_experiment(call: Call) -> None:
    other = str(EVIDENCE / "module-qwen3-4b-sessions-entropy-h200.tgz")
    assert call("diff", "--gate", SESSIONS, other) == (
        1,
        "gate closed: the results cannot be judged: run.entropy_metric: False in the reference, "
        "True in the later result\n",
        "",
    )


@pytest.mark.parametrize(
    ("change", "is_open", "words"),
    [
        (1.0, True, "gate open: the later result is not worse by more than 1 %"),
        (0.9, True, "gate open: the later result is not worse by more than 1 %"),
        (1.009, True, "gate open: it is undecided whether the later result is worse"),
        (1.03, False, "gate closed: the later result is worse by more than 1 %"),
    ],
)
def test_only_a_shown_loss_beyond_the_margin_closes_the_gate(
    analysis: Analysis, change: float, is_open: bool, words: str
) -> None:
    gate: DiffGate = judge_analyses(analysis, shift(analysis, change), MARGIN)
    assert gate.is_open is is_open
    assert gate.line.startswith(words)
    assert math.log(change) > math.log1p(MARGIN) or is_open
