"""A podman that works where the tests run, and what it mounts into every container: the Python of the tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.images.container_image import REFERENCE, make_image
from tests.support.slurm.cluster import SBIN
from tests.support.slurm.runs import REPOSITORY, REQUIRED, make_profile

PATH = f"/usr/bin:/bin:{SBIN}"
HOST_FOLDERS = tuple(dict.fromkeys(("/bin", "/lib", "/lib64", "/usr", sys.prefix, sys.base_prefix)))
# Limits that the machine of the tests may set, and the engine that copes with its control groups.
_CONFIGURATION = """\
[containers]
default_ulimits = ["nofile={num_files}:{num_files}", "nproc=1000:1000"]
volumes = [{volumes}]
env = [{env}]
[engine]
cgroup_manager = "cgroupfs"
runtime = "{runtime}"
"""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """podman with a configuration of its own."""

    configuration: Path

    def ask(self, *words: str) -> str:
        env = {"PATH": PATH, "HOME": os.environ["HOME"], "CONTAINERS_CONF": str(self.configuration)}
        done = subprocess.run(["podman", *words], env=env, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def list_containers(self) -> list[Any]:
        """Those of runs, whether they run or not."""
        return list(json.loads(self.ask("ps", "--all", "--filter", "label=rlk-repro", "--format", "json")))

    def list_mounts(self) -> list[str]:
        """What containers have mounted and left mounted; the network of an engine is no container's."""
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return [line for line in mounts if "containers/storage/overlay/" in line or "overlay-containers/" in line]


@contextlib.contextmanager
def running_engine(
    folder: Path, *, volumes: tuple[str, ...] = (), env: tuple[str, ...] = (), num_files: int = 1024
) -> Iterator[Engine]:
    """With the image of the tests.  Where a Slurm is required, so is podman; elsewhere its absence skips."""
    podman = shutil.which("podman", path=PATH)
    runtime = next((name for name in ("runc", "crun") if shutil.which(name, path=PATH)), None)
    if podman is None or runtime is None:
        missing = "not installed: podman with runc or crun (apt-get install podman runc)"
        assert not os.environ.get(REQUIRED), missing
        pytest.skip(missing)
    path = folder / "containers.conf"
    lists = {name: ", ".join(map(json.dumps, words)) for name, words in {"volumes": volumes, "env": env}.items()}
    path.write_text(_CONFIGURATION.format(runtime=runtime, num_files=num_files, **lists))
    engine = Engine(configuration=path)
    archive, tag = folder / "image.tar", f"test-{os.getpid()}"
    archive.write_bytes(make_image(tag).archive())
    engine.ask("load", "--input", str(archive))
    try:
        yield engine
    finally:
        engine.ask("rmi", f"{REFERENCE}:{tag}")


def make_podman_profile(folder: Path, engine: Engine) -> Path:
    """Of the tests' Slurm, with the Python of the tests in every container."""
    profile = make_profile(folder, setup=[f"export CONTAINERS_CONF='{engine.configuration}'"])
    value: dict[str, Any] = yaml.safe_load(profile.read_text())
    mounts = [{"source": source, "read_only": True} for source in HOST_FOLDERS]
    value["container"].update(runtime="podman", mounts=mounts)
    profile.write_text(yaml.safe_dump(value))
    return profile


def mount_python() -> tuple[str, ...]:
    """As ``containers.conf`` has volumes."""
    return tuple(f"{folder}:{folder}:ro" for folder in (*HOST_FOLDERS, str(REPOSITORY)))
