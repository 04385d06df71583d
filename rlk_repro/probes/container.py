"""Find the container and the image of this process.

No image can hold its own digest, so the digest comes from a variable that the job script sets.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.files import sha256_bytes
from rlk_repro.probes.sources import derive, locate, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

SECTION: Final = "container"
DIGEST_VARIABLE: Final = "RLK_REPRO_IMAGE_DIGEST"
PROVENANCE: Final = "/opt/rlk-repro/provenance.json"
LOCK: Final = "lock.txt"
"""This file is in each Python environment that was made from a stack's lock file; the build record lies beside it."""
NONE: Final = "none"

# The first match decides, because a pod's container also has the marks of Docker or containerd.
VARIABLES: Final = (
    ("APPTAINER_CONTAINER", "apptainer"),
    ("SINGULARITY_CONTAINER", "apptainer"),
    ("KUBERNETES_SERVICE_HOST", "kubernetes"),
)
MARKERS: Final = (
    ("/.singularity.d", "apptainer"),
    ("/run/secrets/kubernetes.io", "kubernetes"),
    ("/run/.containerenv", "podman"),
    ("/.lock", "enroot"),  # enroot locks this file in the root of every container that it starts
    ("/.dockerenv", "docker"),
)


def probe(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> dict[str, Fact]:
    runtime = find_runtime(root, environ)
    return {
        "is_container": runtime != NONE,
        "runtime": runtime,
        "image_digest": _digest(environ, runtime),
        "image_record_sha256": derive(read_text(root, find_record(root)), lambda text: sha256_bytes(text.encode())),
    }


def find_runtime(root: Path, environ: Mapping[str, str]) -> str:
    """Return the name of the container runtime, such as ``docker`` or ``kubernetes``; ``none`` outside containers."""
    by_variable = [runtime for name, runtime in VARIABLES if environ.get(name)]
    by_marker = [runtime for path, runtime in MARKERS if locate(root, path).exists()]
    return next(iter([*by_variable, *by_marker]), environ.get("container") or NONE)


def find_record(root: Path = Path("/")) -> str:
    """Return the path of the build record: of the environment if it was made from a lock file, else of the image."""
    own = Path(sys.prefix)
    return str(own / "provenance.json") if root == Path("/") and (own / LOCK).is_file() else PROVENANCE


def load_provenance(root: Path) -> dict[str, Any] | Unknown:
    path = find_record(root)
    return derive(read_text(root, path), lambda text: _parse_object(text, path))


def _digest(environ: Mapping[str, str], runtime: str) -> str | Unknown:
    if environ.get(DIGEST_VARIABLE):
        return environ[DIGEST_VARIABLE]
    return Unknown("not in a container" if runtime == NONE else f"{DIGEST_VARIABLE} is not set")


def _parse_object(text: str, path: str) -> dict[str, Any] | Unknown:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Unknown(f"{path} is not JSON")
    return value if isinstance(value, dict) else Unknown(f"{path} is not a JSON object")
