"""The help of every command has an example that parses, and flags without a type."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from rlk_repro.cli import app
from rlk_repro.cli.commands import EXAMPLES
from rlk_repro.replay.gate import DiffGate, judge_analyses
from rlk_repro.replay.recorded import load_result
from rlk_repro.report.answer import describe_words
from rlk_repro.report.markdown import render_summary
from rlk_repro.rundir.paths import runs_root
from rlk_repro.rundir.results import Analysis
from rlk_repro.spec.agreement import parse_contract
from rlk_repro.statistics.stats import STEP_TIME
from tests import ROOT

Call = Callable[..., tuple[int, str, str]]
GROUP: Any = typer.main.get_command(app)


def list_commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from list_commands(command, (*words, name))
        else:
            yield " ".join((*words, name))


def test_every_command_has_an_example() -> None:
    assert sorted(EXAMPLES) == sorted(list_commands(GROUP))


@pytest.mark.parametrize("words", sorted(EXAMPLES))
def test_help_shows_the_example_and_no_type_of_a_flag(call: Call, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = call(*words.split(), "-h")
    assert code == 0
    assert f"Example: {EXAMPLES[words]}" in out
    assert "<bool>" not in out


@pytest.mark.parametrize("words", sorted(EXAMPLES))
def test_an_example_parses(words: str) -> None:
    line = shlex.split(EXAMPLES[words])[1:]
    assert line[: len(words.split())] == words.split()
    context, group = GROUP.make_context("rlk-repro", list(line), resilient_parsing=True), GROUP
    for name in words.split():
        command = group.get_command(context, name)
        rest = line[line.index(name) + 1 :]
        parent, group = context, command
        context = command.make_context(name, list(rest), parent=parent, resilient_parsing=hasattr(command, "commands"))


# A newcomer's first commands work as typed.


@pytest.fixture
def without_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("without_clients")
def test_a_submission_away_from_the_cluster_says_where_to_go(call) -> None:
    code, _, err = call("submit", "--cluster", "slurm", "--run", "qwen3-30b-a3b")
    assert code == 2
    assert "--profile: needed for cluster slurm, expected a file, or one of generic-a100" in err
    assert "this machine has no sbatch: submit on the cluster, or make a profile there" in err


def test_a_run_is_named_with_or_without_a_flag(call) -> None:
    code, out, _ = call("submit", "smoke", "--dry-run")
    assert code == 0
    assert call("submit", "--run", "smoke", "--dry-run")[1].splitlines()[0] == out.splitlines()[0]
    code, _, err = call("submit", "smoke", "--run", "learn", "--dry-run")
    assert (code, "--run: names another run than the argument, got 'learn', expected smoke" in err) == (2, True)
    code, _, err = call("submit", "--dry-run")
    assert (code, "RUN: missing, expected a file, or one of " in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("qwen3-30b",), "did you mean 'qwen3-30b-a3b'?"),
        (("qwen3-4",), "did you mean 'qwen3-4b'?"),
        (("vime-train",), "did you mean 'vime-train-only'?"),
        (("smoek",), "did you mean 'smoke'?"),
        (("smoke", "--hardware", "b300"), "to add hardware, copy "),
        (("smoke", "--stack", "2026"), "did you mean '2026-07'?"),
    ],
)
def test_an_unknown_name_is_answered_with_a_similar_one(call, arguments: tuple[str, ...], hint: str) -> None:
    code, _, err = call("submit", *arguments, "--dry-run")
    assert code == 2
    assert hint in err


def test_a_run_that_ended_without_its_agent_shows_the_end_of_its_output(tmp_path: Path) -> None:
    from rlk_repro.submit.finishing import MAX_SHOWN_LINES, _read_end

    log = tmp_path / "slurm.log"
    assert _read_end(log) == ()
    secret = "gh" + "p_" + "a" * 36
    log.write_text("".join(f"line {number}\n\n" for number in range(50)) + f"No module named rlk_repro {secret}\n")
    shown = _read_end(log)
    assert len(shown) == MAX_SHOWN_LINES
    assert shown[-1].startswith("No module named rlk_repro <redacted:")


# Continuous integration gets from bundles a summary for a pull request, JSON by its schema, and a gate.


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


# ``agreement`` on a real run of the reference trainer: sealed, read elsewhere, replayed, compared.


@pytest.fixture
def bundle(call: Call) -> Path:
    code, _, error = call("submit", "agreement-smoke", "--cluster", "local", "--wait")
    assert code == 0, error
    return next(runs_root().glob("agreement-smoke/*/bundle.tgz"))


def test_the_engines_of_a_sealed_run_agree_here_and_elsewhere(call: Call, bundle: Path, tmp_path: Path) -> None:
    code, told, error = call("agreement", str(bundle), "--fail-on", "outside")
    assert (code, error) == (0, "")
    assert told.splitlines()[-1].endswith("not measured")
    for text in ("log-probs", "Whether engines agree"):
        assert text in told
    elsewhere = tmp_path / "elsewhere.tgz"
    shutil.copy(bundle, elsewhere)
    assert call("agreement", str(elsewhere))[1] == told
    answer = json.loads(call("agreement", str(bundle), "--json")[1])
    checks = answer["checks"]
    assert answer["is_other_contract"] is False
    assert {item["word"] for item in checks} == {"pass", "not measured"}
    assert {item["variant"] for item in checks} == {"baseline", "enabled", "both"}
    assert call("agreement", str(bundle), "--fail-on", "not-measured")[0] == 1

    assert call("verify", str(bundle))[0] == 0
    code, told, _ = call("replay", str(bundle), "--analyze-only", "--json")
    result = json.loads(told)
    assert (code, result["verdict"]) == (0, "no comparison")
    assert result["headline"] == f"engines agree within the contract: {answer['summary']}"
    assert f"engines: 0 of {len(checks)} checks changed their result" in call("diff", str(bundle), str(elsewhere))[1]
    assert call("report", str(bundle), "-o", str(tmp_path / "report"))[0] == 0
    page = next((tmp_path / "report").glob("*.html")).read_text()
    assert "Where drift starts" in page
    assert "an agreement run measures no time" in page
    assert 'id="effects"' not in page
    assert 'id="gates"' not in page
    assert call("index", str(bundle), "-o", str(tmp_path / "site"))[0] == 0
    assert "pass: " in (tmp_path / "site" / "index.html").read_text()


def test_stored_rollouts_record_the_weights_of_training_and_another_contract_is_told(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = call("submit", "agreement-smoke", "--cluster", "local", "--wait", "--lane", "train-only")
    assert code == 0, error
    run_dir = next(runs_root().glob("agreement-smoke/*/plan.json")).parent
    for path in run_dir.glob("trials/*/engines/0.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert {line["engine"] for line in lines if line["event"] == "weights"} == {"training"}
    told = "the bundle records another contract than this version's"
    assert told not in call("agreement", str(run_dir))[1]
    shipped = parse_contract("agreement.yaml", "bounds: []")
    monkeypatch.setattr("rlk_repro.analysis.checks.load_contract", lambda: shipped)
    code, out, _ = call("agreement", str(run_dir))
    assert (code, told in out) == (1, True)
    for command in ("report", "index"):
        assert call(command, str(run_dir), "-o", str(run_dir / "report"))[0] == 1
    assert call("diff", str(run_dir), str(run_dir))[0] == 1
    assert call("replay", str(run_dir), "--analyze-only")[0] == 1


def test_a_run_with_sessions_or_many_pairs_cannot_be_one(call: Call) -> None:
    for settings, found in (
        (("--pairs", "6"), "measure.pairs: a run with what_for: agreement measures no time"),
        (("--set", "measure.design=crossover", "--set", "measure.warmup_steps=2", "--exploratory"), "measure.design"),
    ):
        code, _, error = call("submit", "agreement-smoke", "--cluster", "local", "--dry-run", *settings)
        assert (code, found in error) == (2, True), error
