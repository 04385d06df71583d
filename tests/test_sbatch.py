"""The script that Slurm gets: its text, its quoting, and what is refused before anything is sent."""

from __future__ import annotations

import difflib
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.errors import SpecError
from rlk_repro.plan import Plan
from rlk_repro.rundir import RunDir
from rlk_repro.sbatch import SCRIPT, render_sbatch, sbatch_command, time_limit_min
from rlk_repro.sbatch.options import find_segment
from rlk_repro.sbatch.quoting import Directive, ShellLine, quote
from tests.sbatch_examples import EXAMPLES, IMAGE_DIR, plan_for, render_examples, run_dir_of, with_site

HOSTILE = ("with space", "a'; touch pwned", 'double"quote', "$(touch pwned)", "`touch pwned`", "back\\slash \\", "ünïcødé",
           "# no comment", "a,b", "-rf", "{{ run_dir }}", "*")  # fmt: skip


def options_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def problems_of(plan: Plan, **arguments: object) -> list[str]:
    with pytest.raises(SpecError) as caught:
        render_sbatch(plan, run_dir_of(plan), **arguments)  # type: ignore[arg-type]
    return [str(problem) for problem in caught.value.problems]


def test_the_shipped_examples_are_what_is_rendered() -> None:
    shipped = {path.name: path.read_text() for path in EXAMPLES.iterdir()}
    rendered = render_examples()
    assert sorted(shipped) == sorted(rendered)
    for name, text in rendered.items():
        difference = difflib.unified_diff(shipped[name].splitlines(), text.splitlines(), name, "rendered", lineterm="")
        assert "\n".join(difference) == "", "make goldens"


def test_every_example_passes_bash_and_shellcheck() -> None:
    paths = sorted(str(path) for path in EXAMPLES.iterdir())
    for path in paths:
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or "shellcheck"
    done = subprocess.run([shellcheck, "--norc", *paths], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
