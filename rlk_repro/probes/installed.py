"""Describe an installed package without importing it: commit, changed files, RL-Kernel's extension.

pip and ``tools/rl_kernel`` record them.  Without its compiled extension, RL-Kernel runs plain PyTorch
and only logs a message, so a record must show whether the extension was present.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from rlk_repro.base.files import sha256_bytes, sha256_file
from rlk_repro.probes.sources import ask, derive
from rlk_repro.rundir.manifest import Fact, Unknown

BUILD_RECORD: Final = "rlk_repro_build.json"
"""The build record's name in pip's ``.dist-info`` folder; pip's RECORD lists the file, so pip also removes it."""
# pybind11 keeps each name as a C string.  A mangled name of a kernel begins with a digit and does not match.
BOUND_NAME: Final = re.compile(
    rb"(?<![A-Za-z0-9_])((?:fused|deterministic|batch_invariant|prefix_shared|sm\d+)_[a-z0-9_]+)\0"
)
CUOBJDUMP: Final = ("cuobjdump", "/usr/local/cuda/bin/cuobjdump")
DEVICE_CODE: Final = re.compile(r"\.sm_(\d+[a-z]?)\.(cubin|ptx)$", re.MULTILINE)
BUILD_PREFIXES: Final = ("KERNEL_ALIGN_", "FUSED_LOGP_")
BUILD_NAMES: Final = ("TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH", "RL_KERNEL_REQUIRE_EXT", "FORCE_CUDA")


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
        return TypeAdapter(BuildRecord).validate_json(text or "")
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
    # not ``distribution.files``, which leaves out files that are gone
    for name, recorded, *_ in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        algorithm, _, digest = recorded.partition("=")
        if digest and name.partition("/")[0] == module:
            yield name, digest, record_digest(Path(str(distribution.locate_file(name))), algorithm)


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


def probe_extension(package: Path | Unknown) -> dict[str, Fact]:
    names = ("extension", "extension_sha256", "extension_symbols", "extension_architectures")
    if isinstance(package, Unknown):
        return dict.fromkeys(("is_compiled", *names), package)
    files = find_extensions(package)
    if not files:
        return {"is_compiled": False, **dict.fromkeys(names, Unknown("rl_engine holds no _C*.so"))}
    return {
        "is_compiled": True,
        "extension": files[0].name,
        "extension_sha256": sha256_file(files[0]),
        "extension_symbols": list[Any](find_bound_names(files[0].read_bytes())),
        "extension_architectures": derive(list_device_code(files[0]), list[Any]),
    }


def find_extensions(package: Path) -> list[Path]:
    return sorted(package.glob("_C*.so"))


def find_bound_names(data: bytes) -> list[str]:
    """Return the names of the operators that a compiled extension offers to Python, such as ``fused_logp_sm90``."""
    return sorted({match[1].decode() for match in BOUND_NAME.finditer(data)})


def list_device_code(file: Path) -> list[str] | Unknown:
    """Return the GPU architectures for which an extension holds machine code (``sm_90``) or PTX (``compute_90``)."""
    tool = next((name for name in CUOBJDUMP if shutil.which(name)), None)
    if tool is None:
        return Unknown("cuobjdump is not on PATH")
    code = [ask([tool, question, str(file)], timeout_s=60.0) for question in ("--list-elf", "--list-ptx")]
    text = "".join(answer for answer in code if not isinstance(answer, Unknown))
    names = {f"{'sm' if kind == 'cubin' else 'compute'}_{number}" for number, kind in DEVICE_CODE.findall(text)}
    return sorted(names) or Unknown("cuobjdump found no code for a GPU")


def build_variables(environ: Mapping[str, str]) -> dict[str, Fact] | Unknown:
    names = sorted(name for name in environ if name in BUILD_NAMES or name.startswith(BUILD_PREFIXES))
    found: dict[str, Fact] = {name: environ[name] for name in names}
    return found or Unknown("no variable of RL-Kernel's build is set")


def serves(architecture: str, capability: str) -> bool:
    """Whether code for an architecture (``sm_90``) runs on a GPU with a compute capability (``9.0``).

    Machine code (``sm_``) also runs on later minor versions, and PTX (``compute_``) also on later major versions.
    Code for ``sm_90a`` runs on 9.0 only (CUDA programming guide, binary and PTX compatibility).
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if match is None:
        return False
    built, (major, minor) = (int(match[2]), int(match[3])), map(int, capability.split("."))
    if match[4]:
        return built == (major, minor)
    return built <= (major, minor) and (match[1] == "compute" or built[0] == major)
