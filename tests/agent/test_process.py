"""One trainer under the guard: its exit, its time, its group."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.agent import process
from rlk_repro.agent.ends import judge
from rlk_repro.agent.process import Cause, Ended, StopTimes, run_guarded
from rlk_repro.base import guarded, proc, procfs
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.base.stop import Stop
from rlk_repro.rundir.results import TrialStatus
from tests.support.job_examples import TRAINER, find_alive
from tests.support.waiting import is_written, let_time_pass, signal_when, wait_until

LIMITS = StopTimes(time_limit_s=3600, grace_s=20)
GUARD = [sys.executable, "-I", "-S", str(Path(guarded.__file__).with_name("guard.py"))]


@pytest.mark.parametrize(
    ("error", "num_calls"),
    [
        ("Unable to connect to the server: net/http: TLS handshake timeout", 2),
        ('Error from server (InternalError): an error on the server ("") has prevented the request', 2),
        ("Error from server: etcdserver: request timed out", 2),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 2),
        ("squeue: error: Socket timed out on send/recv operation", 2),
        ('time="x" level=fatal msg="received unexpected HTTP status 503: Service Unavailable"', 2),
        ("toomanyrequests: You have reached your pull rate limit; Too Many Requests", 2),
        ("Error from server (Forbidden): events is forbidden", 1),
        ("squeue: error: Invalid user: nobody", 1),
    ],
)
def test_a_question_is_asked_again_only_after_a_servers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, num_calls: int
) -> None:
    monkeypatch.setattr(proc, "RETRY_S", 0)
    script = 'echo x >>"$1"; printf %s "$2" >&2; exit 1'
    done = proc.ask(["sh", "-c", script, "sh", str(tmp_path / "calls"), error])
    assert (done.is_outage, (tmp_path / "calls").read_text()) == (num_calls == 2, "x\n" * num_calls)


@pytest.fixture
def stop() -> Iterator[Stop]:
    stop = Stop()
    with stop.installed():
        yield stop


def run(stop: Stop, *actions: str, limits: StopTimes = LIMITS, **options: Any) -> tuple[Ended, bytes]:
    output: list[bytes] = []
    argv = [sys.executable, "-I", "-S", str(TRAINER), *actions]
    ended = run_guarded(argv, dict(os.environ), limits=limits, stop=stop, see_output=output.append, **options)
    return ended, b"".join(output)


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """Where a trainer writes what it has started."""
    return tmp_path / "pids"


def test_output_of_both_streams_and_the_exit_code_are_passed_on(stop: Stop) -> None:
    ended, output = run(stop, "print:one", "flood:300000", "exit:7")
    assert (ended.code, ended.signal, ended.cause) == (7, None, None)
    assert output == b"one\n" + b"x" * 299_999 + b"\n"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_the_signal_that_killed_the_trainer_is_reported(stop: Stop, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_WHOLE_STEP_S", 0.01)
    ended, _ = run(stop, f"kill:{name}")
    assert (ended.code, ended.signal, ended.cause) == (None, signal.Signals[name], None)


@pytest.mark.parametrize("starting", ["child", "daemon"])
def test_a_trainer_over_its_time_that_ignores_the_request_is_killed_with_its_processes_only(
    stop: Stop, pids: Path, monkeypatch: pytest.MonkeyPatch, starting: str
) -> None:
    let_time_pass(monkeypatch, 3600, once=pids)
    actions = ["ignore-term", f"{starting}:{pids}", "print:ready", "sleep:60"]
    ended, output = run(stop, *actions, limits=StopTimes(time_limit_s=3600, grace_s=0.2))
    assert (ended.cause, ended.signal, output) == (Cause.TIMEOUT, signal.SIGKILL, b"ready\n")
    assert 3600.2 <= ended.duration_s < 3620  # of the minute that it would have slept
    assert find_alive([int(pids.read_text())]) == []


def test_a_stop_ends_the_trainer_within_its_grace(stop: Stop, pids: Path) -> None:
    signal_when(lambda: is_written(pids), signal.SIGTERM)
    ended, _ = run(stop, f"child:{pids}", "sleep:60")
    assert (ended.cause, ended.signal, stop.signal) == (Cause.INTERRUPT, signal.SIGTERM, signal.SIGTERM)


def test_a_trainer_signalled_together_with_the_agent_is_interrupted(
    stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment after the trainer, when the agent already asks itself who it was."""

    def wait(timeout_s: float) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return Stop.wait(stop, timeout_s)

    monkeypatch.setattr(process, "_WHOLE_STEP_S", 60)
    monkeypatch.setattr(stop, "wait", wait)
    ended, _ = run(stop, "kill:SIGTERM")
    assert ended.cause is Cause.INTERRUPT


@pytest.mark.parametrize(("starting", "number"), [("child", 2), ("daemon", 1)])
def test_what_outlives_the_trainer_is_killed_also_in_a_session_of_its_own(
    stop: Stop, pids: Path, starting: str, number: int
) -> None:
    ended, output = run(stop, "print:last words", *[f"{starting}:{pids}"] * number)
    assert (ended.code, output) == (0, b"last words\n")
    assert find_alive([int(pid) for pid in pids.read_text().split()]) == []


def test_trouble_ends_the_trainer_and_is_its_reason(stop: Stop, pids: Path) -> None:
    actions = [f"child:{pids}", "sleep:60"]
    ended, _ = run(stop, *actions, find_trouble=lambda: "the head is gone" if is_written(pids) else "")
    assert (ended.signal, ended.cause, ended.trouble) == (signal.SIGTERM, Cause.TROUBLE, "the head is gone")
    assert judge(ended, b"", has_oom_kill=False) == (TrialStatus.FAILED, "the head is gone; killed by SIGTERM")


def test_an_error_of_the_agent_leaves_no_process(stop: Stop) -> None:
    pids: list[int] = []

    def fail(_: bytes) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_guarded(
            [sys.executable, "-I", "-S", str(TRAINER), "print:x", "sleep:60"], {}, limits=LIMITS, stop=stop,
            see_output=fail, see_pid=pids.append,
        )  # fmt: skip
    assert procfs.find_session(pids[0]) == {}


def test_a_failed_start_of_a_program_is_in_the_log(stop: Stop) -> None:
    output: list[bytes] = []
    ended = run_guarded(["/no/such/python"], {}, limits=LIMITS, stop=stop, see_output=output.append)
    assert (ended.code, b"".join(output)) == (127, b"/no/such/python: No such file or directory\n")


def test_no_python_at_all_is_an_error(stop: Stop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(EnvironmentMissing):
        run_guarded(["x"], {}, limits=LIMITS, stop=stop, see_output=lambda _: None)


@pytest.mark.parametrize("is_killed_too", [False, True])
def test_nothing_outlives_the_agent_even_when_the_guard_dies_too(
    tmp_path: Path, pids: Path, is_killed_too: bool
) -> None:
    """The pipe's other end is the agent's life; where the guard is gone as well, the kernel kills the trainer."""
    ours, guards = socket.socketpair()
    actions = ["ignore-term", f"child:{pids}", "sleep:60"]
    with (tmp_path / "log").open("wb") as log:
        guarded = proc.start(
            [*GUARD, sys.executable, "-I", "-S", str(TRAINER), *actions],
            output_fd=log.fileno(),
            stdin_fd=guards.fileno(),
        )
    guards.close()
    wait_until(lambda: is_written(pids))
    child = int(pids.read_text())
    members = [pid for pid in procfs.find_session(guarded.pid) if pid not in (child, guarded.pid)]
    if is_killed_too:
        os.kill(guarded.pid, signal.SIGKILL)
        wait_until(lambda: find_alive(members) == [])
        proc.signal_group(guarded.pid, signal.SIGKILL)
    ours.close()
    assert guarded.wait() == -signal.SIGKILL
    wait_until(lambda: find_alive([*members, child]) == [])
