"""The leading agent writes its progress, and a submission is followed until its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.base.files import write_text
from rlk_repro.clusters.api import JobState, JobStatus
from rlk_repro.rundir import state
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import Phase, Progress, ProgressWriter, read_last_word, read_state
from rlk_repro.submit import sending
from rlk_repro.submit.sending import follow, render_progress

LINE = b"[2026-11-20 13:45:12] train_metric_utils.py:50 - perf %d: {'perf/train_time': 1.5, 'perf/step_time': %s}\n"


@pytest.fixture(autouse=True)
def unthrottled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(sending, "LOOK_S", 0.0)


def read(run_dir: RunDir) -> Progress:
    found = read_state(run_dir)
    assert found is not None
    return found


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
    monkeypatch.setattr(state, "MIN_INTERVAL_S", 1e9)
    writer = ProgressWriter(RunDir(tmp_path), num_trials=4, num_steps=10)
    writer.begin_trial("00-p1-baseline", 0, num_left=4)
    writer.see_output(LINE % (3, b"2.0"))
    assert read(RunDir(tmp_path)).step is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 9}', '{"schema": 1, "phase": "odd"}'])
def test_an_unreadable_state_file_counts_as_absent(tmp_path: Path, text: str) -> None:
    write_text(RunDir(tmp_path).state, text)
    assert read_state(RunDir(tmp_path)) is None
    assert read_last_word(RunDir(tmp_path)).exit_code is None


def script(run_dir: RunDir, writer: ProgressWriter) -> Iterator[JobStatus]:
    yield JobStatus(state=JobState.PENDING)
    yield JobStatus(state=JobState.RUNNING)
    writer.begin_trial("00-p1-baseline", 0, num_left=1)
    yield JobStatus(state=JobState.RUNNING)
    writer.see_output(LINE % (0, b"1.0"))
    yield JobStatus(state=JobState.RUNNING)
    writer.see_output(LINE % (1, b"1.0"))
    yield JobStatus(state=JobState.RUNNING)
    writer.end(0, "sealed")
    yield JobStatus(state=JobState.DONE)


@pytest.mark.parametrize("is_live", [False, True])
def test_following_reports_each_change_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_live: bool) -> None:
    monkeypatch.setattr(sending, "POLL_S", 0.0)
    run_dir = RunDir(tmp_path)
    steps = script(run_dir, ProgressWriter(run_dir, num_trials=1, num_steps=2))
    told: list[str] = []
    status = follow(run_dir, lambda: next(steps), told.append, is_live=is_live, sleep=lambda _: None)
    assert status.state is JobState.DONE
    trial = "trial 1/1 (00-p1-baseline)"
    details = [f"{trial} · step 1/2 · 1.00 s/step · about 1.00 s left",
               f"{trial} · step 2/2 · 1.00 s/step · about 0.00 s left"]  # fmt: skip
    assert told == ["pending", "running", trial, *(details if is_live else []), "ended · sealed"]


def test_following_ends_for_a_submission_that_stays_unknown(tmp_path: Path) -> None:
    status = follow(RunDir(tmp_path), lambda: JobStatus(state=JobState.UNKNOWN), lambda _: None, sleep=lambda _: None)
    assert status.state is JobState.UNKNOWN


@pytest.mark.parametrize(("is_sealed", "last"), [(False, "ended"), (True, "ended · nothing was fit")])
def test_following_leaves_the_reason_of_an_unsealed_end_to_its_caller(
    tmp_path: Path, is_sealed: bool, last: str
) -> None:
    run_dir = RunDir(tmp_path)
    ProgressWriter(run_dir, num_trials=1, num_steps=2).end(3, "nothing was fit")
    if is_sealed:
        write_text(run_dir.checksums, "")
    told: list[str] = []
    follow(run_dir, lambda: JobStatus(state=JobState.FAILED), told.append, sleep=lambda _: None)
    assert told == [last]
