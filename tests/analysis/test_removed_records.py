"""Records that are left out, and a seal made afterwards, make no verdict stronger."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import GateStatus, VerdictWord
from tests import ROOT
from tests.support.make_run import Recipe, make_run

BUNDLE = ROOT / "docs" / "evidence" / "qwen3-4b-random-tp2-h100.tgz"


def change_lines(file: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    changed = (change(json.loads(line)) for line in file.read_text().splitlines())
    file.write_text("".join(f"{json.dumps(line)}\n" for line in changed if line is not None))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    with tarfile.open(BUNDLE) as archive:
        archive.extractall(tmp_path, filter="data")
    return RunDir(tmp_path)


def test_a_rank_without_its_comparison_leaves_the_numbers_undecided(run_dir: RunDir) -> None:
    for file in run_dir.root.glob("trials/*/ops/1.jsonl"):
        change_lines(file, lambda line: None if line["event"] == "shadow" else line)
    analysis = analyse(run_dir)
    (gate,) = (gate for gate in analysis.gates if gate.name == "same_numbers")
    assert (gate.status, gate.detail) == (GateStatus.UNDECIDED, "s1, case as trained: rank 1 has no comparison")
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE


def test_without_counts_of_compilations_no_block_counts(run_dir: RunDir) -> None:
    for file in run_dir.root.glob("trials/*/ops/*.jsonl"):
        change_lines(file, lambda line: {key: value for key, value in line.items() if key != "counts"})
    analysis = analyse(run_dir)
    assert all("has no counts of compilations" in block.reason for block in analysis.blocks)
    assert analysis.verdict.word is not VerdictWord.FASTER


@pytest.mark.parametrize(
    ("key", "gate"),
    [
        ("'train/train_rollout_logprob_abs_diff'", "train_rollout_logprob_abs_diff"),
        ("'rollout/raw_reward'", "raw_reward"),
    ],
)
def test_a_metric_that_lacks_a_step_in_both_variants_leaves_its_gate_undecided(
    tmp_path: Path, key: str, gate: str
) -> None:
    make_run(tmp_path / "run", Recipe(speedup=1.2))
    run_dir = RunDir(tmp_path / "run")
    for log in run_dir.root.glob("trials/*/stdout.log"):
        lines = log.read_text().splitlines(keepends=True)
        last = max(number for number, line in enumerate(lines) if key in line)
        log.write_text("".join(lines[:last] + lines[last + 1 :]))
    analysis = analyse(run_dir)
    assert gate in {item.name for item in analysis.gates if item.status is GateStatus.UNDECIDED}
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
