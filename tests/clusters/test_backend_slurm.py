"""The Slurm backend against clients that answer what a test put down; the real ones are in test_slurm_real.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, SchedulerRefused
from rlk_repro.base.files import write_json, write_text
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.clusters.api import Job, JobState, JobStatus, Submission
from rlk_repro.clusters.asking import find_next_step
from rlk_repro.clusters.slurm import backend as slurm
from rlk_repro.clusters.slurm import client as slurmctl
from rlk_repro.rundir.paths import RunDir
from rlk_repro.submit import sending
from tests.support.job_examples import make_staged
from tests.support.slurm.examples import FakeSlurm

JOB = Job(files={}, command=("sbatch", "--parsable", "job.sbatch"))
SUBMISSION = Submission(
    cluster="slurm", job_id="12", submitted_at="2026-11-20T18:00:00.000Z", details={"cluster_name": "test"}
)

# https://slurm.schedmd.com/squeue.html and sacct.html, job state codes of 22.05 to 25.11
DOCUMENTED = """
    BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE EXPEDITING FAILED LAUNCH_FAILED NODE_FAIL
    OUT_OF_MEMORY PENDING POWER_UP_NODE PREEMPTED RECONFIG_FAIL RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED
    RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT UPDATE_DB
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "fake", monkeypatch)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_staged(tmp_path / "a run")[1]


def seal(run_dir: RunDir, message: str = "sealed, 4 of 4 trials ok") -> None:
    write_text(run_dir.checksums, "")
    say_last_word(run_dir, 0, message)


def say_last_word(run_dir: RunDir, code: int, message: str) -> None:
    write_json(
        run_dir.state,
        {"schema": 1, "phase": "ended", "num_trials": 2, "num_steps": 3, "exit_code": code, "message": message},
    )


def test_every_documented_state_has_a_meaning() -> None:
    assert sorted(slurmctl.STATES) == sorted(DOCUMENTED.split())
    assert slurmctl.parse_state("CANCELLED by 1000") == ("CANCELLED", JobState.CANCELLED)
    assert slurmctl.parse_state("CANCELLED+") == ("CANCELLED", JobState.CANCELLED)
    assert slurmctl.parse_state("OF_A_LATER_VERSION") == ("OF_A_LATER_VERSION", JobState.UNKNOWN)


def test_a_job_id_is_the_last_word_of_a_site_s_output() -> None:
    texts = ("a site's remark\n12\n", "12;east\n", "", "Submitted batch job twelve", "-1")
    assert [slurmctl.parse_job_id(text) for text in texts] == ["12", "12", *[None] * 3]


def test_a_job_is_tested_then_sent_without_this_shells_options(
    fake: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "mine")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/other.conf")
    fake.answer("sbatch", "12\n")
    for earlier in (run_dir.state, run_dir.bundle, run_dir.cancelled):
        earlier.touch()
    submission = slurm.submit(JOB, run_dir)
    assert (submission.cluster, submission.job_id) == ("slurm", "12")
    assert submission.details == {"cluster_name": "test", "slurm_version": "22.05.8"}
    assert [call for call in fake.calls if call[0] == "sbatch"] == [
        ["sbatch", "--test-only", "--parsable", "job.sbatch"],
        ["sbatch", "--parsable", "job.sbatch"],
    ]
    assert set(fake.seen_env.splitlines()) == {"SLURM_CONF=/etc/slurm/other.conf"}
    assert not any(path.exists() for path in (run_dir.state, run_dir.bundle, run_dir.cancelled))
    assert run_dir.scheduler_file("config").read_text() == "ClusterName = test\nSLURM_VERSION = 22.05.8\n"


def test_a_refusal_quotes_sbatch_and_sends_nothing(fake: FakeSlurm, run_dir: RunDir) -> None:
    words = "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n"
    fake.answer("sbatch-test", error=words, code=1)
    fake.answer("sinfo")
    with pytest.raises(SchedulerRefused) as caught:
        slurm.submit(JOB, run_dir)
    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        'slurm: sbatch refused the job: "invalid partition specified: nope; '
        'allocation failure: Invalid partition name specified"'
    )
    assert all("--test-only" in call for call in fake.calls if call[0] == "sbatch")
    assert not run_dir.scheduler.exists()
    fake.answer("sbatch-test")
    fake.answer("sbatch", "welcome\n")
    with pytest.raises(SchedulerRefused, match="no job id in 'welcome"):
        slurm.submit(JOB, run_dir)


def test_a_job_that_another_cluster_took_is_recorded(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.answer("sbatch", "12;east\n")
    submission = slurm.submit(JOB, run_dir)
    assert submission.job_id == "12"
    fake.queue()
    reason = "the job was sent to cluster east, but this is cluster test"
    assert slurm.poll(submission, run_dir) == JobStatus(state=JobState.UNKNOWN, reason=reason)


@pytest.mark.parametrize("is_back", [True, False])
def test_a_controller_that_does_not_answer_is_asked_again_and_refuses_nothing(
    fake: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    words = "allocation failure: Unable to contact slurm controller (connect failure)\n"
    fake.answer("sbatch-test", error=words, code=1)
    fake.answer("sinfo")
    fake.answer("sbatch", "12\n")
    run = proc.run

    def answer_later(argv: Sequence[str], **options: Any) -> proc.Completed:
        done = run(argv, **options)
        if is_back and "--test-only" in argv:
            fake.answer("sbatch-test")
        return done

    monkeypatch.setattr(proc, "run", answer_later)
    monkeypatch.setattr(proc, "RETRY_S", 0)
    refused = pytest.raises(SchedulerRefused, match="slurm: Slurm did not answer: ")
    with nullcontext() if is_back else refused:
        assert slurm.submit(JOB, run_dir).job_id == "12"
    assert fake.count("sbatch") == (3 if is_back else 2)


def test_with_nodes_away_the_real_sbatch_decides(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.answer("sbatch-test", error="allocation failure: Requested node configuration is not available\n", code=1)
    fake.answer("sinfo", "node-0\n")
    fake.answer("sbatch", "12\n")
    assert slurm.submit(JOB, run_dir).job_id == "12"
    fake.answer("sbatch", error="sbatch: error: Batch job submission failed: Invalid qos specification\n", code=1)
    with pytest.raises(SchedulerRefused, match='"Batch job submission failed: Invalid qos specification"'):
        slurm.submit(JOB, run_dir)


def test_a_machine_without_slurm_gives_that_reason(
    run_dir: RunDir, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slurm.available() is None
    fake.answer("scontrol", error="scontrol: error: Slurmctld(primary) at host is DOWN\n", code=1)
    assert slurm.available() == "no Slurm controller answers (Slurmctld(primary) at host is DOWN)"
    monkeypatch.setenv("PATH", str(run_dir.root))
    assert slurm.available() == "scontrol: is not on PATH"
    answer = slurm.poll(SUBMISSION, run_dir)
    assert (answer.state, answer.reason, answer.is_unreachable) == (JobState.UNKNOWN, "squeue: is not on PATH", True)
    with pytest.raises(EnvironmentMissing, match="the job may still be running"):
        slurm.cancel(SUBMISSION, run_dir)
    with pytest.raises(EnvironmentMissing, match="the job may still be running"):
        slurm.collect(SUBMISSION, run_dir)


@pytest.mark.parametrize(
    ("row", "state", "reason"),
    [
        ("12|PENDING|Priority||2026-11-21T06:00:00", JobState.PENDING,
         "Priority, expected to start 2026-11-21T06:00:00"),
        ("12|PENDING|Resources||N/A", JobState.PENDING, "Resources"),
        ("12|CONFIGURING|None|node-0|N/A", JobState.PENDING, "CONFIGURING"),
        ("12|RUNNING|None|node-[0-1]|2026-11-20T18:07:35", JobState.RUNNING, "on node-[0-1]"),
        ("12|COMPLETING|None|node-1|2026-11-20T18:07:35", JobState.RUNNING, "COMPLETING, on node-1"),
        ("12|TIMEOUT|TimeLimit|node-1|x", JobState.FAILED, "Slurm says TIMEOUT, the agent ended without a report"),
        ("12|CANCELLED|None||N/A", JobState.CANCELLED, "Slurm says CANCELLED, the agent ended without a report"),
        ("12|COMPLETED|None|node-1|x", JobState.FAILED, "Slurm says COMPLETED, the agent ended without a report"),
        ("12|LATER|None|node-1|x", JobState.UNKNOWN, "Slurm says LATER"),
        ("13|RUNNING|None|node-1|x", JobState.FAILED, "Slurm no longer knows job 12, the agent ended without a report"),
    ],
)  # fmt: skip
def test_slurms_states_map_to_job_states(
    fake: FakeSlurm, run_dir: RunDir, row: str, state: JobState, reason: str
) -> None:
    fake.queue(row)
    answer = slurm.poll(SUBMISSION, run_dir)
    assert (answer.state, answer.reason) == (state, reason)
    assert answer.nodes == ("node-[0-1]" if "[0-1]" in row else "node-1" if state is JobState.RUNNING else "")


@pytest.mark.parametrize(
    ("row", "output", "reason"),
    [
        ("12|PENDING|BeginTime||N/A", "", "lost node node-1, BeginTime"),
        ("12|FAILED|NonZeroExitCode|node-0|x", "srun: error: Node failure on node-2\n",
         "Slurm says FAILED, lost node node-2, stopped by SIGTERM"),
        ("12|FAILED|NonZeroExitCode|node-0|x",
         "srun: error: node-1: task 1: Killed\nsrun: error: node-0: task 0: Exited with exit code 143\n",
         "Slurm says FAILED, the agent of node-1 ended first (Killed), stopped by SIGTERM"),
    ],
)  # fmt: skip
def test_a_lost_node_or_agent_is_named(fake: FakeSlurm, run_dir: RunDir, row: str, output: str, reason: str) -> None:
    fake.queue(row)
    fake.answer("sinfo", "node-1\nnode-7\n")
    say_last_word(run_dir, 143, "stopped by SIGTERM")
    earlier = "allocation 12.0: node-7\nsrun: error: Node failure on node-7\n"
    run_dir.job_output("12").write_text(f"{earlier}allocation 12.1: node-0,node-1\n{output}")
    assert slurm.poll(SUBMISSION, run_dir).reason == reason


PYXIS = "slurmstepd: error: pyxis: "
SPANK = "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\n"


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        # threads of NVIDIA/pyxis: 101, 61
        (f"{PYXIS}container start failed with error code: 1\n{PYXIS}    [ERROR] /etc/98-nvidia.sh exited\n",
         f"{PYXIS}container start failed with error code: 1; {PYXIS}[ERROR] /etc/98-nvidia.sh exited"),
        (f"{PYXIS}printing contents of log file ...\n{PYXIS}    enroot-switchroot: failed to execute: x\n{SPANK}",
         f"{PYXIS}enroot-switchroot: failed to execute: x"),
        ("FATAL:   container creation failed: mount /scratch: no such file\n",
         "FATAL: container creation failed: mount /scratch: no such file"),
        ("docker: Error response from daemon: could not select device driver with capabilities: [[gpu]].\n",
         "docker: Error response from daemon: could not select device driver with capabilities: [[gpu]]."),
    ],
)  # fmt: skip
def test_a_container_that_does_not_start_is_quoted_with_the_file_that_says_so(
    fake: FakeSlurm, run_dir: RunDir, lines: str, quoted: str
) -> None:
    fake.queue("12|FAILED|NonZeroExitCode|n1|x")
    end = "srun: error: n1: task 0: Exited with exit code 1\n"
    run_dir.job_output("12").write_text(f"allocation 12.0: n0\nerror: of before\nallocation 12.1: n1\n{lines}{end}")
    reason = slurm.poll(SUBMISSION, run_dir).reason
    assert reason == f"Slurm says FAILED, the agent ended without a report, .slurm-12.log says: {quoted}"
    assert find_next_step(reason)


@pytest.mark.parametrize(
    ("reason", "output", "told", "step"),
    [
        ("PartitionTimeLimit", "", "PartitionTimeLimit", "shorten each job"),
        ("QOSMaxWallDurationPerJobLimit", "", "QOSMaxWallDurationPerJobLimit", "shorten each job"),
        ("QOSMaxGRESPerUser", "", "QOSMaxGRESPerUser", "wait for the account's other jobs"),
        ("AssocGrpGRES", "", "AssocGrpGRES", "wait for the account's other jobs"),
        ("JobHeldAdmin", "", "JobHeldAdmin", "an administrator"),
        ("launch failed requeued held", "", "launch failed requeued held", "read the job's output"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "", "ReqNodeNotAvail, UnavailableNodes:n1", "sinfo --list-reasons"),
        ("BadConstraints", "", "BadConstraints", "no node has"),
        ("BeginTime", "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
         "requeued after preemption, BeginTime", "wait: Slurm starts the job again"),
        ("Resources", "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE to NODE FAILURE ***",
         "requeued after node failure, Resources", "wait: Slurm starts the job again"),
    ],
)  # fmt: skip
def test_slurms_reason_for_waiting_comes_with_a_next_step(
    fake: FakeSlurm, run_dir: RunDir, reason: str, output: str, told: str, step: str
) -> None:
    fake.queue(f"12|PENDING|{reason}||N/A")
    run_dir.job_output("12").write_text(output)
    answer = slurm.poll(SUBMISSION, run_dir)
    assert (answer.state, answer.reason) == (JobState.PENDING, told)
    assert find_next_step(answer.reason).startswith(step)


def test_a_database_that_does_not_answer_twice_is_no_word_about_a_job(
    fake: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "RETRY_S", 0)
    fake.queue()
    fake.answer("sacct", error="sacct: error: Problem talking to the database: Connection refused\n", code=1)
    answer = slurm.poll(SUBMISSION, run_dir)
    assert (answer.state, answer.is_unreachable, fake.count("sacct")) == (JobState.UNKNOWN, True, 2)
    assert answer.reason.startswith("slurm: sacct did not answer: ")


def test_records_of_a_run_outrank_slurms_state_of_its_script(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.queue("12|FAILED|NonZeroExitCode|node-0|x")
    say_last_word(run_dir, 143, "stopped by SIGTERM")
    assert slurm.poll(SUBMISSION, run_dir) == JobStatus(
        state=JobState.FAILED, reason="Slurm says FAILED, stopped by SIGTERM, which Slurm sends before the time limit"
    )
    run_dir.cancelled.touch()
    assert slurm.poll(SUBMISSION, run_dir) == JobStatus(state=JobState.CANCELLED, reason="stopped by SIGTERM")
    seal(run_dir, "sealed, 3 of 4 trials ok")
    asked = len(fake.calls)
    assert slurm.poll(SUBMISSION, run_dir) == JobStatus(state=JobState.DONE, reason="sealed, 3 of 4 trials ok")
    assert [call[0] for call in fake.calls[asked:]] == []


def test_a_job_that_the_controller_forgot_is_asked_for_elsewhere(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.queue()
    fake.answer("sacct", "12|NODE_FAIL|node-[0-1]\n12.batch|CANCELLED|node-0\n")
    assert slurm.poll(SUBMISSION, run_dir).reason == "Slurm says NODE_FAIL, the agent ended without a report"
    fake.answer("sacct")
    fake.answer("config", "ClusterName             = west\n")
    reason = "the job was sent to cluster test, but this is cluster west"
    assert slurm.poll(SUBMISSION, run_dir) == JobStatus(state=JobState.UNKNOWN, reason=reason)


def test_cancel_first_signals_a_running_job_then_ends_it(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.queue("12|RUNNING|None|node-0|x")
    assert slurm.cancel(SUBMISSION, run_dir)
    assert slurm.cancel(SUBMISSION, run_dir)
    fake.queue("12|CANCELLED|None|node-0|x")
    assert not slurm.cancel(SUBMISSION, run_dir)
    assert [call for call in fake.calls if call[0] == "scancel"] == [
        ["scancel", "--batch", "--signal=TERM", "12"],
        ["scancel", "12"],
    ]


def test_a_waiting_job_is_simply_cancelled(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.queue("12|PENDING|Priority||N/A")
    assert slurm.cancel(SUBMISSION, run_dir)
    assert fake.calls[-1] == ["scancel", "12"]


def test_a_cancel_that_slurm_refused_is_quoted_and_leaves_no_trace(fake: FakeSlurm, run_dir: RunDir) -> None:
    """The next cancel is gentle again, and a later end is not called cancelled."""
    fake.queue("12|RUNNING|None|node-0|N/A")
    fake.answer("scancel", error="scancel: error: Socket timed out on send/recv operation\n", code=1)
    with pytest.raises(SchedulerRefused, match='scancel refused: "Socket timed out'):
        slurm.cancel(SUBMISSION, run_dir)
    assert not run_dir.cancelled.exists()


def test_without_the_program_sacct_there_is_no_accounting(
    fake: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = fake.folder / "bin"
    (clients / "sacct").unlink()
    for tool in ("basename", "cat", "env", "grep"):
        (clients / tool).symlink_to(f"/usr/bin/{tool}")
    monkeypatch.setenv("PATH", str(clients))
    fake.answer("sbatch", "12\n")
    assert slurm.submit(JOB, run_dir).job_id == "12"
    fake.queue()
    assert slurm.poll(SUBMISSION, run_dir).state is JobState.FAILED


def test_collecting_packs_what_a_killed_agent_left_with_slurms_last_record(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.queue("12|RUNNING|None|node-0|x")
    with pytest.raises(CheckFailed) as caught:
        slurm.collect(SUBMISSION, run_dir)
    assert str(caught.value) == "a run: has not ended: running\n  hint: rlk-repro status --watch a run"
    fake.queue("12|NODE_FAIL|None|node-0|x")
    fake.answer("sacct", "JobIDRaw State Gone\n")
    assert not inspect_bundle(slurm.collect(SUBMISSION, run_dir)).is_sealed
    assert run_dir.scheduler_file("accounting-at-end").read_text() == "JobIDRaw State Gone\n"
    assert fake.calls[-1][:5] == ["sacct", "--parsable2", "--allocations", "--duplicates", "--jobs=12"]


def test_following_ends_with_the_job(fake: FakeSlurm, run_dir: RunDir) -> None:
    fake.queue("12|TIMEOUT|None|node-0|x")
    write_text(run_dir.trial("00-p1-baseline").stdout, "one\ntwo")
    for is_following in (True, False):
        lines = slurm.logs(SUBMISSION, run_dir, is_following=is_following)
        assert [line.text for line in lines] == ["one", "two"]


def test_submitted_runs_are_listed_with_one_question(
    call, fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (11, 12):
        run_dir = make_staged(tmp_path / "runs" / "smoke" / f"run-{number}")[1]
        submission = Submission(cluster="slurm", job_id=str(number), submitted_at="", details={})
        sending.record_submission(run_dir, submission)
    fake.queue("11|PENDING|Resources||N/A", "12|RUNNING|None|node-1|x")
    code, out, err = call("runs", "list", "--submitted")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["run-11", "smoke", "slurm", "11", "pending", "Resources"],
        ["run-12", "smoke", "slurm", "12", "running", "on", "node-1"],
    ]
    assert [name for name, *_ in fake.calls] == ["squeue"]
    assert '"nodes": "node-1"' in call("runs", "list", "--submitted", "--json")[1]
    assert call("status", "run-11")[1].startswith("run-11: pending (Resources)\n  not sealed")
    fake.queue("11|FAILED|NonZeroExitCode|n1|x")
    first = RunDir(tmp_path / "runs/smoke/run-11")
    first.job_output("11").write_text(f"{PYXIS}couldn't start container\n")
    status = call("status", "run-11")[1]
    assert f"ended without a report, .slurm-11.log says: {PYXIS}couldn't start container)\n  next: mend" in status
    assert "hint: the run never began; resume with" in status
    fake.queue("11|PENDING|Resources||N/A", "12|RUNNING|None|node-1|x")
    say_last_word(RunDir(tmp_path / "runs" / "smoke" / "run-11"), 143, "stopped by SIGTERM")  # its job was requeued
    assert "SIGTERM" not in call("status", "run-11")[1] + call("runs", "list", "--submitted")[1]
