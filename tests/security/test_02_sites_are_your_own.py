"""A bundle brings no site: neither a replay nor a command about submissions uses its author's site."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import procfs
from rlk_repro.base.files import write_json
from rlk_repro.base.resources import user_state_dir
from rlk_repro.clusters.api import Submission
from rlk_repro.rundir.paths import RunDir
from rlk_repro.submit import sending
from tests.security.strangers import pack_stranger
from tests.support.job_examples import make_staged
from tests.support.slurm.fake import FakeSlurm
from tests.support.slurm.runs import Site, make_profile

SECRET = "aws" + "-" + "key" * 8
SLURM: dict[str, Any] = {
    "cluster": "slurm",
    "env": {"THEIRS": {"from_env": "AWS_SECRET_ACCESS_KEY"}},
    "slurm": {"gres": "none", "setup": ["touch /tmp/mark-of-a-stranger"], "extra": ["--comment=theirs"]},
    "container": {"runtime": "host", "python": "/theirs/python"},
}
KUBERNETES = {
    "cluster": "k8s",
    "kubernetes": {"context": "theirs", "namespace": "theirs", "results": {"claim": "theirs"}},
}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "slurm", monkeypatch)
    made.answer("sbatch", "12\n")
    return made


def test_a_recorded_slurm_site_is_not_submitted_to(call, fake: FakeSlurm, tmp_path: Path) -> None:
    bundle = str(pack_stranger(tmp_path / "id", profile=SLURM))
    code, _, err = call("replay", bundle, "--yes")
    assert (code, fake.count("sbatch")) == (2, 0)
    assert "--profile: needed for cluster slurm, expected a file, or one of " in err
    own = make_profile(tmp_path)
    code, out, err = call("replay", bundle, "--profile", str(own), "--dry-run")
    assert code == 0, err
    assert "your profile here, cluster slurm (recorded: theirs, slurm; not used)" in out
    for theirs in ("mark-of-a-stranger", "THEIRS", "AWS_SECRET", "/theirs/python", "--comment=theirs"):
        assert theirs not in out, theirs


def test_a_recorded_kubernetes_site_is_not_submitted_to(call, tmp_path: Path) -> None:
    bundle = pack_stranger(tmp_path / "id", profile=SLURM | {"cluster": "k8s"} | KUBERNETES)
    code, _, err = call("replay", str(bundle), "--yes")
    assert (code, "--profile: needed for cluster k8s" in err) == (2, True)


def test_a_recorded_local_profile_is_not_used(call, tmp_path: Path) -> None:
    theirs = {"PYTHONPATH": "/theirs", "PYTHONWARNINGS": "all:0:antigravity.x:0:0", "BROWSER": "/bin/sh -c #%s"}
    profile = {"cluster": "local", "env": theirs, "prepared_dir": "/theirs/prepared"}
    code, out, err = call("replay", str(pack_stranger(tmp_path / "id", profile=profile)), "--dry-run", "--json")
    assert code == 0, err
    value = json.loads(out)
    assert value["plan"]["profile"]["env"] == {}
    assert "/theirs" not in out
    assert value["what_runs"]["site"] == "your profile local, cluster local (recorded: theirs, local; not used)"


@pytest.mark.real
def test_on_a_real_slurm_nothing_of_the_recorded_site_runs(call, site: Site, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    profile = SLURM | {"slurm": {"gres": "none", "setup": [f"env > {mark}"]}}
    bundle = str(pack_stranger(site.folder / "id", profile=profile))
    assert call("replay", bundle, "--yes")[0] == 2
    call("replay", bundle, "--profile", str(make_profile(site.folder)), "--yes")
    (run_dir,) = (RunDir(path.parent) for path in Path(os.environ["RLK_REPRO_RUNS"]).glob("*/*/plan.json"))
    assert run_dir.is_sealed
    assert not mark.exists()
    assert SECRET not in "".join(path.read_text(errors="replace") for path in run_dir.root.rglob("*") if path.is_file())


def unpack_stranger(tmp_path: Path, submission: Submission, profile: dict[str, Any]) -> RunDir:
    """Unpack a bundle by plain tar into the folder of the user's own run directories."""

    def add(run_dir: RunDir) -> None:
        write_json(run_dir.submission, submission.to_json())

    bundle = pack_stranger(tmp_path / "packed" / "their-id", profile=profile, change=add)
    folder = Path(os.environ["RLK_REPRO_RUNS"]) / "smoke" / "their-id"
    folder.mkdir(parents=True)
    subprocess.run(["tar", "xzf", bundle], cwd=folder, check=True)
    (folder / "SHA256SUMS").unlink()  # an interrupted run is packed without a seal
    return RunDir(folder)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_an_unpacked_bundle_ends_no_process_of_mine(call, tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    stat = procfs.read_stat(sleeper.pid)
    assert stat is not None
    theirs = Submission(cluster="local", job_id=f"{sleeper.pid}:{stat.start_ticks}", submitted_at="now")
    run_dir = unpack_stranger(tmp_path, theirs, {"cluster": "local"})
    for name in ("their-id", str(run_dir.root)):
        code, _, err = call("cancel", name)
        assert (code, "their-id: was not submitted by you" in err) == (1, True)
    run_dir.agent_output.symlink_to(f"/proc/{sleeper.pid}/fd/1")
    assert call("cancel", "their-id")[0] == 5  # a link is refused before anything else
    assert sleeper.poll() is None


def test_an_unpacked_bundle_reaches_no_job_of_mine(call, tmp_path: Path, fake: FakeSlurm) -> None:
    fake.queue("12|RUNNING|None|node-1|x")
    theirs = Submission(cluster="slurm", job_id="12", submitted_at="now")
    run_dir = unpack_stranger(tmp_path, theirs, SLURM)
    for command in (("cancel",), ("collect",), ("submit", "--resume")):
        code, _, err = call(*command, "their-id")
        assert (code, "their-id: was not submitted by you" in err) == (1, True), command
    assert call("status", "their-id")[1].startswith("their-id: was not submitted by you")
    assert call("logs", "their-id")[1].startswith("==> 00-p1-baseline <==")
    assert call("runs", "list", "--submitted")[0] == 0
    assert fake.calls == []
    assert sorted(run_dir.job.glob("*")) == []


def test_what_i_submitted_is_not_redirected_by_its_own_folder(call, fake: FakeSlurm) -> None:
    run_dir = make_staged(Path(os.environ["RLK_REPRO_RUNS"]) / "smoke" / "mine")[1]
    sending.record_submission(run_dir, Submission(cluster="slurm", job_id="11", submitted_at=""))
    fake.queue("11|PENDING|Resources||N/A")
    assert call("status", "mine")[1].startswith("mine: pending")
    write_json(run_dir.submission, Submission(cluster="slurm", job_id="12", submitted_at="").to_json())
    for command in ("status", "cancel", "collect"):
        code, _, err = call(command, "mine")
        assert (code, "differs from what was submitted, got '12 on slurm', expected 11 on slurm" in err) == (1, True)
    assert not fake.count("scancel")


def test_a_copy_of_my_published_plan_is_not_mine(call, tmp_path: Path) -> None:
    mine = make_staged(Path(os.environ["RLK_REPRO_RUNS"]) / "smoke" / "mine")[1]
    assert not mine.is_packed(mine.token.name)
    theirs = RunDir(shutil.copytree(mine.root, mine.root.parent / "theirs"))
    for forge in (theirs.token.unlink, lambda: theirs.token.write_text("0" * 64)):
        forge()
        for command in (("cancel",), ("collect",), ("submit", "--resume")):
            code, _, err = call(*command, "theirs")
            assert (code, "was not submitted by you" in err) == (1, True), command
    assert call("status", "mine")[1] == "mine: staged but not submitted\n"


def test_a_moved_run_directory_is_still_mine(call, tmp_path: Path) -> None:
    run_dir = make_staged(tmp_path / "somewhere")[1]
    moved = Path(shutil.move(run_dir.root, tmp_path / "else where"))
    assert call("status", str(moved))[1] == "else where: staged but not submitted\n"


def test_without_a_state_folder_nothing_is_sent(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    code, _, err = call("submit", "--run", "smoke")
    assert code == 3
    assert f"{user_state_dir() / 'submissions'}" in err
    assert "cannot be written (" in err
    assert "hint: export XDG_STATE_HOME=/a/folder/with/room" in err
