from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing
from tests.support.waiting import is_written, wait_until


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def test_arguments_arrive_as_they_are(weird_name: str, tmp_path: Path) -> None:
    done = proc.run(python("import sys; sys.stdout.write(sys.argv[1])", weird_name), cwd=tmp_path)
    assert done.stdout == weird_name
    assert list(tmp_path.iterdir()) == []


def test_both_pipes_are_drained() -> None:
    code = "import sys; sys.stderr.write('e' * 2**20); sys.stdout.write('o' * 2**20); sys.exit(3)"
    done = proc.run(python(code))
    assert (len(done.stdout), len(done.stderr), done.returncode, done.is_ok) == (2**20, 2**20, 3, False)


def test_a_command_that_hangs_is_killed_with_its_children() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    done = proc.run(python(code), timeout_s=0.5)
    assert done.is_timeout
    assert not done.is_ok
    assert time.monotonic() - began < 10


def test_a_grandchild_that_left_the_group_and_holds_the_pipes_is_not_waited_for() -> None:
    began = time.monotonic()
    done = proc.run(["sh", "-c", "echo out; echo err >&2; setsid sleep 30 & sleep 60"], timeout_s=4)
    assert time.monotonic() - began < 10
    assert (done.is_timeout, done.stdout, done.stderr) == (True, "out\n", "err\n")


def test_an_absent_program_is_named() -> None:
    with pytest.raises(EnvironmentMissing, match="no-such-tool: is not on PATH"):
        proc.run(["no-such-tool"])


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="no such folder"):
        proc.run([sys.executable, "-V"], cwd=tmp_path / "absent")


def test_a_started_process_leads_its_own_group() -> None:
    read, write = os.pipe()
    process = proc.start(python("import time; print('up', flush=True); time.sleep(60)"), output_fd=write)
    os.close(write)
    with os.fdopen(read) as output:
        assert output.readline() == "up\n"
    assert os.getpgid(process.pid) == process.pid
    assert proc.signal_group(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not proc.signal_group(process.pid, signal.SIGKILL)


def test_sigterm_ends_a_shown_command(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    shown = f"from rlk_repro.base import proc\nproc.run_shown({python(code)!r}, timeout_s=60)"
    process = subprocess.Popen(python(shown))
    wait_until(lambda: is_written(pid))
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not proc.signal_process(int(pid.read_text()), signal.SIGKILL)


def test_a_shown_command_past_its_time_is_ended() -> None:
    assert proc.run_shown(["sleep", "60"], timeout_s=0.1) is None
    assert proc.run_shown(["sh", "-c", "exit 3"], timeout_s=20) == 3
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
