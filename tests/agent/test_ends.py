"""How a trial ended, by its log: the lines are those of real threads (named by their repository), shortened."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import yaml

from rlk_repro.agent.ends import judge
from rlk_repro.agent.process import Cause, Ended
from rlk_repro.rundir.results import TrialStatus
from tests import ROOT

ENDS = list(yaml.safe_load_all((ROOT / "tests/assets/logs/ends.yaml").read_text()))
DIED = next(row["log"] for row in ENDS if row["name"] == "Logic-RL#18")
TIMEOUT = "[rank1]:[E1 x] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL\nframe #6: x"
KERNEL = "host memory ran out (the kernel's out-of-memory killer); "
KILLED = "E x failed (exitcode: -9)\nx.ChildFailedError: \n=====\n  exitcode  : -9 (pid: 1)"


def judge_end(tail: str, *, has_oom_kill: bool = False, **changes: Any) -> tuple[TrialStatus, str]:
    values = {"code": None, "signal": None, "cause": None, "duration_s": 61.0} | changes
    return judge(Ended(**values), tail.encode(), has_oom_kill=has_oom_kill)


@pytest.mark.parametrize("row", ENDS, ids=lambda row: row["name"])
def test_the_log_says_what_ended_a_trial(row: dict[str, str]) -> None:
    status, found = judge_end(row["log"], code=1)
    assert f"{found}; ".startswith(row["reason"])
    is_device = row["reason"].startswith("device")
    assert status is (TrialStatus.OUT_OF_MEMORY if is_device else TrialStatus.FAILED)


@pytest.mark.parametrize(
    ("how", "tail", "has_oom_kill", "expected"),
    [
        ({"code": 0}, "CUDA error: out of memory", True, ""),
        ({"code": 1}, "e: " + "x" * 999, False, f"exit code 1; its log ends: e: {'x' * 297}…"),
        ({"code": 1}, DIED, True, KERNEL),
        ({"code": 1}, f"{DIED}\n(L pid=2) update [repeated 140x across cluster]", True, KERNEL),
        ({"code": 1}, KILLED, True, KERNEL),
        ({"code": 1}, "ValueError: nan", True, "exit code 1; its log says: ValueError"),
        ({"signal": signal.SIGKILL}, "step 3", True, KERNEL),
        ({"signal": signal.SIGKILL}, "ValueError: nan", False, "killed by SIGKILL"),
        ({"signal": signal.SIGSEGV}, "step 3", False, "killed by SIGSEGV"),
        ({"signal": signal.SIGABRT}, TIMEOUT, False, "a collective timed out ("),
        ({"signal": signal.SIGABRT}, "AssertionError: x", False, "killed by SIGABRT; its log says: AssertionError"),
        ({"code": 0, "cause": Cause.TIMEOUT}, "", False, "time limit reached after 1 min 01 s; exit code 0"),
        ({"signal": signal.SIGTERM, "cause": Cause.INTERRUPT}, "CUDA error: out of memory", False, "the node agent"),
    ],
)  # fmt: skip
def test_signals_and_the_kernels_count_of_kills_are_read_with_the_log(
    how: dict[str, Any], tail: str, has_oom_kill: bool, expected: str
) -> None:
    assert judge_end(tail, has_oom_kill=has_oom_kill, **how)[1].startswith(expected)
