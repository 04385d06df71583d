"""TAB and ``list`` offer names from the same folders."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.submit.test_sending import make_submitted


def press_tab(line: str) -> list[str]:
    """Return what bash gets for a line with the cursor at its end."""
    words = {"_RLK_REPRO_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    argv = [sys.executable, "-m", "rlk_repro"]
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ, **words}, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlk-repro submit qwen3-30b-a3b-random-8", ["qwen3-30b-a3b-random-8l"]),
        ("rlk-repro submit smoke --hardware h", ["h100", "h200"]),
        ("rlk-repro prepare qwen3-4b --stack vime", ["vime-host"]),
        ("rlk-repro profile show generic-a", ["generic-a100"]),
        ("rlk-repro runs show smok", ["smoke"]),
        ("rlk-repro list h", ["hardware"]),
    ],
)
def test_tab_completes_names(line: str, expected: list[str]) -> None:
    assert press_tab(line) == expected


@pytest.mark.parametrize("line", ["rlk-repro status 2", "rlk-repro submit --resume 2"])
def test_tab_completes_ids_of_submissions(line: str) -> None:
    run_dir = make_submitted()
    assert press_tab(line) == [run_dir.run_id]
