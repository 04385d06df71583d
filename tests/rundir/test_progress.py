"""Live progress, as the leading agent writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk_repro.rundir import progress
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.progress import ProgressWriter
from rlk_repro.rundir.state import Phase, Progress, read_state
from rlk_repro.submit.sending import render_progress

LINE = b"[2026-11-20 13:45:12] train_metric_utils.py:50 - perf %d: {'perf/train_time': 1.5, 'perf/step_time': %s}\n"


@pytest.fixture(autouse=True)
def unthrottled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_INTERVAL_S", 0.0)


def read(run_dir: RunDir) -> Progress:
    state = read_state(run_dir)
    assert state is not None
    return state


def test_a_run_from_preflight_to_its_end(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert read_state(run_dir) is None
    writer = ProgressWriter(run_dir, num_trials=4, num_steps=10)
    writer.enter(Phase.PREFLIGHT)
    assert render_progress(read(run_dir)) == "preflight"
    writer.begin_trial("00-p1-baseline", 0, num_left=4)
    assert render_progress(read(run_dir)) == "trial 1/4 (00-p1-baseline)"
    writer.see_output(b"perf of nothing\n" + LINE % (3, b"2.0") + LINE % (4, b"2.5") + b"rollout 5: {}\n")
    assert render_progress(read(run_dir)) == (
        "trial 1/4 (00-p1-baseline) · step 5/10 · 2.50 s/step · about 1 min 28 s left"
    )
    writer.end_trial(30.0)
    writer.begin_trial("01-p1-enabled", 1, num_left=3)
    writer.see_output(LINE % (4, b"nan"))
    assert render_progress(read(run_dir)) == "trial 2/4 (01-p1-enabled) · about 1 min 30 s left"
    writer.see_output(LINE % (4, b"1e1"))
    assert render_progress(read(run_dir)).endswith("step 5/10 · 10.0 s/step · about 1 min 15 s left")
    writer.end(0, "sealed, 4 of 4 trials ok")
    assert render_progress(read(run_dir)) == "ended · sealed, 4 of 4 trials ok"
    assert read(run_dir).exit_code == 0
    assert Progress.from_json(read(run_dir).to_json()) == read(run_dir)


def test_steps_are_written_twice_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_INTERVAL_S", 1e9)
    writer = ProgressWriter(RunDir(tmp_path), num_trials=4, num_steps=10)
    writer.begin_trial("00-p1-baseline", 0, num_left=4)
    writer.see_output(LINE % (3, b"2.0"))
    assert read(RunDir(tmp_path)).step is None
