"""This machine as a cluster: agents are real processes, trainers are small scripts."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from rlk_repro.agent.ray.node import find_first_port
from rlk_repro.base.errors import BundleUnreadable, CheckFailed, EnvironmentMissing, SpecError
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.clusters import local
from rlk_repro.clusters.api import Job, JobState, JobStatus, Submission
from rlk_repro.clusters.triallogs import read_logs
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_stack
from rlk_repro.submit.stage import new_run_dir, stage
from tests import ROOT
from tests.conftest import WEIRD_NAMES
from tests.support.job_examples import QUICK, make_example_plan, make_staged, statuses
from tests.support.make_run import verify_bundle
from tests.support.waiting import wait_until


def submit(run_dir: RunDir, *actions: str) -> Submission:
    """The rendered job with the fake trainer in its agent."""
    job = Job(files={}, command=(sys.executable, "-m", "tests.support.job_examples", str(run_dir.root), *actions))
    return local.submit(job, run_dir)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def wait_for_end(submission: Submission, run_dir: RunDir) -> JobState:
    wait_until(lambda: local.poll(submission, run_dir).state is not JobState.RUNNING)
    return local.poll(submission, run_dir).state


def test_the_job_is_one_agent_and_its_file_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    plan, _ = make_example_plan()
    job = local.render(plan, RunDir(tmp_path / "it's a run"))
    assert job.command == (sys.executable, "-m", "rlk_repro.job", str(tmp_path / "it's a run"))
    assert job.env == {}
    (text,) = job.files.values()
    assert str(tmp_path) not in text
    assert '"python",\n  "-m",\n  "rlk_repro.job",\n  "RUN_DIR"' in text


def test_a_run_on_some_gpus_gets_a_like_share_of_the_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "count_gpus", lambda: 4)
    monkeypatch.setattr(local, "divide_cores", lambda count: {gpu: (gpu, gpu + count) for gpu in range(count)})
    plan, _ = make_example_plan(profile=b"schema: 1\nprofile: p\ncluster: local\ngpus: [1]\n", hardware="h200")
    job = local.render(plan, RunDir(tmp_path))
    share = ("env", "CUDA_VISIBLE_DEVICES=1", "taskset", "--cpu-list", "1,5")
    assert job.command[:6] == (*share, sys.executable)
    assert find_first_port(plan.profile) == 6379 + 9
    for gpus, what in (("[4]", "no such GPU"), ("[0, 1]", "not the run's number of GPUs")):
        text = f"schema: 1\nprofile: p\ncluster: local\ngpus: {gpus}\n"
        plan, _ = make_example_plan(profile=text.encode(), hardware="h200")
        with pytest.raises(SpecError, match=what):
            local.render(plan, RunDir(tmp_path))


def test_a_submission_runs_to_a_sealed_bundle(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "".join(WEIRD_NAMES), ["measure.pairs=1"])
    submission = submit(run_dir, *QUICK)
    assert local.poll(submission, run_dir).state is JobState.RUNNING
    with pytest.raises(CheckFailed, match="has not ended: running"):
        local.collect(submission, run_dir)
    assert next(local.logs(submission, run_dir, is_following=True)).trial == "00-p1-baseline"
    assert wait_for_end(submission, run_dir) is JobState.DONE
    assert local.poll(submission, run_dir).reason == "sealed, 2 of 2 trials ok"
    assert verify_bundle(local.collect(submission, run_dir)) == []
    assert run_dir.agent_output.read_text() == ""
    local.cancel(submission, run_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["".join(WEIRD_NAMES)]


def test_cancelling_records_packs_and_ends(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run", ["measure.pairs=1"])
    submission = submit(run_dir, "begin", "sleep:60")
    wait_until(run_dir.trial("00-p1-baseline").stdout.exists)
    local.cancel(submission, run_dir)
    local.cancel(submission, run_dir)
    assert wait_for_end(submission, run_dir) is JobState.CANCELLED
    assert statuses(run_dir) == {"00-p1-baseline": "interrupted"}
    assert not inspect_bundle(local.collect(submission, run_dir)).is_sealed


def test_an_agent_that_was_killed_is_packed_when_collected(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run", ["measure.pairs=1"])
    write_text(run_dir.bundle, "of an earlier agent")
    submission = submit(run_dir, "begin", "sleep:60")
    assert not run_dir.bundle.exists()
    wait_until(run_dir.trial("00-p1-baseline").stdout.exists)
    os.kill(int(submission.job_id.split(":")[0]), signal.SIGKILL)
    assert wait_for_end(submission, run_dir) is JobState.FAILED
    assert local.poll(submission, run_dir).reason == "the agent was killed or crashed without a report"
    assert local.collect(submission, run_dir) == run_dir.bundle
    assert inspect_bundle(run_dir.bundle).trials.keys() == {"00-p1-baseline"}


def test_the_agents_last_message_is_the_reason(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    submission = Submission(cluster="local", job_id="4194304:1", submitted_at="")
    last = {"schema": 1, "phase": "ended", "num_trials": 2, "num_steps": 3, "message": "last words"}
    for code, state in ((70, JobState.FAILED), (143, JobState.CANCELLED), (130, JobState.CANCELLED)):
        write_json(run_dir.state, {**last, "exit_code": code})
        assert local.poll(submission, run_dir) == JobStatus(state=state, reason="last words")


def test_a_later_process_with_the_same_pid_is_not_ours(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    submission = Submission(cluster="local", job_id=f"{os.getpid()}:1", submitted_at="")
    assert local.poll(submission, run_dir).state is JobState.FAILED
    assert not local.cancel(submission, run_dir)


def test_a_copied_directory_leaves_the_originals_agent_alone_and_a_moved_one_keeps_it(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run", ["measure.pairs=1"])
    submission = submit(run_dir, "begin", "sleep:60")
    wait_until(run_dir.trial("00-p1-baseline").stdout.exists)
    copy = RunDir(shutil.copytree(run_dir.root, tmp_path / "copy"))
    assert local.poll(submission, copy).state is JobState.FAILED
    assert not local.cancel(submission, copy)
    moved = RunDir(run_dir.root.rename(tmp_path / "moved"))
    assert local.poll(submission, moved).state is JobState.RUNNING
    assert local.cancel(submission, moved)
    wait_until(lambda: local.poll(submission, moved).state is not JobState.RUNNING)


def test_a_plan_that_needs_containers_or_nodes_is_refused() -> None:
    plan, _ = make_example_plan()
    stack = load_stack("example").model
    cpu = plan.layout.model_copy(update={"num_nodes": 4})
    run = plan.run.model_copy(update={"layouts": {"cpu": cpu}})
    with pytest.raises(SpecError) as caught:
        local.render(dataclasses.replace(plan, run=run, stack=stack), RunDir(Path("/run")))
    assert str(caught.value).splitlines() == [
        "stack example: runs in images, but the local cluster starts no containers, "
        "expected a stack with a lock, or one without images",
        "  hint: --stack host uses the software of this machine",
        "run smoke: layouts.cpu.num_nodes: the local cluster has one node, got 4, expected 1",
    ]
    locked = stack.model_copy(update={"locks": {"cuda-amd64": f"sha256:{'1' * 64}"}})
    plan, _ = make_example_plan(hardware="h200")
    assert local.render(dataclasses.replace(plan, stack=locked), RunDir(Path("/run"))).files


def test_a_submission_with_values_of_other_types_is_refused() -> None:
    good = Submission(cluster="local", job_id="1:1", submitted_at="now", details={"host": "h"}).to_json()
    for change, message in (
        ({"cluster": ["a"]}, "s.json: cluster: wrong value, got ['a'], expected text"),
        ({"job_id": 7}, "s.json: job_id: wrong value, got 7, expected text"),
        ({"details": {"host": None}}, "s.json: details.host: wrong value, got None, expected text"),
        ({"details": "x"}, "s.json: details: wrong value, got 'x', expected a mapping"),
        ({"schema": "1"}, "s.json: invalid schema number, got '1', expected 1 to 1"),
    ):
        with pytest.raises(BundleUnreadable) as caught:
            Submission.from_json({**good, **change}, "s.json")
        assert str(caught.value) == message


def test_logs_are_in_plan_order_and_include_lines_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.trial("00-p1-baseline").stdout.mkdir(parents=True)  # no file, so left out, as is a pipe
    run_dir.trial("01-p1-enabled").path.mkdir()
    os.mkfifo(run_dir.trial("01-p1-enabled").stdout)
    for index in (2, 10, 100):
        write_text(run_dir.trial(f"{index:02d}-p1-baseline").stdout, f"one of {index}\ncut off")
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 1:
            with run_dir.trial("02-p1-baseline").stdout.open("a") as stream:
                stream.write(" no more\n")

    monkeypatch.setattr("time.sleep", sleep)
    lines = [(line.trial, line.text) for line in read_logs(run_dir, lambda: len(pauses) > 2)]
    assert lines == [
        ("02-p1-baseline", "one of 2"), ("02-p1-baseline", "cut off no more"),
        ("10-p1-baseline", "one of 10"), ("10-p1-baseline", "cut off"),
        ("100-p1-baseline", "one of 100"), ("100-p1-baseline", "cut off"),
    ]  # fmt: skip


def test_logs_include_a_trial_that_was_set_aside_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a requeue."""
    run_dir = RunDir(tmp_path)
    trial = run_dir.trial("00-p1-baseline")
    write_text(trial.stdout, "first\n")
    write_text(trial.exit, "{}")
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 1:
            aside = run_dir.interrupted_trial(1, "00-p1-baseline").path
            aside.parent.mkdir(parents=True)
            trial.path.rename(aside)
            write_text(trial.stdout, "second\n")

    monkeypatch.setattr("time.sleep", sleep)
    assert [line.text for line in read_logs(run_dir, lambda: len(pauses) > 1)] == ["first", "second"]


def test_staging_writes_the_authors_bytes_the_plan_and_the_job(tmp_path: Path) -> None:
    plan, inputs = make_example_plan()
    run_dir = RunDir(tmp_path / "run")
    stage(plan, inputs, run_dir, Job(files={"a.sh": "echo\n", "b/c.yaml": "{}"}, command=("x",)))
    assert run_dir.run_yaml.read_bytes() == inputs.run
    assert run_dir.profile_yaml.read_bytes() == inputs.profile
    assert type(plan).from_json(load_json(run_dir.plan)) == plan
    assert (run_dir.job / "b" / "c.yaml").read_text() == "{}"
    for folder, error, words in (
        (run_dir.root, SpecError, "exists already"),
        (run_dir.run_yaml / "run", EnvironmentMissing, "export RLK_REPRO_RUNS=/a/folder/with/room"),
    ):
        with pytest.raises(error, match=words):
            stage(plan, inputs, RunDir(folder), Job(files={}, command=("x",)))


def test_new_run_directories_differ_and_are_not_made(tmp_path: Path) -> None:
    plan, _ = make_example_plan()
    names = {new_run_dir(plan).root for _ in range(5)}  # of 50, two had the same 16 random bits in 2 % of runs
    assert len(names) == 5
    assert {path.parent for path in names} == {tmp_path / "runs" / "smoke"}
    assert list(tmp_path.iterdir()) == []
    other = dataclasses.replace(plan, is_exploratory=False)
    assert new_run_dir(other).root.name[17:25] == other.plan_hash[:8]
