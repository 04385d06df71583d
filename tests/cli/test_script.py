"""The command line as a process of its own: in a user's script that calls ``main``, or without standard streams."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base import procfs
from tests import ROOT
from tests.support.waiting import wait_until


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RLK_REPRO_RUNS": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}

    def run(words: str) -> subprocess.CompletedProcess[str]:
        argv = ["bash", "-c", f"{sys.executable} -m rlk_repro {words}"]
        return subprocess.run(argv, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("submit smoke --dry-run >&-", 0),
        ("verify absent 2>&-", 2),
        ("profile init --cluster local -o made.yaml <&-", 0),
        ("status absent <&- >&- 2>&-", 2),
    ],
)
def test_a_command_with_closed_standard_streams_ends_as_usual(shell, words: str, code: int) -> None:
    assert shell(words).returncode == code


def test_a_run_of_a_command_without_standard_input_keeps_its_log(shell) -> None:
    answer = json.loads(shell("submit smoke --json <&-").stdout)
    pid = int(answer["submission"]["job_id"].partition(":")[0])
    try:
        assert Path(f"/proc/{pid}/fd/1").resolve() == (Path(answer["run_dir"]) / ".agent.log").resolve()
    finally:
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: (stat := procfs.read_stat(pid)) is None or not stat.is_running)
