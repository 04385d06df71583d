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
from rlk_repro.workloads.checkouts import FLAGS
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
    assert f"bundle `{context.bundle_id[:12]}`" in text


def test_a_summary_writes_no_file(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(EVIDENCE.iterdir())
    code, out, err = call("report", SESSIONS, "--summary")
    assert (code, err) == (0, "")
    assert "**Result: with RL-Kernel vime's loss functions alone take 78.10 % less time" in out
    assert "What this result does not show:" in out
    assert list(tmp_path.iterdir()) == []
    assert sorted(EVIDENCE.iterdir()) == before


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


def test_hardware_that_a_run_got_later_does_not_close_the_gate(call: Call) -> None:
    earlier, later = (str(EVIDENCE / f"qwen3-4b-random-{which}-h200.tgz") for which in ("gc-freeze", "five"))
    code, out, _ = call("diff", "--gate", earlier, later)
    assert (code, out.startswith("gate open: ")) == (0, True)


def test_the_gate_closes_for_another_experiment(call: Call) -> None:
    other = str(EVIDENCE / "module-qwen3-4b-sessions-entropy-h200.tgz")
    assert call("diff", "--gate", SESSIONS, other) == (
        1,
        "gate closed: the results cannot be judged: run.entropy_metric: False in the reference, "
        "True in the later result\n",
        "",
    )


def test_the_gate_closes_where_nothing_was_compared(call: Call) -> None:
    operators = str(EVIDENCE / "operators-h200.tgz")
    code, out, _ = call("diff", "--gate", operators, operators)
    said = "the reference has the verdict no comparison; the later result has the verdict no comparison"
    assert (code, said in out) == (1, True)


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


def test_the_differences_to_another_machine_fit_a_screen(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in FLAGS:
        monkeypatch.delenv(source.variable, raising=False)
    code, out, err = call("replay", str(EVIDENCE / "qwen3-4b-random-live-h200.tgz"))
    assert code == 3
    assert "python module vime: missing" in err
    assert len(out.splitlines()) <= 45
    assert out.index("inconclusive: too noisy to tell") < out.index("drift of this machine")
    assert " values differ or are missing here: " in out
    assert "blocking: gpu.count: expected 1, found 0" in out
