"""One trial's folder: what it holds before the trainer starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlk_repro.job.process import Limits
from rlk_repro.job.stop import Stop
from rlk_repro.job.trial import Watch, run_trial
from rlk_repro.results import TrialStatus
from rlk_repro.rundir import RunDir
from rlk_repro.workloads.api import Command

WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1], 'memory.pickle').write_text('x')"


@pytest.mark.parametrize("has_traces", [True, False])
def test_what_writes_traces_finds_their_folder(tmp_path: Path, has_traces: bool) -> None:
    """torch's memory snapshot makes none."""
    run_dir = RunDir(tmp_path)
    folder = run_dir.trial("00-p1-baseline")
    command = Command(argv=(sys.executable, "-c", WRITE, str(folder.traces if has_traces else tmp_path)), env={})
    outcome = run_trial(
        command,
        run_dir,
        folder,
        allocation="a",
        limits=Limits(time_limit_s=60),
        stop=Stop(),
        watch=Watch(see_output=lambda _: None, see_pid=lambda _: None),
    )
    assert outcome.status is TrialStatus.OK
    assert folder.traces.is_dir() is has_traces
