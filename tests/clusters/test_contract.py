"""What every backend keeps, whatever its cluster.  A module in the registry is tested here without being named.

A backend that calls tools brings fakes of them in ``tests/clusters/fakes/<cluster>/``, first on PATH here.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.base.resources import list_names, profile_folders
from rlk_repro.clusters.api import Backend, JobState, Submission
from rlk_repro.clusters.registry import BACKENDS, get_backend
from rlk_repro.plan import Plan, make_plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack
from rlk_repro.submit.stage import AuthorFiles, stage
from tests.support.copied_package import Copy

FAKES = Path(__file__).parent / "fakes"
STACKS = {"k8s": "example"}  # pods need an image


@pytest.fixture(params=BACKENDS)
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    monkeypatch.setenv("PATH", f"{FAKES / name}{os.pathsep}{os.environ['PATH']}")
    return name


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


def test_there_is_something_to_render(cluster: str) -> None:
    assert list(plans(cluster))


def test_rendering_is_deterministic_and_writes_nothing(backend: Backend, cluster: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for plan, _ in plans(cluster):
        assert backend.render(plan, RunDir(tmp_path / "run")) == backend.render(plan, RunDir(tmp_path / "run"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_job_has_a_command_and_files_that_can_be_staged(
    backend: Backend, cluster: str, tmp_path: Path, weird_name: str
) -> None:
    for number, (plan, inputs) in enumerate(plans(cluster)):
        run_dir = RunDir(tmp_path / weird_name / str(number))
        job = backend.render(plan, run_dir)
        assert job.command
        assert not any("\0" in part for part in job.command)
        stage(plan, inputs, run_dir, job)
        assert {path.name: path.read_text() for path in run_dir.job.iterdir()} == dict(job.files)
    assert [path.name for path in tmp_path.iterdir()] == [weird_name]


@pytest.mark.parametrize("job_id", ["", "no such job", "$(touch pwned)", "4194304:1", "-1", "999999999"])
def test_an_unknown_job_is_unknown_and_cancelling_it_twice_is_fine(
    backend: Backend, cluster: str, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    submission, run_dir = a_submission(cluster, job_id), RunDir(tmp_path)
    assert backend.poll(submission, run_dir).state is JobState.UNKNOWN
    assert not backend.cancel(submission, run_dir)
    assert not backend.cancel(submission, run_dir)
    assert not (tmp_path / "pwned").exists()


def test_a_submission_survives_its_file(cluster: str) -> None:
    submission = a_submission(cluster, "17")
    assert Submission.from_json(submission.to_json()) == submission


def test_logs_of_a_job_that_never_wrote_any_end(backend: Backend, cluster: str, tmp_path: Path) -> None:
    assert list(backend.logs(a_submission(cluster, "1"), RunDir(tmp_path), is_following=False)) == []


def test_the_reason_names_what_is_missing(backend: Backend) -> None:
    assert backend.available() is None or backend.available()


def test_a_backend_is_a_module_without_classes_of_its_own(backend: Backend) -> None:
    own = [item for _, item in inspect.getmembers(backend, inspect.isclass) if item.__module__ == backend.__name__]  # type: ignore[attr-defined]
    assert own == []


def test_an_unknown_cluster_names_those_there_are() -> None:
    with pytest.raises(SpecError) as caught:
        get_backend("lsf")
    known = ", ".join(BACKENDS)
    assert str(caught.value) == f"--cluster: unknown, got 'lsf', expected one of {known}"


# A cluster is one folder and its line in the registry: LSF, by fakes of its programs, from profile to bundle.


LSF = Path(__file__).parent / "lsf"
REGISTRY = "rlk_repro/clusters/registry.py"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    found = Copy(tmp_path / "source")
    (found.root / "rlk_repro/clusters/lsf").mkdir()
    found.add(LSF / "backend.py", "rlk_repro/clusters/lsf/backend.py")
    found.replace(REGISTRY, "import local\n", "import local\nfrom rlk_repro.clusters.lsf import backend as lsf\n")
    found.replace(REGISTRY, '{"local": local,', '{"lsf": lsf, "local": local,')
    assert found.touched() == {REGISTRY: 2}
    return found


def test_a_cluster_that_no_other_file_knows_runs_a_job_from_profile_to_bundle(copy: Copy, tmp_path: Path) -> None:
    env = {
        "PATH": f"{LSF / 'bin'}:{os.environ['PATH']}",
        "LSF_FAKE": str(tmp_path / "lsf"),
        "RLK_REPRO_RUNS": str(tmp_path / "runs"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }

    def call(*argv: str | Path, code: int = 0) -> str:
        done = copy.run(*argv, cwd=tmp_path, **env)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    profile = tmp_path / "site.yaml"
    call("profile", "init", "--cluster", "lsf", "--yes", "-o", profile)
    assert json.loads(call("profile", "show", profile, "--json"))["settings"] == {"queue": "normal"}
    assert ": 0 findings" in call("profile", "check", profile)
    profile.write_text(profile.read_text().replace("queue: normal", "queue: night"))
    assert "one of normal, short" in call("profile", "check", profile, code=1)
    profile.write_text(profile.read_text().replace("queue: night", "queue: short"))
    checks = json.loads(copy.run("doctor", "--json", cwd=tmp_path, **env).stdout)["checks"]
    assert "bsub" in next(item["found"] for item in checks if item["name"] == "scheduler")

    steps = ("--set", "measure.warmup_steps=1", "--set", "measure.scored_steps=2")
    request = ("--run", "smoke", "--cluster", "lsf", "--profile", profile, "--pairs", "1", "--exploratory", *steps)
    script = json.loads(call("submit", *request, "--dry-run", "--json"))["job"]["files"]["job.lsf"]
    assert "#BSUB -q short\n" in script
    result = json.loads(call("submit", *request, "--wait", "--json"))
    assert result["is_ok"]
    bundle = Path(result["bundle"])
    call("verify", bundle)
    run_id = bundle.parent.name
    assert json.loads(call("status", run_id, "--json"))["state"] == "done"
    assert "step" in call("logs", run_id)
    assert run_id in call("runs", "list", "--submitted", "--json")
    unknown = copy.run("submit", "--run", "smoke", "--cluster", "pbs", cwd=tmp_path, **env)
    assert "expected one of lsf, local, slurm, k8s" in unknown.stderr
