"""What every backend keeps, whatever its cluster.  A module in the registry is tested here without being named."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.resources import list_names, profile_folders
from rlk_repro.clusters import local
from rlk_repro.clusters.api import Backend, Job, JobState, Submission
from rlk_repro.clusters.profiles import Ask, Proposal
from rlk_repro.clusters.registry import BACKENDS
from rlk_repro.plan import Plan, make_plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack
from rlk_repro.submit.stage import AuthorFiles, stage
from tests import ROOT
from tests.conftest import WEIRD_NAMES
from tests.support.job_examples import QUICK
from tests.support.slurm.examples import FakeSlurm

# A cluster that knows no job and of which nothing may be changed.
KUBECTL = """\
#!/bin/sh
case "$*" in
*"version --client"*) echo '{"clientVersion": {"gitVersion": "v1.32.4"}}' ;;
*" get "*) ;;
*) echo "Error from server (Forbidden): a test asked for $*" >&2; exit 1 ;;
esac
"""
STACKS = {"k8s": "example"}  # pods need an image


@pytest.fixture(params=BACKENDS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> str:
    folder = tmp_path_factory.mktemp("clients")
    fake = FakeSlurm(folder / "slurm", monkeypatch)
    fake.queue()
    for name in ("sbatch", "scancel"):
        fake.answer(name, error=f"{name}: error: a test asked for it", code=1)
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return str(request.param)


@pytest.fixture
def backend(cluster: str) -> Backend:
    return BACKENDS[cluster]


def plans(cluster: str) -> Iterator[tuple[Plan, AuthorFiles]]:
    """The smoke run with every profile that is shipped for the cluster."""
    for name in list_names(profile_folders(cluster)):
        profile = load_profile(name, profile_folders(cluster))
        if profile.model.cluster != cluster:
            continue
        run = load_run("smoke")
        hardware = load_hardware(profile.model.hardware or "h200")
        stack = load_stack(STACKS.get(cluster, run.model.stack))
        plan = make_plan(run=run, stack=stack, hardware=hardware, profile=profile)
        yield plan, AuthorFiles(run=run.data, stack=stack.data, hardware=hardware.data, profile=profile.data)


def a_submission(cluster: str, job_id: str) -> Submission:
    return Submission(cluster=cluster, job_id=job_id, submitted_at="2026-11-20T13:45:12.345Z", details={"a": "ü\n'"})


def test_a_job_has_a_command_and_files_that_can_be_staged(backend: Backend, cluster: str, tmp_path: Path) -> None:
    staged: list[Path] = []
    weird_name = "".join(WEIRD_NAMES)
    for number, (plan, inputs) in enumerate(plans(cluster)):
        run_dir = RunDir(tmp_path / weird_name / str(number))
        job = backend.render(plan, run_dir)
        assert (job, list(tmp_path.rglob("*"))) == (backend.render(plan, run_dir), staged)
        assert job.command
        assert not any("\0" in part for part in job.command)
        stage(plan, inputs, run_dir, job)
        staged = list(tmp_path.rglob("*"))
        assert {path.name: path.read_text() for path in run_dir.job.iterdir()} == dict(job.files)
    assert [path.name for path in tmp_path.iterdir()] == [weird_name]  # there was something to render


def test_an_unknown_job_is_unknown_and_cancelling_it_twice_is_fine(
    backend: Backend, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir(tmp_path)
    for job_id in ("", "no such job", "$(touch pwned)", "4194304:1", "-1", "999999999"):
        submission = a_submission(cluster, job_id)
        assert Submission.from_json(submission.to_json()) == submission
        assert backend.poll(submission, run_dir).state is JobState.UNKNOWN
        assert not backend.cancel(submission, run_dir)
        assert list(backend.logs(submission, run_dir, is_following=False)) == []
    assert not (tmp_path / "pwned").exists()


@pytest.fixture
def lsf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that no other file knows: this machine under another name, with queues and a fake trainer."""
    monkeypatch.chdir(ROOT)
    backend = ModuleType("lsf")
    vars(backend).update(vars(local))

    def submit(job: Job, run_dir: RunDir) -> Submission:
        command = (sys.executable, "-m", "tests.support.job_examples", str(run_dir.root), *QUICK)
        return replace(local.submit(replace(job, command=command), run_dir), cluster="lsf")

    def propose_profile(ask: Ask) -> tuple[Proposal, str]:
        queue = ask("Which queue?", ["normal", "short"], "normal")
        values = {"profile": "site", "cluster": "lsf", "hardware": "cpu", "settings": {"queue": queue}}
        return Proposal(values=values), "LSF"

    def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
        queue = str(profile.settings["queue"])
        if queue in {"normal", "short"}:
            return []
        return [Finding(Level.BLOCKING, "settings.queue", "normal or short", queue)]

    own = {"submit": submit, "propose_profile": propose_profile, "check_profile": check_profile, "CLIENT": "bsub"}
    vars(backend).update(own)
    monkeypatch.setitem(BACKENDS, "lsf", cast("Backend", backend))


@pytest.mark.usefixtures("lsf")
def test_a_cluster_that_no_other_file_knows_runs_a_job_from_profile_to_bundle(call: Any, tmp_path: Path) -> None:
    def run(*argv: str, expected: int = 0) -> str:
        code, out, err = call(*argv)
        assert code == expected, out + err
        return str(out + err)

    profile = tmp_path / "site.yaml"
    run("profile", "init", "--cluster", "lsf", "--yes", "-o", str(profile))
    assert ": 0 findings" in run("profile", "check", str(profile))
    profile.write_text(profile.read_text().replace("queue: normal", "queue: night"))
    assert "normal or short" in run("profile", "check", str(profile), expected=1)
    run("submit", "smoke", "--cluster", "lsf", "--profile", str(profile), "--exploratory", "--pairs", "1")
    run("status", "--watch")
    assert json.loads(run("status", "--json"))["state"] == "done"
    assert "step" in run("logs")
    run("verify", run("collect").split()[-1])
    assert '"lsf"' in run("runs", "list", "--submitted", "--json")
    assert "expected one of local, slurm, k8s, lsf" in run("submit", "smoke", "--cluster", "pbs", expected=2)
