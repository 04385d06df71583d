"""Describe RL-Kernel's compiled extension without importing it.

Without the extension, RL-Kernel runs plain PyTorch and only logs a message, so a record must show
whether the extension was present.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.files import sha256_file
from rlk_repro.probes.sources import ask, derive
from rlk_repro.rundir.manifest import Fact, Unknown

# pybind11 keeps each name as a C string.  A mangled name of a kernel begins with a digit and does not match.
BOUND_NAME: Final = re.compile(
    rb"(?<![A-Za-z0-9_])((?:fused|deterministic|batch_invariant|prefix_shared|sm\d+)_[a-z0-9_]+)\0"
)
CUOBJDUMP: Final = ("cuobjdump", "/usr/local/cuda/bin/cuobjdump")
DEVICE_CODE: Final = re.compile(r"\.sm_(\d+[a-z]?)\.(cubin|ptx)$", re.MULTILINE)
BUILD_PREFIXES: Final = ("KERNEL_ALIGN_", "FUSED_LOGP_")
BUILD_NAMES: Final = ("TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH", "RL_KERNEL_REQUIRE_EXT", "FORCE_CUDA")


def probe_extension(package: Path | Unknown) -> dict[str, Fact]:
    if isinstance(package, Unknown):
        return _absent(package, package)
    files = find_extensions(package)
    if not files:
        return _absent(False, Unknown("rl_engine holds no _C*.so"))
    return {
        "is_compiled": True,
        "extension": files[0].name,
        "extension_sha256": sha256_file(files[0]),
        "extension_symbols": list[Any](find_bound_names(files[0].read_bytes())),
        "extension_architectures": derive(list_device_code(files[0]), list[Any]),
    }


def find_extensions(package: Path) -> list[Path]:
    return sorted(package.glob("_C*.so"))


def _absent(is_compiled: Fact, reason: Unknown) -> dict[str, Fact]:
    names = ("extension", "extension_sha256", "extension_symbols", "extension_architectures")
    return {"is_compiled": is_compiled, **dict.fromkeys(names, reason)}


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
