"""A cluster is one folder and its line in the registry: LSF, by fakes of its programs, from profile to bundle."""

import json
import os
from pathlib import Path

import pytest

from tests.support.copied_package import Copy

LSF = Path(__file__).parent / "lsf"
REGISTRY = "rlk_repro/clusters/registry.py"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    found = Copy(tmp_path / "source")
    (found.root / "rlk_repro/clusters/lsf").mkdir()
    for name in ("__init__.py", "backend.py"):
        found.add(LSF / name, f"rlk_repro/clusters/lsf/{name}")
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
