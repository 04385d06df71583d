"""Image builds, image runs and the torch of ``make`` are pinned and have only the rights that they need."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlk_repro.clusters.slurm.script import render_sbatch
from tests import ROOT
from tests.support.copied_package import make_wheel
from tests.support.slurm.examples import IMAGE_DIR, plan_for, run_dir_of, with_site

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSIONS = ROOT / "docker" / "versions.env"


def steps_of(path: Path) -> list[dict[str, object]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_buildx_by_version(path: Path) -> None:
    steps = steps_of(path)
    for index, step in enumerate(steps):
        action = str(step.get("uses", ""))
        assert not action or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        if action.startswith("docker/setup-buildx-action@"):
            assert "docker/versions.env" in str(steps[index - 1].get("run"))
            assert step["with"] == {
                "version": "${{ env.BUILDX_VERSION }}",
                "driver-opts": "image=${{ env.BUILDKIT_IMAGE }}",
            }


def test_versions_are_exact_and_images_by_digest() -> None:
    values = dict(line.split("=", 1) for line in VERSIONS.read_text().splitlines() if not line.startswith("#"))
    assert re.fullmatch(r"v\d+\.\d+\.\d+", values["BUILDX_VERSION"])
    assert re.fullmatch(r"docker\.io/moby/buildkit:v[\d.]+@sha256:[0-9a-f]{64}", values["BUILDKIT_IMAGE"])
    bake = (ROOT / "docker" / "docker-bake.hcl").read_text()
    assert re.search(
        r'type += "sbom"\n +generator = "docker\.io/docker/buildkit-syft-scanner@sha256:[0-9a-f]{64}"', bake
    )


def test_make_refuses_another_buildx_before_it_builds(tmp_path: Path) -> None:
    log = tmp_path / "asked"
    (tmp_path / "docker").write_text(f'#!/bin/sh\necho "$*" >>{log}\necho "github.com/docker/buildx v0.0.1 abc"\n')
    (tmp_path / "docker").chmod(0o755)
    words = ["make", "-o", ".venv/.base", "images"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(words, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert "docker buildx is not v0." in done.stderr
    assert log.read_text() == "buildx version\n"


def test_torch_is_installed_only_as_one_of_the_listed_files(tmp_path: Path) -> None:
    """The index serves a stand-in of the same name and version, as a careless or hostile index would."""
    (tmp_path / "requirements").mkdir()
    lock = (ROOT / "requirements" / "torch.txt").read_text()
    (tmp_path / "requirements" / "torch.txt").write_text(lock)
    wheels = tmp_path / "wheels"
    wheel = make_wheel(wheels, "torch", "2.13.0")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    env = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}

    def install(*words: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / "tools" / "install-torch.sh"
        argv = ["sh", str(script), "env", *words]
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    done = install()
    assert done.returncode == 1
    assert done.stderr.startswith("make: fetches torch==2.13.0 now: 0.2 GB without CUDA, several GB with it")
    assert "make: this index serves another build of torch==2.13.0 than those of requirements/torch.txt" in done.stderr
    assert wheel.name in done.stderr
    assert not list((tmp_path / "env").rglob("torch*"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "requirements" / "torch.txt").write_text(f"torch==2.13.0 --hash=sha256:{digest}\n")
    assert install().returncode == 0
    assert list((tmp_path / "env").rglob("torch-2.13.0.dist-info"))
    assert (install().returncode, install("torch==0.0.0").returncode) == (0, 0)  # torch is installed


@pytest.mark.parametrize("runtime", ["docker", "podman"])
@pytest.mark.parametrize("hardware", ["h200", "mi300x"])
def test_containers_have_no_capability_and_no_way_to_one(runtime: str, hardware: str) -> None:
    plan = plan_for(hardware=hardware, stack="example")
    site = with_site(plan, container={"runtime": runtime, "image_dir": IMAGE_DIR})
    script = render_sbatch(site, run_dir_of(site))
    assert "\n  --cap-drop=ALL\n  --security-opt=no-new-privileges\n" in script
    assert ('"--user=$(id -u):$(id -g)"' in script) is (runtime == "docker")
    assert "chown" not in script


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("[name=seccomp,profile=builtin]", f"{os.getuid()}:{os.getgid()}"), ("[name=rootless]", "0:0")],
)
def test_docker_containers_run_as_the_submitting_user(tmp_path: Path, answer: str, expected: str) -> None:
    """Under a rootless daemon, root in the container is the submitting user."""
    plan = plan_for(stack="example")
    site = with_site(plan, container={"runtime": "docker", "image_dir": IMAGE_DIR})
    script = render_sbatch(site, run_dir_of(site))
    begin, end = script.index("identity=("), script.index("# a killed client leaves")
    (tmp_path / "docker").write_text(f"#!/bin/sh\necho '{answer}'\n")
    (tmp_path / "docker").chmod(0o755)
    text = f'set -euo pipefail; allocation=1.0\n{script[begin:end]}\nprintf "%s\\n" "${{container[@]}}"'
    done = subprocess.run(
        ["bash", "-c", text], check=False, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("--user")] == [f"--user={expected}"]


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_an_ordinary_user_can_read_what_the_image_holds(name: str) -> None:
    lines = (ROOT / "docker" / f"Dockerfile.{name}").read_text().splitlines()
    assert "RUN chmod 0755 /root" in lines
