"""A local run that another one runs beside says so, trial by trial."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SMALL = ["--set", "measure.pairs=1", "--set", "workload.grpo.rollout_batch_size=2", "--set", "measure.scored_steps=3",
         "--set", "measure.warmup_steps=1", "--exploratory"]  # fmt: skip


@pytest.fixture
def another_agent(tmp_path: Path) -> Iterator[str]:
    """A process whose command line is that of an agent."""
    argv = [sys.executable, "-c", "import time; time.sleep(300)", "-m", "rlk_repro.job", str(tmp_path / "theirs")]
    with subprocess.Popen(argv) as process:
        yield "theirs"
        process.kill()


@pytest.mark.real
def test_a_run_beside_another_has_a_finding_for_each_trial(
    call: Callable[..., tuple[int, str, str]], another_agent: str
) -> None:
    result = json.loads(call("submit", "smoke", *SMALL, "--wait", "--json")[1])
    analysis = json.loads((Path(result["bundle"]).parent / "analysis" / "analysis.json").read_text())
    found = {item["where"]: item for item in analysis["findings"] if item["where"].endswith(": host.other_runs")}
    assert sorted(found) == ["00-p1-baseline: host.other_runs", "01-p1-enabled: host.other_runs"]
    assert all(item["level"] == "warning" and another_agent in item["found"] for item in found.values())
