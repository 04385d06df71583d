"""``diff`` compares the log-probs that the training engines of two bundles computed from the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.replay.engines import compare_engines
from rlk_repro.rundir.paths import RunDir
from tests.analysis.test_checks import BEGIN, SAMPLE, make_lines
from tests.test_plan import plan_smoke

PLAN = plan_smoke("measure.pairs=1", "workload.what_for=agreement")


def write(folder: Path, *trials: list[dict[str, Any]]) -> RunDir:
    run_dir = RunDir(folder)
    for trial, lines in zip(PLAN.trials, trials, strict=False):
        engines = run_dir.trial(trial.name).engines
        engines.mkdir(parents=True)
        (engines / "0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [BEGIN, *lines]))
    return run_dir


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "2 tokens bitwise equal"),
        ({"log_probs": [[-1.0, -2.00003]]},
         "1 of 2 tokens differ, mean 1.5e-05, largest 3e-05 at sample 0, position 1 of its response, token 1: "
         "within the contract"),
        ({"log_probs": [[-1.0, -2.5]]},
         "1 of 2 tokens differ, mean 0.25, largest 0.5 at sample 0, position 1 of its response, token 1: "
         "outside the contract"),
        ({"hash": "ac"}, "not compared, because the trials have different weights at this step"),
    ],
)  # fmt: skip
def test_each_trial_of_both_bundles_has_a_line(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    first = write(tmp_path / "first", make_lines(), make_lines())
    second = write(tmp_path / "second", make_lines(**changes))
    line = f"engines: 00-p1-baseline, step 0, log-probs of training, first against second bundle: {found}"
    assert list(compare_engines(PLAN, first, second)) == [line]


def test_other_tokens_are_not_compared(tmp_path: Path) -> None:
    lines = make_lines()
    lines[0] = lines[0] | {"samples": [SAMPLE | {"tokens": [5, 6, 7, 2]}]}
    (line,) = compare_engines(PLAN, write(tmp_path / "first", make_lines()), write(tmp_path / "second", lines))
    assert line.endswith(": not compared, because the trials have other tokens at this step")


def test_runs_without_a_record_of_engines_have_no_line(tmp_path: Path) -> None:
    assert list(compare_engines(PLAN, RunDir(tmp_path), RunDir(tmp_path))) == []
