"""List the libraries that this training process has loaded, without importing a package.

An unknown value is ``{"unknown": reason}``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

import torch

from rlk_repro.base.files import sha256_file
from rlk_repro.base.trees import hash_python
from rlk_repro.integration.measure.transport import read_transport
from rlk_repro.integration.route.rl_kernel import EXTENSION

SCHEMA: Final = 1
PACKAGES: Final = (
    "apex", "flash_attn", "megatron.core", "numpy", "ray", "rl_engine", "transformer_engine", "transformers", "triton",
    "vime", "vllm",
)  # fmt: skip
SOURCES: Final = ("megatron", "rl_engine", "vime")
"""Packages whose files are hashed, because a version number does not identify unreleased code."""
COLLECTIVES: Final = re.compile(r"/lib(nccl|rccl)\.so[^/]*$")
CUDNN: Final = re.compile(r"/libcudnn\.so[^/]*$")


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torch_git": torch.version.git_version or _unknown("this build of torch does not report its commit"),
        "cuda": torch.version.cuda or _unknown("torch was built without CUDA"),
        "hip": torch.version.hip or _unknown("torch was built without HIP"),
        "cudnn": _find_cudnn_version(),
        "cudnn_file": _find_loaded(maps, CUDNN),
        "nccl": _find_nccl_version(),
        "nccl_file": _find_loaded(maps, COLLECTIVES),
        "transport": read_transport(),
        "blas": _find_blas(torch.__config__.show()),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "packages": {name: _find_version(name) for name in PACKAGES},
        "sources": {name: _hash_sources(name) for name in SOURCES},
        "rl_kernel_extension": _find_file(EXTENSION),
    }


def _unknown(reason: str) -> dict[str, str]:
    return {"unknown": reason}


def _find_nccl_version() -> Any:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return _unknown("torch was built without NCCL")


def _find_cudnn_version() -> Any:
    """torch raises an error if another library, such as Transformer Engine, has loaded an older cuDNN."""
    try:
        return torch.backends.cudnn.version() or _unknown("torch was built without cuDNN")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return _unknown(str(error))


def _find_loaded(maps: Path, wanted: re.Pattern[str]) -> Any:
    try:
        paths = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if wanted.search(line)}
        return [{"path": _name_file(path), "sha256": sha256_file(Path(path))} for path in sorted(paths)] or _unknown(
            "not loaded"
        )
    except OSError as error:
        return _unknown(error.strerror or "not readable")


def _find_blas(configuration: str) -> Any:
    match = re.search(r"\bBLAS_INFO=(\w+)", configuration)
    return match[1] if match else _unknown("torch's build configuration names no BLAS")


def _hash_sources(name: str) -> Any:
    """Return the hash of a loaded module's sources, which a manifest records as ``package_tree``."""
    if name not in sys.modules:
        return _unknown("not loaded")
    folders = list(getattr(sys.modules[name], "__path__", ()))
    try:
        return hash_python(Path(folders[0])) if folders else _unknown("not a package, so it has no folder")
    except OSError as error:
        return _unknown(error.strerror or "not readable")


def _find_version(name: str) -> Any:
    if name not in sys.modules:
        return _unknown("not loaded")
    version = getattr(sys.modules[name], "__version__", None)
    return str(version) if version is not None else _unknown("the module reports no version")


def _find_file(name: str) -> Any:
    if name not in sys.modules:
        return _unknown("not loaded")
    path = getattr(sys.modules[name], "__file__", None)
    return {"path": _name_file(path), "sha256": sha256_file(Path(path))} if path else _unknown("the module has no file")


def _name_file(path: str) -> str:
    """Return the path from ``site-packages`` on, or the file's name: other folders could identify the machine."""
    match = re.search(r"(?:site|dist)-packages/.*", path)
    return match[0] if match else Path(path).name
