"""Build RL-Kernel from a folder and install it into this Python's environment; change nothing else there.

Where torch sees no GPU, RL-Kernel's setup compiles no extension and gives no error.  So this module first checks what
the compilation needs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.operators import Platform

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD_TOOLS: Final = ROOT / "requirements" / "rl-kernel.txt"
PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")
TIMEOUT_S: Final = 3600.0
SM90: Final = "KERNEL_ALIGN_FORCE_SM90"
REQUIRE_EXTENSION: Final = "RL_KERNEL_REQUIRE_EXT"
"""With this variable, newer commits of RL-Kernel refuse a build that would leave the extension out."""
# What a failed build prints, and what it means; checked in this order.
BUILD_TROUBLE: Final = (
    ("mismatches the version that was used to compile", "use the nvcc of the CUDA release that torch was built with"),
    ("Unsupported gpu architecture", "this nvcc is too old for this GPU, or TORCH_CUDA_ARCH_LIST names another GPU"),
    ('has no member "Max"', "CUDA 13 needs the repair that comes with --sm90"),
    ("requires’ does not name a type", "this torch needs C++20, and RL-Kernel requests C++17: use an older torch"),
    ("Killed", "too little memory: MAX_JOBS=2"),
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts of this machine: the answer of ``check.py machine``, and the compiler."""

    platform: str
    device: str = ""
    device_capability: str | None = None
    torch: str
    toolkit: str | None
    nvcc: str | None


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """Return the CUDA compiler that torch would use."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    path = Path(home) / "bin/nvcc" if home else Path(on_path or "/usr/local/cuda/bin/nvcc")
    return path if path.is_file() else None


def read_nvcc_version(nvcc: Path | None) -> str | None:
    """Return the compiler's version, such as ``13.0``; None if there is no compiler or its version is unreadable."""
    if nvcc is None:
        return None
    match = re.search(r"release (\d+\.\d+)", proc.run([str(nvcc), "--version"]).stdout)
    return match[1] if match else None


def describe_machine(answer: Mapping[str, Any], environ: Mapping[str, str]) -> Machine:
    """Combine the answer of ``check.py machine`` with the CUDA compiler that this machine has."""
    nvcc = read_nvcc_version(find_nvcc(environ)) if answer["platform"] == Platform.CUDA else None
    return Machine(**answer, nvcc=nvcc)


def check_compiler(machine: Machine, *, is_sm90: bool = False) -> None:
    """Refuse a build that would fail or leave the extension out, on a machine with an NVIDIA GPU.

    Raises:
        EnvironmentMissing: there is no nvcc, or its CUDA release is not torch's, or ``--sm90`` finds no Hopper GPU.
    """
    if is_sm90 and not (machine.platform == Platform.CUDA and (machine.device_capability or "").startswith("9.")):
        raise EnvironmentMissing(Problem("--sm90", "needs a Hopper GPU", got=machine.device or "no GPU"))
    if machine.platform != Platform.CUDA:
        return
    where = f"RL-Kernel on {machine.device}"
    if machine.nvcc is None:
        hint = "install the CUDA toolkit, or name it by CUDA_HOME; CUDA_VISIBLE_DEVICES= gives native operators only"
        raise EnvironmentMissing(Problem(where, "nvcc is absent, so no kernels can be built", hint=hint))
    if machine.toolkit and machine.nvcc.split(".")[0] != machine.toolkit.split(".")[0]:
        raise EnvironmentMissing(
            Problem("nvcc", "is of another CUDA release than torch", got=machine.nvcc, expected=machine.toolkit,
                    hint="name the right toolkit by CUDA_HOME")
        )  # fmt: skip


def make_environment(environ: Mapping[str, str], *, platform: str, is_sm90: bool) -> dict[str, str]:
    """Return this process's environment variables for the build; only ``is_sm90`` switches the Hopper sources on."""
    made = {name: value for name, value in environ.items() if name != SM90}
    if is_sm90:
        made[SM90] = "1"
    if platform == Platform.CUDA:
        made[REQUIRE_EXTENSION] = "1"
    return made


def pip_install(folder: Path, environ: Mapping[str, str], *, needs_ninja: bool) -> None:
    """Build and install RL-Kernel alone, so that torch and all pinned packages stay unchanged.

    Raises:
        CheckFailed: the build failed; the error quotes its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="rlk-repro-tools-") as tools:
        if not _has_build_tools(needs_ninja=needs_ninja):
            _pip("--require-hashes", "--target", tools, "-r", str(BUILD_TOOLS), environ=environ)
        paths = {
            "PYTHONPATH": os.pathsep.join(filter(None, [tools, environ.get("PYTHONPATH", "")])),
            "PATH": os.pathsep.join([str(Path(tools) / "bin"), environ.get("PATH", os.defpath)]),
        }
        _pip("--no-deps", "--no-build-isolation", str(folder), environ={**environ, **paths})


def _has_build_tools(*, needs_ninja: bool) -> bool:
    try:
        setuptools = int(metadata.version("setuptools").split(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return False
    has_wheel = setuptools >= 71 or importlib.util.find_spec("wheel") is not None
    return setuptools >= 64 and has_wheel and (not needs_ninja or shutil.which("ninja") is not None)


def _pip(*arguments: str, environ: Mapping[str, str]) -> None:
    require_done("pip install", proc.run([*PIP, *arguments], env=environ, timeout_s=TIMEOUT_S))


def require_done(what: str, done: proc.Completed) -> None:
    """Raise CheckFailed with the lines about errors, and advice where the problem is known."""
    if done.is_ok:
        return
    text = f"{done.stdout}\n{done.stderr}"
    words = ["time limit reached"] if done.is_timeout else _last_errors(text)
    hint = next((hint for needle, hint in BUILD_TROUBLE if needle in text), None)
    raise CheckFailed(Problem(what, "did not finish:", quoted=tuple(words), hint=hint))


def _last_errors(text: str) -> list[str]:
    """Return the lines about errors, the linker's own included, or the last lines without such a line."""
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|Error|ERROR|Killed|cannot find|undefined reference", line)]
    return (errors or lines)[-8:]
