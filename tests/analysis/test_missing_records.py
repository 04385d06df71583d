"""No verdict rests on missing records: a gate that cannot compare is undecided and says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.bundle.seal import unpack
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, Gate, GateStatus, VerdictWord
from tests import ROOT
from tests.support.make_run import Recipe, finish_run, make_run

SESSIONS = ROOT / "docs" / "evidence" / "qwen3-4b-random-tp2-h100.tgz"
TWO_RANKS = ROOT / "docs" / "evidence" / "module-qwen3-4b-tp2-h200.tgz"
BASELINE, ENABLED = "00-p1-baseline", "01-p1-enabled"
GAIN = Recipe(speedup=1.2)
NOT_COMPARED = "the variants were not compared; missing: "
Change = Callable[[RunDir], None]
Event = dict[str, Any]


def gate_of(analysis: Analysis, name: str = "manifests") -> Gate:
    return next(gate for gate in analysis.gates if gate.name == name)


def strip(run_dir: RunDir) -> None:
    """Remove every record of what was started and where."""
    for trial in run_dir.trial_dirs():
        trial.command.unlink()
        trial.env.unlink()
        shutil.rmtree(trial.libraries)
    shutil.rmtree(run_dir.nodes)


def test_a_bundle_without_any_record_is_never_faster_and_its_report_says_what_is_only_planned(
    call, tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path / "id", GAIN, strip)
    analysis = analyse(run_dir)
    gate = gate_of(analysis)
    assert gate.status is GateStatus.UNDECIDED
    assert gate.detail.startswith(f"{NOT_COMPARED}trials/{BASELINE}/command.json, ")
    assert [item.found for item in analysis.findings] == ["missing"] * 20 + ["missing, and 16 more like this"]
    code, out, _ = call("report", str(finish_run(run_dir)), "-o", str(tmp_path / "out"))
    text = " ".join(out.split())
    expected = ("INCONCLUSIVE", "undecided gates: manifests")
    assert (code, [words for words in expected if words not in text]) == (0, [])
    assert "are equal outside the declared switches" not in text
    page = (tmp_path / "out" / "report.md").read_text()
    assert "- variants differ in: planned, but not recorded: VIME_RL_KERNEL" in page
    assert "## What differs between the variants, as planned" in page
    assert "What differs between the variants, as planned" in (tmp_path / "out" / "report.html").read_text()


def remove(name: str) -> Change:
    return lambda run_dir: (run_dir.trial(ENABLED).path / name).unlink()


def tear(name: str, text: str) -> Change:
    return lambda run_dir: write_text(run_dir.trial(BASELINE).path / name, text)


def swap_node(run_dir: RunDir) -> None:
    """Write the manifest of a node that did not take part."""
    path = run_dir.node("node0").preflight
    write_json(path, {**load_json(path), "allocation": "another"})


@pytest.mark.parametrize(
    ("change", "where"),
    [
        *((remove(name), f"trials/{ENABLED}/{name}") for name in ("command.json", "env.json", "libraries/0.json")),
        (tear("command.json", '{"schema": 1, "argv": ["a"'), f"trials/{BASELINE}/command.json"),
        (tear("command.json", '{"schema": 1, "argv": "a"}'), f"trials/{BASELINE}/command.json"),
        (tear("env.json", '{"schema": 1}'), f"trials/{BASELINE}/env.json"),
        (tear("env.json", "[]"), f"trials/{BASELINE}/env.json"),
        (tear("libraries/0.json", "[]"), f"trials/{BASELINE}/libraries/0.json"),
        (lambda run_dir: run_dir.node("node0").manifest.unlink(), "nodes: allocation a"),
        (swap_node, "nodes: allocation a"),
    ],
)
def test_every_single_record_is_needed(tmp_path: Path, change: Change, where: str) -> None:
    analysis = analyse(make_run(tmp_path / "id", GAIN, change))
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
    assert gate_of(analysis).detail == f"{NOT_COMPARED}{where}"
    assert where in {item.where for item in analysis.findings}


def test_a_pair_that_is_not_scored_needs_no_record(tmp_path: Path) -> None:
    recipe = Recipe(speedup=1.2, failed={ENABLED: "failed"})
    analysis = analyse(make_run(tmp_path / "id", recipe, remove("command.json")))
    assert gate_of(analysis).status is GateStatus.PASSED


def edit_rank(run_dir: RunDir, rank: int, change: Callable[[Event], Event | None]) -> RunDir:
    """Change or leave out events in the ops files of one rank."""
    for trial in run_dir.trial_dirs():
        path = trial.ops_file(rank)
        events = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps(event)}\n" for event in events if event is not None))
    return run_dir


def without(event: Event, *keys: str) -> Event:
    return {key: value for key, value in event.items() if key not in keys}


def without_one(event: Event) -> Event:
    return {**event, "counts": without(event["counts"], "compilations")} if "counts" in event else event


def without_comparison(event: Event) -> Event | None:
    return None if event["event"] == "shadow" else event


def without_any_sign(event: Event) -> Event | None:
    return without_comparison(without(event, "calls"))


LEFT_OUT: dict[str, tuple[str, Callable[[Event], Event | None], str]] = {
    "counts": ("blocks", lambda event: without(event, "counts"), "has no counts of compilations"),
    "one count": ("blocks", without_one, "has no counts of compilations"),
    "calls": ("sessions", lambda event: without(event, "calls"), "called on 1 of 2 ranks in step"),
    "calls and comparisons": ("sessions", without_any_sign, "called on 1 of 2 ranks in step"),
    "comparisons": ("same_numbers", without_comparison, "no comparison"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", LEFT_OUT)
def test_records_of_every_rank_are_needed(tmp_path: Path, what: str, rank: int) -> None:
    """Proof, calls, counts and comparisons are conditions of each rank."""
    name, change, words = LEFT_OUT[what]
    analysis = analyse(edit_rank(unpack(SESSIONS, tmp_path / "sessions"), rank, change))
    gate = gate_of(analysis, name)
    assert (analysis.verdict.word, gate.status) == (VerdictWord.INCONCLUSIVE, GateStatus.UNDECIDED)
    assert words in gate.detail + analysis.pairs[0].reason


def test_libraries_and_kernels_of_every_rank_are_needed_and_compared(tmp_path: Path) -> None:
    two_ranks = unpack(TWO_RANKS, tmp_path / "two-ranks")
    assert analyse(two_ranks).verdict.word is VerdictWord.FASTER
    path = two_ranks.trial(BASELINE).libraries_file(1)
    libraries = load_json(path)
    path.unlink()
    analysis = analyse(two_ranks)
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
    assert gate_of(analysis).detail == f"{NOT_COMPARED}trials/{BASELINE}/libraries/1.json"
    write_json(path, {**libraries, "torch": "another"})
    analysis = analyse(two_ranks)
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE
    assert "p1.libraries.1.torch" in {item.where for item in analysis.findings}
    write_json(path, libraries)
    edit_rank(two_ranks, 1, lambda event: None if event["event"] == "kernels" else event)
    analysis = analyse(two_ranks)
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
    assert all("ops/1.jsonl: has no list of kernels" in trial.proof_reason for trial in analysis.trials)


def test_a_switch_in_one_trial_of_a_control_pair_is_a_difference(tmp_path: Path) -> None:
    def switch_on(run_dir: RunDir) -> None:
        path = min(run_dir.trials.glob("*-c1-baseline/env.json"))
        value = load_json(path)
        write_json(path, {**value, "env": {**value["env"], "VIME_RL_KERNEL": "1"}})

    recipe = Recipe(speedup=1.2, settings=(*GAIN.settings, "measure.control_pairs=1"))
    analysis = analyse(make_run(tmp_path / "id", recipe, switch_on))
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE
    assert "c1.environment.VIME_RL_KERNEL" in {item.where for item in analysis.findings}
