"""Find an installed package's commit and changed files from the records of pip and of this tool's installer.

``tools/rl_kernel`` writes the build record.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from rlk_repro.base.files import sha256_bytes
from rlk_repro.rundir.manifest import Fact, Unknown

BUILD_RECORD: Final = "rlk_repro_build.json"
"""The build record's name in pip's ``.dist-info`` folder; pip's RECORD lists the file, so pip also removes it."""


@dataclass(frozen=True, kw_only=True)
class AppliedRepair:
    name: str
    file: str
    before_sha256: str
    after_sha256: str


@dataclass(frozen=True, kw_only=True)
class BuildRecord:
    """The sources and build settings of an installed RL-Kernel.

    A record holds no paths and no times, so equal builds have equal records.  ``tree`` is git's hash of the sources
    before the ``repairs``.
    """

    schema: int = 1
    repository: str | None
    commit: str | None
    tree: str
    is_dirty: bool
    diff_sha256: str
    repairs: tuple[AppliedRepair, ...] = ()
    build_variables: Mapping[str, str] = field(default_factory=dict)
    platform: str
    device_capability: str | None
    torch: str
    toolkit: str | None
    nvcc: str | None


def load_build_record(distribution: metadata.Distribution | None) -> BuildRecord | None:
    """Load the build record of this tool's installer; return None if another installer was used."""
    text = distribution.read_text(BUILD_RECORD) if distribution else None
    try:
        return TypeAdapter(BuildRecord).validate_json(text) if text else None
    except ValidationError:
        return None


def probe_installed(distribution: metadata.Distribution, module: str) -> dict[str, Fact]:
    record = load_build_record(distribution)
    commit = record.commit if record else _find_commit(distribution)
    facts: dict[str, Fact] = {
        "commit": commit or Unknown("the installation recorded no commit"),
        "tree": record.tree if record else Unknown("the installation recorded no hash of the source tree"),
    }
    changed = find_changed_files(distribution, module)
    if isinstance(changed, Unknown):
        return facts | {"is_dirty": changed, "diff_sha256": changed}
    if changed:
        return facts | {"is_dirty": True, "diff_sha256": sha256_bytes("\n".join(changed).encode(errors="replace"))}
    if record:
        return facts | {"is_dirty": record.is_dirty, "diff_sha256": record.diff_sha256}
    return facts | {"is_dirty": False, "diff_sha256": "clean"}


def find_changed_files(distribution: metadata.Distribution, module: str) -> list[str] | Unknown:
    """List the files of ``module`` that were changed after pip installed them, sorted, with their present digests."""
    recorded = list(_recorded_files(distribution, module))
    if not recorded:
        return Unknown("pip recorded no files of this package")
    return sorted(f"{file} {found}" for file, expected, found in recorded if expected != found)


def _recorded_files(distribution: metadata.Distribution, module: str) -> Iterator[tuple[str, str, str]]:
    for file in distribution.files or []:
        if file.parts[0] == module and file.hash is not None:
            yield str(file), file.hash.value, record_digest(Path(str(file.locate())), file.hash.mode)


def record_digest(path: Path, algorithm: str = "sha256") -> str:
    """Return a file's digest in the form of pip's RECORD: URL-safe base64 without padding; ``absent`` if unreadable."""
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, algorithm).digest()
    except OSError:
        return "absent"
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _find_commit(distribution: metadata.Distribution) -> str | None:
    """Return the commit that ``pip install git+…`` recorded (PEP 610)."""
    try:
        value: Any = json.loads(distribution.read_text("direct_url.json") or "{}")
        commit = value.get("vcs_info", {}).get("commit_id")
    except (ValueError, AttributeError):
        return None
    return commit if isinstance(commit, str) else None
