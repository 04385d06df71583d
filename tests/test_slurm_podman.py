"""A run in a real container on a real Slurm: podman, and an image that the test builds."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro import launch
from rlk_repro.backends.api import JobState
from rlk_repro.files import load_json
from rlk_repro.verify import verify_bundle
from tests.slurm_cluster import SBIN, Cluster
from tests.slurm_runs import LONG, SETTINGS, Run, Site, make_profile, on_site, start_or_skip

pytestmark = pytest.mark.real

# The image holds empty folders; what a Python needs is mounted, so that nothing is downloaded.
FOLDERS = ("bin", "dev", "etc", "lib", "lib64", "proc", "root", "sys", "tmp", "usr")
HOST_FOLDERS = ("/bin", "/lib", "/lib64", "/usr", sys.prefix, sys.base_prefix)
# Limits that the machine of the tests may set, and the engine that copes with its control groups.
CONFIGURATION = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "{runtime}"
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a podman that works here."""
    podman = shutil.which("podman", path=f"/usr/bin:{SBIN}")
    runtime = next((name for name in ("runc", "crun") if shutil.which(name, path=f"/usr/bin:{SBIN}")), None)
    if podman is None or runtime is None:
        pytest.skip("not installed: podman with runc or crun")
    configuration = tmp_path_factory.mktemp("podman") / "containers.conf"
    configuration.write_text(CONFIGURATION.format(runtime=runtime))
    return {"PATH": f"/usr/bin:/bin:{SBIN}", "HOME": os.environ["HOME"], "CONTAINERS_CONF": str(configuration)}


def podman(engine: dict[str, str], *words: str, data: bytes | None = None) -> str:
    done = subprocess.run(["podman", *words], env=engine, input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@pytest.fixture(scope="module")
def stack(engine: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in FOLDERS:
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
    podman(engine, "import", "-", "localhost/rlk-repro-test:1", data=content.getvalue())
    digest = podman(engine, "inspect", "localhost/rlk-repro-test:1", "--format", "{{.Digest}}")
    path = tmp_path_factory.mktemp("stack") / "stack.yaml"
    image = {"reference": "localhost/rlk-repro-test", "digest": digest}
    path.write_text(yaml.safe_dump({"stack": "test", "purpose": "An empty image.", "images": {"cpu": image}}))
    yield path
    podman(engine, "rmi", "--force", "localhost/rlk-repro-test:1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, stack: Path) -> Iterator[Cluster]:
    running = start_or_skip(tmp_path_factory.mktemp("slurm") / "c")
    yield running
    running.close()


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_real_tools: None) -> Iterator[Site]:
    with on_site(cluster, tmp_path, monkeypatch) as here:
        yield here


def submit(site: Site, engine: dict[str, str], stack: Path, settings: tuple[str, ...]) -> Run:
    profile = make_profile(site.folder, setup=[f"export CONTAINERS_CONF='{engine['CONTAINERS_CONF']}'"])
    value: dict[str, Any] = yaml.safe_load(profile.read_text())
    value["container"]["runtime"] = "podman"
    mounts = [{"source": folder, "read_only": True} for folder in dict.fromkeys(HOST_FOLDERS)]
    value["container"]["mounts"] = mounts
    profile.write_text(yaml.safe_dump(value))
    request = launch.Request(run="smoke", cluster="slurm", profile=str(profile), stack=str(stack), settings=settings,
                             is_exploratory=True)  # fmt: skip
    return Run(site=site, launched=launch.submit(launch.prepare(request)))


def containers(engine: dict[str, str]) -> list[Any]:
    return list(json.loads(podman(engine, "ps", "--all", "--filter", "label=rlk-repro", "--format", "json")))


def test_a_run_in_a_container_is_sealed_and_names_its_image(site: Site, engine: dict[str, str], stack: Path) -> None:
    run = submit(site, engine, stack, SETTINGS)
    assert (run.wait_for_end().state, run.poll().reason) == (JobState.DONE, "sealed, 2 of 2 trials ok")
    assert verify_bundle(run.collect()) == []
    node = run.run_dir.node_dirs()[0]
    facts = load_json(node.manifest)["sections"]["container"]
    digest = yaml.safe_load(stack.read_text())["images"]["cpu"]["digest"]
    assert (facts["runtime"], facts["image_digest"]) == ("podman", digest)
    assert containers(engine) == []


def test_a_cancelled_run_leaves_no_container(site: Site, engine: dict[str, str], stack: Path) -> None:
    run = submit(site, engine, stack, LONG)
    run.wait_for_step()
    assert len(containers(engine)) == 1
    assert run.cancel()
    assert run.wait_for_end().state is JobState.CANCELLED
    assert run.run_dir.bundle.is_file()
    assert containers(engine) == []


def test_a_container_whose_client_was_killed_is_removed(site: Site, engine: dict[str, str], stack: Path) -> None:
    run = submit(site, engine, stack, LONG)
    run.wait_for_step()
    site.cluster.ask("scancel", "--signal=KILL", f"{run.job_id}.0")
    assert run.wait_for_end().state is JobState.FAILED
    assert run.run_dir.bundle.is_file()
    assert containers(engine) == []
