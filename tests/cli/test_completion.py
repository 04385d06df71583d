"""TAB and ``list`` offer names from the same folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from rlk_repro.base.resources import user_profiles_dir
from rlk_repro.cli.completion import FOLDERS
from tests import ROOT
from tests.submit.test_sending import make_submitted

Call = Callable[..., tuple[int, str, str]]


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


def test_list_names_what_other_commands_take(call: Call) -> None:
    user_profiles_dir().mkdir(parents=True)
    (user_profiles_dir() / "mine.yaml").write_text("broken: [")
    code, out, _ = call("list", "--json")
    found = json.loads(out)
    assert (code, sorted(found)) == (0, sorted(FOLDERS))
    assert found["runs"]["smoke"] == "jobs/smoke.yaml"
    assert found["profiles"]["mine"] == str(user_profiles_dir() / "mine.yaml")
    assert call("list", "hardware")[1].splitlines()[0] == "hardware:"
    code, _, err = call("list", "profile")
    assert (code, "did you mean 'profiles'?" in err) == (2, True)
