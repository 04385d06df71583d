"""Compile RL-Kernel for every GPU of the stack on a machine without a GPU, install it, and check the result.

The sources are fetched and verified, and repaired where CUDA needs it.  A process in which torch reports a GPU
(cross_build.py) builds them, and every file goes to nvcc with architectures of its own (nvcc.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.base.findings import Finding, has_blocking
from rlk_repro.images.match import check_extension
from rlk_repro.images.stacks import get_stack
from rlk_repro.operators import Platform
from rlk_repro.probes.extension import find_extensions, probe_extension
from rlk_repro.probes.installed import BuildRecord
from rlk_repro.spec import Pin
from tools.image_build.inputs import Inputs, is_locked
from tools.image_build.nvcc import ARCHITECTURES as ARCHITECTURES_VARIABLE
from tools.image_build.nvcc import NVCC as NVCC_VARIABLE
from tools.image_build.package import pip_install
from tools.rl_kernel import build, record
from tools.rl_kernel.repair import apply_repairs
from tools.rl_kernel.source import fetch

HERE: Final = Path(__file__).resolve().parent
TIMEOUT_S: Final = 7200.0
OFFLINE: Final = "rlk-repro env create DIR --from FOLDER takes what env export wrote"
STUBS: Final = ("lib64/stubs", "targets/x86_64-linux/lib/stubs", "targets/sbsa-linux/lib/stubs")
CUDA_BIN: Final = "/usr/local/cuda/bin"
TOOLS: Final = {
    "ninja": "ninja, without which torch does not use the stand-in for nvcc",
    "cuobjdump": "cuobjdump: nothing else shows the GPUs of an extension",
}
BUILD_NAMES: Final = (build.SM90, build.REQUIRE_EXTENSION, "TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH")


def install(inputs: Inputs) -> None:
    pin = find_pin(inputs)
    if inputs.gpu_platform == "rocm":
        install_without_kernels(pin)
    else:
        install_rl_kernel(pin, inputs.architectures)


def find_pin(inputs: Inputs) -> Pin:
    """Return the stack's pin of RL-Kernel, with the hash of its files; without a lock, the build arguments are the pin.

    Raises:
        CheckFailed: a build argument names another commit than the stack.
    """
    if not is_locked():
        return Pin(repository=inputs.rl_kernel_repository, commit=inputs.rl_kernel_commit)
    pin, found = get_stack(inputs.stack).pins["rl_kernel"], inputs.rl_kernel_commit
    if found != pin.commit:
        what = "differs from the stack's"
        raise CheckFailed(Problem("build argument RL_KERNEL_COMMIT", what, got=found, expected=pin.commit))
    return pin


def install_rl_kernel(pin: Pin, architectures: tuple[str, ...]) -> BuildRecord:
    """Install RL-Kernel with kernels for ``architectures``, such as ``80``, and with the kernels that only Hopper runs.

    Raises:
        RlkReproError: the sources are not the pinned ones, a repair does not apply, a build failed, or an extension
            lacks symbols or machine code.
    """
    machine, nvcc = find_toolchain(os.environ)
    made = _install(pin, machine, make_environment(os.environ, nvcc, architectures))
    refuse(list(check_extension(probe_extension(_installed_folder()), Platform.CUDA, pin.commit)))
    return made


def install_without_kernels(pin: Pin) -> BuildRecord:
    """Install RL-Kernel for ROCm, without an extension: its routes for ROCm use Triton.

    Raises:
        CheckFailed: an unexpected extension was built, whose content is unknown.
    """
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentMissing(Problem("torch", "is not installed", expected="the base's torch for ROCm"))
    machine = build.Machine(platform=Platform.ROCM, torch=metadata.version("torch"), toolkit=None, nvcc=None)
    made = _install(pin, machine, os.environ)
    if found := find_extensions(_installed_folder()):
        raise CheckFailed(Problem(found[0].name, "was built", expected="no extension"))
    return made


def _install(pin: Pin, machine: build.Machine, environ: Mapping[str, str]) -> BuildRecord:
    """Build the wheel in the folder of the repaired sources, and install it."""
    with tempfile.TemporaryDirectory(prefix="rlk-repro-build-") as parent:
        sources, wheels = fetch(pin, Path(parent) / "RL-Kernel", OFFLINE), Path(parent) / "wheels"
        repairs = apply_repairs(machine.toolkit, sources.folder)
        wheels.mkdir()
        argv = [sys.executable, str(HERE / "cross_build.py"), str(wheels), machine.platform]
        done = proc.run(argv, cwd=sources.folder, env=environ, timeout_s=TIMEOUT_S)
        build.require_done("building RL-Kernel", done)
        variables = {name: environ[name] for name in BUILD_NAMES if name in environ}
        made = record.make_record(sources, repairs, variables, machine)
        words = ("--no-index", "--force-reinstall", str(next(wheels.glob("*.whl"))))
        record.install(made, lambda: pip_install(*words), is_from_wheel=True)
    return made


def find_toolchain(environ: Mapping[str, str]) -> tuple[build.Machine, Path]:
    """Return torch's CUDA release and an nvcc of this release.

    Raises:
        EnvironmentMissing: torch has no CUDA, or nvcc, ninja or cuobjdump is absent, or nvcc has another release.
    """
    for tool, why in TOOLS.items():
        if not shutil.which(tool, path=os.pathsep.join([environ.get("PATH", ""), CUDA_BIN])):
            raise EnvironmentMissing(Problem(tool, "is not on PATH", expected=why))
    words = "import torch; print(torch.__version__, torch.version.cuda)"
    done = proc.run([sys.executable, "-c", words], timeout_s=300.0)
    version, _, toolkit = done.stdout.strip().rpartition(" ")
    if not done.is_ok or not toolkit[:1].isdecimal():
        raise EnvironmentMissing(
            Problem("torch", "is not built for CUDA", got=done.stdout.strip() or done.stderr[-200:])
        )
    nvcc = build.find_nvcc(environ)
    found = build.read_nvcc_version(nvcc)
    if nvcc is None or found is None or found.split(".")[0] != toolkit.split(".")[0]:
        raise EnvironmentMissing(Problem("nvcc", "does not fit torch", got=found, expected=f"release {toolkit}"))
    return build.Machine(platform=Platform.CUDA, torch=version, toolkit=toolkit, nvcc=found), nvcc


def make_environment(environ: Mapping[str, str], nvcc: Path, architectures: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of the build: the Hopper sources are on, and nvcc.py stands in for the compiler.

    The library path has a stub of the driver, with which the extension is linked.
    """
    home = nvcc.resolve().parent.parent
    stubs = [str(home / name) for name in STUBS if (home / name).is_dir()]
    return {
        **environ,
        build.SM90: "1",
        build.REQUIRE_EXTENSION: "1",
        "TORCH_CUDA_ARCH_LIST": ";".join(f"{name[:-1]}.{name[-1]}" for name in architectures) + ";9.0a",
        "CUDA_HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTORCH_NVCC": str(HERE / "nvcc.py"),
        NVCC_VARIABLE: str(nvcc),
        ARCHITECTURES_VARIABLE: " ".join(architectures),
        "LIBRARY_PATH": os.pathsep.join(filter(None, [*stubs, environ.get("LIBRARY_PATH", "")])),
    }


def refuse(findings: Sequence[Finding]) -> None:
    """Raise CheckFailed with all findings, if one of them is blocking."""
    if has_blocking(findings):
        raise CheckFailed(*(Problem(item.where, "is not what the stack needs", got=item.found, expected=item.expected)
                            for item in findings))  # fmt: skip


def stub_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which an extension that is linked with the driver also loads where no driver exists.

    The stub of the driver is last on the library path, so a real driver is used where one exists.
    """
    home = build.find_nvcc(environ)
    stubs = [home.resolve().parent.parent / name / "libcuda.so" for name in STUBS] if home else []
    stub = next((path for path in stubs if path.is_file()), None)
    if stub is None:
        return dict(environ)
    (folder / "libcuda.so.1").symlink_to(stub)
    paths = [environ.get("LD_LIBRARY_PATH", ""), str(folder)]
    return {**environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}


def _installed_folder() -> Path:
    distribution = record.find_distribution()
    assert distribution is not None
    return Path(str(distribution.locate_file("rl_engine")))
