"""A bundle brings no site: neither a replay nor a command about submissions uses its author's site."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import procfs
from rlk_repro.base.files import write_json
from rlk_repro.clusters.api import Submission
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.submit import sending
from tests.security.hostile import pack_stranger
from tests.support.job_examples import make_staged
from tests.support.slurm.examples import FakeSlurm
from tests.support.slurm.runs import Site, make_profile

SECRET = "aws" + "-" + "key" * 8
SLURM: dict[str, Any] = {
    "cluster": "slurm",
    "env": {"THEIRS": {"from_env": "AWS_SECRET_ACCESS_KEY"}},
    "slurm": {"gres": "none", "setup": ["touch /tmp/mark-of-a-stranger"], "extra": ["--comment=theirs"]},
    "container": {"runtime": "host", "python": "/theirs/python"},
}
THEIRS = ("mark-of-a-stranger", "THEIRS", "AWS_SECRET", "/theirs", "--comment=theirs")
SITE = {"context": "theirs", "namespace": "theirs", "results": {"claim": "theirs"}}
ACTING = (("cancel",), ("collect",), ("submit", "--resume"))


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "slurm", monkeypatch)
    made.answer("sbatch", "12\n")
    return made


@pytest.mark.parametrize("profile", [SLURM, SLURM | {"cluster": "k8s", "kubernetes": SITE}], ids=["slurm", "k8s"])
def test_a_recorded_cluster_is_not_submitted_to(call, fake: FakeSlurm, tmp_path: Path, profile: dict[str, Any]) -> None:
    bundle = str(pack_stranger(tmp_path / "id", profile=profile))
    code, _, err = call("replay", bundle, "--yes")
    said = f"--profile: needed for cluster {profile['cluster']}, expected a file, or one of "
    assert (code, fake.count("sbatch"), said in err) == (2, 0, True)


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_your_own_profile_is_used_and_the_recorded_one_is_named(
    call, fake: FakeSlurm, tmp_path: Path, cluster: str
) -> None:
    theirs = {"PYTHONPATH": "/theirs", "PYTHONWARNINGS": "all:0:antigravity.x:0:0", "BROWSER": "/bin/sh -c #%s"}
    local = {"cluster": "local", "env": theirs, "prepared_dir": "/theirs/prepared"}
    bundle = str(pack_stranger(tmp_path / "id", profile=local if cluster == "local" else SLURM))
    own = [] if cluster == "local" else ["--profile", str(make_profile(tmp_path))]
    code, out, err = call("replay", bundle, *own, "--dry-run", "--json")
    assert code == 0, err
    value = json.loads(out)
    name = "local" if cluster == "local" else "here"
    site = f"your profile {name}, cluster {cluster} (recorded: theirs, {cluster}; not used)"
    assert (value["what_runs"]["site"], value["plan"]["profile"]["env"]) == (site, {})
    assert [word for word in THEIRS if word in out] == []


@pytest.mark.real
def test_on_a_real_slurm_nothing_of_the_recorded_site_runs(call, site: Site, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    profile = SLURM | {"slurm": {"gres": "none", "setup": [f"env > {mark}"]}}
    bundle = str(pack_stranger(site.folder / "id", profile=profile))
    assert call("replay", bundle, "--yes")[0] == 2
    call("replay", bundle, "--profile", str(make_profile(site.folder)), "--yes")
    (run_dir,) = (RunDir(path.parent) for path in runs_root().glob("*/*/plan.json"))
    assert run_dir.is_sealed
    assert not mark.exists()
    assert SECRET not in "".join(path.read_text(errors="replace") for path in run_dir.root.rglob("*") if path.is_file())


def unpack_stranger(tmp_path: Path, cluster: str, job_id: str, profile: dict[str, Any]) -> RunDir:
    """Unpack a bundle by plain tar into the folder of the user's own run directories."""
    submission = Submission(cluster=cluster, job_id=job_id, submitted_at="now").to_json()
    bundle = pack_stranger(
        tmp_path / "packed" / "their-id",
        profile=profile,
        change=lambda run_dir: write_json(run_dir.submission, submission),
    )
    folder = runs_root() / "smoke" / "their-id"
    folder.mkdir(parents=True)
    subprocess.run(["tar", "xzf", bundle], cwd=folder, check=True)
    (folder / "SHA256SUMS").unlink()  # an interrupted run is packed without a seal
    return RunDir(folder)


def test_an_unpacked_bundle_ends_no_process_of_mine(call, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "30"], stdout=subprocess.PIPE) as sleeper:
        stat = procfs.read_stat(sleeper.pid)
        assert stat is not None
        run_dir = unpack_stranger(tmp_path, "local", f"{sleeper.pid}:{stat.start_ticks}", {"cluster": "local"})
        codes = [call("cancel", name)[0] for name in ("their-id", str(run_dir.root))]
        run_dir.agent_output.symlink_to(f"/proc/{sleeper.pid}/fd/1")
        codes.append(call("cancel", "their-id")[0])  # a link is refused before anything else
        assert (codes, sleeper.poll()) == ([1, 1, 5], None)
        sleeper.kill()


def test_an_unpacked_bundle_reaches_no_job_of_mine(call, tmp_path: Path, fake: FakeSlurm) -> None:
    fake.queue("12|RUNNING|None|node-1|x")
    run_dir = unpack_stranger(tmp_path, "slurm", "12", SLURM)
    for command in ACTING:
        code, _, err = call(*command, "their-id")
        assert (code, "their-id: was not submitted by you" in err) == (1, True), command
    assert call("status", "their-id")[1].startswith("their-id: was not submitted by you")
    assert call("logs", "their-id")[1].startswith("==> 00-p1-baseline <==")
    assert call("runs", "list", "--submitted")[0] == 0
    assert (fake.calls, sorted(run_dir.job.glob("*"))) == ([], [])


def test_what_i_submitted_is_not_redirected_by_its_own_folder(call, fake: FakeSlurm) -> None:
    run_dir = make_staged(runs_root() / "smoke" / "mine")[1]
    sending.record_submission(run_dir, Submission(cluster="slurm", job_id="11", submitted_at=""))
    fake.queue("11|PENDING|Resources||N/A")
    assert call("status", "mine")[1].startswith("mine: pending")
    write_json(run_dir.submission, Submission(cluster="slurm", job_id="12", submitted_at="").to_json())
    for command in ("status", "cancel", "collect"):
        code, _, err = call(command, "mine")
        assert (code, "differs from what was submitted, got '12 on slurm', expected 11 on slurm" in err) == (1, True)
    assert not fake.count("scancel")


def test_a_copy_of_my_published_plan_is_not_mine_and_a_moved_folder_is(call, tmp_path: Path) -> None:
    mine = make_staged(runs_root() / "smoke" / "mine")[1]
    assert not mine.is_packed(mine.token.name)
    theirs = RunDir(shutil.copytree(mine.root, mine.root.parent / "theirs"))
    for forge in (theirs.token.unlink, lambda: theirs.token.write_text("0" * 64)):
        forge()
        for command in ACTING:
            code, _, err = call(*command, "theirs")
            assert (code, "was not submitted by you" in err) == (1, True), command
    moved = Path(shutil.move(mine.root, tmp_path / "else where"))
    assert call("status", str(moved))[1] == "else where: staged but not submitted\n"
