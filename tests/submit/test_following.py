"""A submission is followed until its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.base.files import write_text
from rlk_repro.clusters.api import JobState, JobStatus
from rlk_repro.rundir import progress
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.progress import ProgressWriter
from rlk_repro.submit import sending
from rlk_repro.submit.sending import follow

LINE = b"[2026-11-20 13:45:12] train_metric_utils.py:50 - perf %d: {'perf/train_time': 1.5, 'perf/step_time': %s}\n"


@pytest.fixture(autouse=True)
def unthrottled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(sending, "LOOK_S", 0.0)


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


def test_the_cluster_is_asked_every_two_seconds_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: next(moments) * 0.25)
    asked: list[int] = []

    def poll() -> JobStatus:
        asked.append(1)
        return JobStatus(state=JobState.DONE if len(asked) == 3 else JobState.RUNNING)

    sleeps: list[float] = []
    follow(RunDir(tmp_path), poll, lambda _: None, sleep=sleeps.append)
    assert len(sleeps) > 4


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
