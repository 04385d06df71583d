"""``agreement`` on a real run of the reference trainer: sealed, read elsewhere, replayed, compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.rundir.paths import runs_root
from rlk_repro.spec.agreement import parse_contract

Call = Callable[..., tuple[int, str, str]]


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
