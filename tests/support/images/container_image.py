"""A container image made of a few fixed bytes, so that its digest is the same everywhere and can stand in golden files.

It holds empty folders and one program, ``python3``, which starts the tests' node agent with the Python that it is told
of.  What a Python needs is mounted, so that nothing is downloaded.  Its user is not root, as in the images that this
tool builds.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass, field
from typing import Any, Final

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
