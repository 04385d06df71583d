"""``profile init`` and ``profile check`` on a real Slurm with fake GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.spec.load import load_profile
from tests.support.run_plans import read_commands
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.runs import SETTINGS, Site
from tests.support.two_node_agent import write_agent

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def profile(cluster: Cluster, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What ``profile init`` makes of it."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value if name != "PATH" else f"{cluster.bin}{os.pathsep}{os.environ['PATH']}")
    path = tmp_path / "test.yaml"
    code, _, err = call("profile", "init", "--yes", "-o", str(path))
    assert code == 0, err
    return path


def test_the_cluster_is_described_as_it_is(profile: Path) -> None:
    found = load_profile(str(profile), []).model
    assert found.slurm is not None
    assert (found.hardware, found.slurm.partition, found.slurm.gres) == ("a100", "gpu", "gpu:a100")
    assert (found.slurm.max_time_min, found.slurm.block_size, found.slurm.account) == (1440, None, None)


def test_slurm_itself_checks_whether_it_would_accept_the_job(call: Call, profile: Path, cluster: Cluster) -> None:
    code, out, _ = call("profile", "check", str(profile), "--run", "smoke")
    assert code == 0, out
    assert "  info: sbatch --test-only: expected accepted, found Job " in out
    assert cluster.ask("squeue", "--noheader") == ""


def test_options_that_slurm_would_refuse_are_found_before_submission(call: Call, profile: Path) -> None:
    profile.write_text(profile.read_text().replace("partition: gpu", "partition: nope", 1))
    code, out, _ = call("profile", "check", str(profile))
    assert code == 1
    assert "  blocking: sbatch --test-only: expected accepted, found invalid partition specified" in out


@pytest.mark.usefixtures("profile")
def test_without_a_profile_the_cluster_is_asked_and_its_facts_are_shown(call: Call) -> None:
    code, out, err = call("submit", "smoke", "--cluster", "slurm", "--dry-run", "--show-job")
    assert code == 0, err
    assert "no --profile given: rlk-repro made one from cluster " in err
    assert "hardware a100, partition gpu, gres gpu:a100" in err
    assert "to save this profile: rlk-repro profile init --cluster slurm" in err
    assert "#SBATCH --partition=gpu" in out


def test_the_page_on_installing_works_command_by_command(
    call: Call, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container engine of this host is proposed; the stack of smoke has no images, so the nodes' Python runs it."""
    monkeypatch.chdir(site.folder)
    monkeypatch.setattr(sys, "executable", write_agent(site.folder))
    for command in read_commands("slurm.md", "Install on a Slurm cluster"):
        small = ["--hardware", "cpu", "--exploratory"] if command[0] == "submit" else []  # its A100s are files
        settings = [word for setting in SETTINGS if "--wait" in command for word in ("--set", setting)]
        code, out, err = call(*command, *small, *settings)
        assert code == 0, (command, out + err)
        assert "--wait" not in command or "bundle.tgz" in out
    assert Path("my-site.yaml").exists()
