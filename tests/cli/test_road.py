"""All steps work with the real trainer: submit, seal, verify, re-analyse, replay, report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlk_repro.base.files import load_json
from rlk_repro.bundle.seal import open_bundle
from rlk_repro.rundir.paths import RunDir
from tests import ROOT
from tests.conftest import WEIRD_NAMES

SMALL = ["--pairs", "2", "--set", "measure.scored_steps=3", "--set", "measure.warmup_steps=1", "--exploratory",
         "--set", "workload.grpo.rollout_batch_size=2", "--set", "workload.model.hidden_size=32"]  # fmt: skip


def rlk_repro(*arguments: str, cwd: Path, code: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RLK_REPRO_RUNS": str(cwd / "runs")}
    environment["XDG_STATE_HOME"] = str(cwd / "state")
    argv = [sys.executable, "-m", "rlk_repro", *arguments]
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cwd = tmp_path_factory.mktemp("road") / f"{WEIRD_NAMES[1]} {WEIRD_NAMES[3]} ünï"
    cwd.mkdir()
    value = json.loads(rlk_repro("submit", "--run", "smoke", *SMALL, "--wait", "--json", cwd=cwd))
    return {**value, "cwd": str(cwd)}


def test_submit_ends_with_a_sealed_bundle_and_a_report(result: dict[str, str]) -> None:
    cwd = Path(result["cwd"])
    # The second headline follows make demo-rl-kernel, which leaves RL-Kernel in this environment.
    assert any(words in result["headline"] for words in ("never ran RL-Kernel", "ran as plain PyTorch"))
    assert (cwd / result["report"]).read_text().startswith("<!DOCTYPE html>")
    assert "every file matches the seal" in rlk_repro("verify", result["bundle"], cwd=cwd)
    assert "level: re-analysis, exact" in rlk_repro("replay", result["bundle"], "--analyze-only", cwd=cwd)
    assert not (cwd / "pwned").exists()


def test_no_folder_of_the_machine_is_in_the_bundle(result: dict[str, str]) -> None:
    places = [result["cwd"], sys.prefix, sys.base_prefix, sys.executable, f"{Path.home()}/"]
    with open_bundle(Path(result["cwd"]) / result["bundle"]) as run_dir:
        for path in filter(Path.is_file, run_dir.root.rglob("*")):
            text = path.read_text(errors="replace")
            assert [place for place in places if place in text] == [], path
        command = load_json(run_dir.trial("00-p1-baseline").command)
    assert command["argv"][:3] == ["{python}", "-m", "rlk_repro.refengine"]


def test_both_variants_printed_the_same_losses_from_one_seed(result: dict[str, str]) -> None:
    analysis = load_json(RunDir((Path(result["cwd"]) / result["bundle"]).parent).analysis)
    losses = {trial["name"]: next(item["values"] for item in trial["series"] if item["metric"] == "loss")
              for trial in analysis["trials"]}  # fmt: skip
    assert losses["00-p1-baseline"] == losses["01-p1-enabled"]
    assert losses["02-p2-enabled"] == losses["03-p2-baseline"]
    assert losses["00-p1-baseline"] != losses["03-p2-baseline"]


def test_a_full_replay_on_the_same_machine_is_bitwise(result: dict[str, str]) -> None:
    out = rlk_repro("replay", result["bundle"], "--yes", "--json", cwd=Path(result["cwd"]))
    assert json.loads(out)["level"] == "bitwise"


def test_stored_rollouts_feed_every_trial(tmp_path: Path) -> None:
    small = [*SMALL, "--pairs", "1", "--lane", "train-only"]
    out = rlk_repro("submit", "--run", "smoke", *small, "--wait", "--json", cwd=tmp_path)
    run_dir = RunDir((tmp_path / json.loads(out)["bundle"]).parent)
    assert sorted(path.name for path in run_dir.rollouts_of(1234).path.glob("*.pt")) == ["0.pt", "1.pt", "2.pt", "3.pt"]
    analysis = load_json(run_dir.analysis)
    assert {gate["name"]: gate["status"] for gate in analysis["gates"]}["raw_reward"] == "n/a"
