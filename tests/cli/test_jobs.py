"""``submit --resume``, ``status``, ``logs``, ``cancel`` and ``collect`` work as typed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from rlk_repro.base.files import write_json, write_text
from rlk_repro.clusters import local
from rlk_repro.clusters.api import JobState, JobStatus
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.rundir.state import Phase, Progress
from tests.submit.test_sending import GONE, make_submitted
from tests.support.job_examples import make_staged

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "submit", lambda *_: pytest.fail("something was sent"))


def staged() -> RunDir:
    return make_staged(runs_root() / "smoke" / "20261120T000000Z-made")[1]


def test_flags_that_a_resumption_would_ignore_are_refused_by_name(call: Call) -> None:
    code, _, err = call("submit", "--resume", "x", "--run", "nope", "--pairs", "50", "--set", "a=b", "--exploratory")
    expected = "a resumed run keeps its plan, expected this left out; --dry-run, --wait and --json may stay"
    assert code == 2
    assert err.splitlines() == [
        f"rlk-repro: {name}: {expected}" for name in ("--run", "--pairs", "--set", "--exploratory")
    ]


def test_a_staged_run_has_a_state_of_null(call: Call) -> None:
    run_dir = staged()
    code, out, _ = call("status", "--json")
    assert code == 0
    assert json.loads(out) == {
        "id": run_dir.run_id,
        "state": None,
        "reason": "staged but not submitted",
        "is_sealed": False,
        "progress": None,
    }
    assert call("status")[1] == f"{run_dir.run_id}: staged but not submitted\n"


def test_a_run_whose_agent_died_has_no_time_left_and_says_where_to_look(call: Call) -> None:
    run_dir = make_submitted()
    state = Progress(
        phase=Phase.TRIAL, num_trials=12, num_steps=12, trial="02-p2-enabled", trial_index=2,
        step=6, step_time_s=0.4, eta_s=99.0,
    )  # fmt: skip
    write_json(run_dir.state, state.to_json())
    lines = call("status")[1].splitlines()
    assert lines[1:4] == [
        "  ended in trial 3/12 (02-p2-enabled)",
        f"  hint: the run was killed from outside; resume with rlk-repro submit --resume {run_dir.run_id}",
        f"  the agent's log: {run_dir.agent_log}",
    ]
    shown = json.loads(call("status", "--json")[1])["progress"]
    assert [shown[name] for name in ("trial", "step", "step_time_s", "eta_s")] == ["02-p2-enabled", None, None, None]


@pytest.mark.parametrize(
    ("job", "hint"),
    [
        (JobState.DONE, "the bundle is not on this machine yet; fetch it with rlk-repro collect {0}"),
        (JobState.CANCELLED, "the run was cancelled; resume with rlk-repro submit --resume {0}"),
        (JobState.FAILED, "the run was killed from outside; resume with rlk-repro submit --resume {0}"),
    ],
)
def test_the_hint_for_a_run_without_its_bundle_follows_the_end_of_its_job(
    call: Call, monkeypatch: pytest.MonkeyPatch, job: JobState, hint: str
) -> None:
    run_dir = make_submitted()
    seen = Progress(phase=Phase.TRIAL, num_trials=4, num_steps=4, trial="01-p1-enabled", trial_index=1)
    write_json(run_dir.state, seen.to_json())
    monkeypatch.setattr(local, "poll", lambda *_: JobStatus(state=job))
    expected = hint.format(run_dir.run_id)
    status = call("status")[1]
    assert f"  hint: {expected}\n" in status
    assert ("the agent's log" in status) is (job is not JobState.DONE)
    assert ("ended in trial 2/4" in status) is (job is not JobState.DONE)
    assert (json.loads(call("status", "--json")[1])["progress"] is None) is (job is JobState.DONE)
    assert call("logs")[2] == f"{run_dir.run_id}: {expected}\n"


def test_a_failed_job_of_which_nothing_was_collected_is_not_called_killed(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that preflight ends after two seconds is gone before the first poll."""
    run_dir = make_submitted()
    monkeypatch.setattr(local, "IS_REMOTE", True)
    monkeypatch.setattr(local, "poll", lambda *_: JobStatus(state=JobState.FAILED))
    assert (
        "  hint: nothing was collected yet; "
        f"fetch the run's files with rlk-repro collect {run_dir.run_id}, "
        f"then rlk-repro submit --resume {run_dir.run_id}\n"
    ) in call("status")[1]
    assert f"  the agent's log: rlk-repro collect {run_dir.run_id} brings it\n" in call("status")[1]
    write_text(run_dir.bundle, "")
    assert "the run was killed from outside" in call("status")[1]


def test_logs_name_their_trial_once_or_on_every_json_line(call: Call) -> None:
    run_dir = make_submitted()
    write_text(run_dir.trial("00-p1-baseline").stdout, 'one "é"\ntwo\n')
    write_text(run_dir.trial("01-p1-enabled").stdout, "three\n")
    assert call("logs")[1] == '==> 00-p1-baseline <==\none "é"\ntwo\n==> 01-p1-enabled <==\nthree\n'
    lines = [json.loads(line) for line in call("logs", "--json")[1].splitlines()]
    assert [(line["trial"], line["line"]) for line in lines] == [
        ("00-p1-baseline", 'one "é"'),
        ("00-p1-baseline", "two"),
        ("01-p1-enabled", "three"),
    ]


@pytest.mark.parametrize("command", [("cancel",), ("collect",), ("submit", "--resume", "20261120T")])
def test_commands_do_not_touch_a_run_of_another_host(call: Call, command: tuple[str, ...]) -> None:
    run_dir = make_submitted(dataclasses.replace(GONE, details={"host": "elsewhere"}))
    code, out, err = call(*command)
    assert (code, out) == (3, "")
    assert "started on elsewhere, but this machine is " in err
    assert ("hint: run this command on elsewhere, which" in err) is (command[0] != "submit")
    assert not run_dir.bundle.exists()
