"""List the libraries that this training process has loaded, without importing a package.

An unknown value is ``{"unknown": reason}``.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import read_start, sha256_file
from rlk_repro.base.trees import hash_python
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
LOG_VARIABLE: Final = "NCCL_DEBUG_FILE"
MAX_LOG_BYTES: Final = 16 << 20
_NETWORK: Final = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$", re.M)
_PATH: Final = re.compile(r"NCCL INFO Channel \S+ : .* via (\S+)", re.M)
_PLACE: Final = re.compile(r"/[0-9]+(?:\([0-9]+\))?")
_NVLS: Final = re.compile(r"NCCL INFO (?:NVLS comm 0x|Connected NVLS tree)", re.M)
_MNNVL: Final = re.compile(r"NCCL INFO .*\bMNNVL [1-9]", re.M)


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torch_git": torch.version.git_version or _unknown("this build of torch does not report its commit"),
        "cuda": torch.version.cuda or _unknown("torch was built without CUDA"),
        "hip": torch.version.hip or _unknown("torch was built without HIP"),
        # torch raises an error if another library has loaded an older cuDNN
        "cudnn": _try(torch.backends.cudnn.version, "torch was built without cuDNN"),
        "cudnn_file": _try(lambda: _find_loaded(maps, CUDNN), "not loaded"),
        "nccl": _try(_find_nccl_version, "torch was built without NCCL"),
        "nccl_file": _try(lambda: _find_loaded(maps, COLLECTIVES), "not loaded"),
        "transport": read_transport(),
        "blas": _find_blas(torch.__config__.show()),
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "packages": {name: _describe(name, _find_version) for name in PACKAGES},
        "sources": {name: _describe(name, _hash_sources) for name in SOURCES},
        "rl_kernel_extension": _describe(EXTENSION, _find_file),
    }


def _unknown(reason: str) -> dict[str, str]:
    return {"unknown": reason}


def _try(read: Callable[[], Any], if_none: str) -> Any:
    """Return what ``read`` finds; if it finds nothing or fails, the value is unknown."""
    try:
        return read() or _unknown(if_none)
    except AttributeError:
        return _unknown(if_none)
    except OSError as error:
        return _unknown(error.strerror or "not readable")
    except RuntimeError as error:
        return _unknown(str(error))


def _find_nccl_version() -> str:
    parts = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, parts))


def _find_loaded(maps: Path, wanted: re.Pattern[str]) -> list[dict[str, str]]:
    lines = [line for line in maps.read_text().splitlines() if wanted.search(line)]
    paths = sorted({line.split(maxsplit=5)[5] for line in lines})
    return [{"path": _name_file(path), "sha256": sha256_file(Path(path))} for path in paths]


def _find_blas(configuration: str) -> Any:
    match = re.search(r"\bBLAS_INFO=(\w+)", configuration)
    return match[1] if match else _unknown("torch's build configuration names no BLAS")


def _describe(name: str, read: Callable[[Any], Any]) -> Any:
    """Return what ``read`` finds of a module, if the process has loaded it."""
    if name not in sys.modules:
        return _unknown("not loaded")
    return _try(lambda: read(sys.modules[name]), "not found")


def _hash_sources(module: Any) -> Any:
    """Return the hash of a loaded module's sources, which a manifest records as ``package_tree``."""
    folders = list(getattr(module, "__path__", ()))
    return hash_python(Path(folders[0])) if folders else _unknown("not a package, so it has no folder")


def _find_version(module: Any) -> Any:
    version = getattr(module, "__version__", None)
    return str(version) if version is not None else _unknown("the module reports no version")


def _find_file(module: Any) -> Any:
    path = getattr(module, "__file__", None)
    return {"path": _name_file(path), "sha256": sha256_file(Path(path))} if path else _unknown("the module has no file")


def _name_file(path: str) -> str:
    """Return the path from ``site-packages`` on, or the file's name: other folders could identify the machine."""
    match = re.search(r"(?:site|dist)-packages/.*", path)
    return match[0] if match else Path(path).name


def read_transport(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Read which transport NCCL uses from its log, which alone reports it.

    Without a fast fabric NCCL falls back to TCP, and the slow network then dominates all times of a run.
    """
    pattern = environ.get(LOG_VARIABLE)
    if not pattern:
        return _unknown(f"{LOG_VARIABLE} is not set")
    host = socket.gethostname().partition(".")[0]
    try:
        data = read_start(Path(pattern.replace("%h", host).replace("%p", str(os.getpid()))), MAX_LOG_BYTES)
    except BundleUnreadable:
        return _unknown("NCCL has written no log")
    return parse_transport(data.decode(errors="replace"))


def parse_transport(log: str) -> dict[str, Any]:
    """Read from NCCL's log: the network between nodes, the channels' transports, and whether NVLS and MNNVL are on."""
    networks = sorted({match[1] for match in _NETWORK.finditer(log)})
    return {
        "network": ", ".join(networks) or "none",
        "paths": sorted({_PLACE.sub("", match[1]) for match in _PATH.finditer(log)}),
        "nvls": _NVLS.search(log) is not None,
        "mnnvl": _MNNVL.search(log) is not None,
    }
