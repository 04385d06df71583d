"""A request becomes a submission and is followed, with the local backend and agents that do nothing or fail."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import pytest

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, RlkReproError, SpecError
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.clusters import local
from rlk_repro.clusters.api import Submission
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.rundir.state import Phase, Progress
from rlk_repro.submit import finishing, planning, sending
from tests.support.job_examples import make_staged

HERE = {"host": platform.node()}
GONE = Submission(cluster="local", job_id="4194304:1", submitted_at="now", details=HERE)


def make_submitted(submission: Submission = GONE) -> RunDir:
    _, run_dir = make_staged(runs_root() / "smoke" / "20261120T000000Z-made")
    sending.record_submission(run_dir, submission)
    return run_dir


def end(run_dir: RunDir, exit_code: int, message: str) -> None:
    state = Progress(phase=Phase.ENDED, num_trials=4, num_steps=3, exit_code=exit_code, message=message)
    write_json(run_dir.state, state.to_json())


def explain(run_dir: RunDir) -> RlkReproError:
    with pytest.raises(RlkReproError) as caught:
        finishing.finish(sending.Launched(run_dir=run_dir, submission=GONE))
    return caught.value


def test_the_hint_of_an_agents_error_stays_a_hint(call) -> None:
    run_dir = make_submitted()
    end(run_dir, 3, "preflight: disk: is full\npython: is old\n  hint: read docs/preflight.md")
    error = explain(run_dir)
    assert type(error) is EnvironmentMissing
    first, second = error.problems
    assert (first.hint, second.what, second.hint) == (None, "python: is old", "read docs/preflight.md")
    told = "preflight: disk: is full; python: is old; hint: read docs/preflight.md"
    assert call("status")[1].splitlines()[:2] == [f"{run_dir.run_id}: failed ({told})", f"  ended · {told}"]


def test_a_plan_that_can_never_run_is_refused_before_anything_is_written() -> None:
    expected = "layouts.cpu.num_nodes: the reference trainer is one process on one device"
    with pytest.raises(SpecError, match=expected):
        planning.prepare(planning.Request(run="smoke", settings=("layouts.cpu.num_nodes=4",)))
    assert not runs_root().exists()


def test_a_run_that_is_not_prepared_names_the_command_with_the_options_of_submit() -> None:
    settings = ("measure.sessions=4", "gc_freeze=false")
    prepared = planning.prepare(
        planning.Request(run="qwen3-4b-random", hardware="h200", stack="vime-host", settings=settings)
    )
    with pytest.raises(EnvironmentMissing) as caught:
        sending.submit(prepared)
    told = [f"the run's {kind} is not prepared" for kind in ("model", "checkpoint", "rollouts")]
    assert [item.what for item in caught.value.problems] == told
    assert not runs_root().exists()
    assert caught.value.problems[0].hint == (
        "rlk-repro prepare qwen3-4b-random --hardware h200 --stack vime-host "
        "--set measure.sessions=4 --set gc_freeze=false"
    )


def test_a_resumed_run_sends_the_job_again_and_keeps_its_replay_of(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_submitted(dataclasses.replace(GONE, details={**HERE, "replay_of": "abc"}))
    write_text(run_dir.job / "of an older version", "x")
    prepared = planning.prepare_resume(run_dir.run_id)
    assert prepared.job == local.render(Plan.load(run_dir.plan), run_dir)
    assert (run_dir.job / "of an older version").exists()
    monkeypatch.setattr(local, "submit", lambda *_: dataclasses.replace(GONE, job_id="7:7"))
    launched = sending.submit(prepared)
    assert {path.name: path.read_text() for path in run_dir.job.iterdir()} == dict(prepared.job.files)
    assert load_json(run_dir.submission)["details"] == {**HERE, "replay_of": "abc"}
    assert launched.submission.job_id == "7:7"


def test_resuming_requires_the_cluster_like_submitting(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_submitted()
    before = load_json(run_dir.submission)
    monkeypatch.setattr(local, "available", lambda: "closed today")
    with pytest.raises(EnvironmentMissing) as caught:
        sending.submit(planning.prepare_resume(run_dir.run_id))
    assert str(caught.value) == "local: closed today\n  hint: --dry-run works anywhere"
    assert load_json(run_dir.submission) == before


@pytest.mark.parametrize("code", [1, 2, 3, 5, 70])
def test_the_exit_code_is_the_agents(code: int) -> None:
    run_dir = make_submitted()
    end(run_dir, code, "analyse: no")
    error = explain(run_dir)
    assert error.exit_code == code
    assert str(error) == f"{run_dir.run_id}: analyse: no" + (f"\n  hint: see {run_dir.agent_log}" if code == 70 else "")


def test_only_an_interrupted_run_is_advised_to_resume() -> None:
    run_dir = make_submitted()
    end(run_dir, 143, "stopped by SIGTERM")
    error = explain(run_dir)
    assert type(error) is CheckFailed
    assert str(error) == (
        f"{run_dir.run_id}: ended without being sealed (stopped by SIGTERM), expected a sealed bundle\n"
        f"  hint: see {run_dir.agent_log}, then rlk-repro submit --resume {run_dir.run_id}"
    )
    run_dir.state.unlink()
    assert str(explain(run_dir)) == (
        f"{run_dir.run_id}: ended without being sealed (the agent was killed or crashed without a report), expected a "
        "sealed bundle\n"
        f"  hint: see {run_dir.agent_output}, then rlk-repro submit --resume {run_dir.run_id}"
    )


def test_a_run_that_cannot_be_remembered_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "state", "a file, not a folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(EnvironmentMissing, match="export XDG_STATE_HOME"):
        make_staged(tmp_path / "runs" / "run")
    assert list((tmp_path / "runs").iterdir()) == []
