"""A container image made of a few fixed bytes, so that its digest is the same everywhere and can stand in golden files.

It holds empty folders and one program, ``python3``, which starts the tests' node agent with the Python that it is told
of.  What a Python needs is mounted, so that nothing is downloaded.  Its user is not root, as in the images that this
tool builds.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.slurm.cluster import SBIN
from tests.support.slurm.runs import REPOSITORY, REQUIRED

REFERENCE: Final = "registry.example/rlk-repro/two-nodes"
FOLDERS: Final = ("bin", "dev", "etc", "lib", "lib64", "opt", "opt/test", "proc", "root", "sys", "tmp", "usr")
PROGRAM_DIR: Final = "/opt/test"
INTERPRETER: Final = "TEST_PYTHON"
PROGRAM: Final = f'#!/bin/sh\nexec "${INTERPRETER}" -m tests.support.two_node_agent --ray "$@"\n'.encode()
_OCI: Final = "application/vnd.oci.image"


@dataclass(frozen=True, kw_only=True)
class OciImage:
    """``digest`` is the manifest's; ``files`` an OCI layout, path to content."""

    digest: str
    files: dict[str, bytes] = field(repr=False)

    def archive(self) -> bytes:
        """What ``podman load`` takes."""
        return _make_tar([(name, data, 0o644) for name, data in self.files.items()])


def make_image(tag: str = "test") -> OciImage:
    """Its tag is no part of its digest."""
    layer = _make_tar([(name, None, 0o755) for name in FOLDERS] + [(f"{PROGRAM_DIR[1:]}/python3", PROGRAM, 0o755)])
    config = _dump(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"User": "1000"},
            "rootfs": {"type": "layers", "diff_ids": [_sum(layer)]},
        }
    )
    manifest = _dump(
        {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": _describe(f"{_OCI}.config.v1+json", config),
            "layers": [_describe(f"{_OCI}.layer.v1.tar", layer)],
        }
    )
    name = {"org.opencontainers.image.ref.name": f"{REFERENCE}:{tag}"}
    described = _describe(f"{_OCI}.manifest.v1+json", manifest) | {"annotations": name}
    files = {f"blobs/sha256/{_sum(blob).partition(':')[2]}": blob for blob in (layer, config, manifest)}
    files |= {"oci-layout": _dump({"imageLayoutVersion": "1.0.0"})}
    files |= {"index.json": _dump({"schemaVersion": 2, "manifests": [described]})}
    return OciImage(digest=_sum(manifest), files=files)


def _make_tar(members: list[tuple[str, bytes | None, int]]) -> bytes:
    """None is a folder."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data, mode in members:
            member = tarfile.TarInfo(name)
            member.mode = mode
            if data is None:
                member.type = tarfile.DIRTYPE
            else:
                member.size = len(data)
            archive.addfile(member, io.BytesIO(data or b""))
    return content.getvalue()


def _describe(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _sum(data), "size": len(data)}


def _sum(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


# A podman that works where the tests run, and what it mounts into every container: the Python of the tests.


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


def mount_python() -> tuple[str, ...]:
    """As ``containers.conf`` has volumes."""
    return tuple(f"{folder}:{folder}:ro" for folder in (*HOST_FOLDERS, str(REPOSITORY)))
