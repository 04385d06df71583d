"""A user's own script that calls ``main``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = (
    *("prepare", "qwen3-4b-random-live", "--hardware", "h200"),
    *("--set", "workload.model.arguments.num-layers=1", "--set", "workload.model.arguments.vocab-size=4096"),
)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor writes the weights without workers")
def test_a_script_without_a_guard_ends_where_workers_start(tmp_path: Path) -> None:
    """Workers write the weights, and each worker imports the script."""
    script = tmp_path / "script.py"
    script.write_text("from rlk_repro.cli import main\n\nmain()\n")
    argv = [sys.executable, str(script), *COMMAND]
    ended = subprocess.run(argv, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3
    assert "call main() under: if __name__ == '__main__':" in ended.stderr
    assert "a process that generates weights ended early" in ended.stderr
