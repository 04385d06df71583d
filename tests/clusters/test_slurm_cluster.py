"""The Slurm to play with: it goes when it is told to, with what runs on it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlk_repro.rundir.paths import RunDir
from tests.support.job_examples import find_descendants
from tests.support.slurm.cluster import find_missing
from tests.support.slurm.runs import REPOSITORY, REQUIRED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_cluster_to_play_with_ends_with_its_jobs(no_real_tools: None, tmp_path: Path, number: signal.Signals) -> None:
    missing = find_missing()
    if missing is not None:
        assert not os.environ.get(REQUIRED), missing
        pytest.skip(missing)
    argv = [sys.executable, "-m", "tests.support.slurm.cluster"]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        words = shlex.split(process.stdout.readline().replace("$PATH", os.environ["PATH"]))
        env = {**os.environ, **dict(word.split("=", 1) for word in words[1:])}
        subprocess.run(["sbatch", "--wrap", "sleep 300"], env=env, cwd=tmp_path, check=True, capture_output=True)
        process.send_signal(number)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    folder = Path(env["SLURM_CONF"]).parent
    assert not folder.exists()
    assert find_descendants(RunDir(folder)) == []
