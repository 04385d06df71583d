"""Compile RL-Kernel for every GPU of the stack on a machine without a GPU, install it, and check the result."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlk_repro.images.stacks import get_stack
from rlk_repro.spec import Pin
from tools.image_build.inputs import Inputs, is_locked
from tools.rl_kernel import build
from tools.rl_kernel.source import fetch

OFFLINE: Final = "make the environment where there is one, and pack it with rlk-repro env export"


def install(inputs: Inputs) -> None:
    """Install RL-Kernel; for ROCm without an extension, because its routes there use Triton.

    Raises:
        RlkReproError: the sources are not the pinned ones, a repair does not apply, a build failed, or an extension
            lacks symbols or machine code.
    """
    # a stack with a lock also has the hash of the files; the record's check compares the commits
    pin = Pin(repository=inputs.rl_kernel_repository, commit=inputs.rl_kernel_commit)
    if is_locked():
        pin = get_stack(inputs.stack).pins["rl_kernel"]
    machine = build.describe_machine(os.environ, inputs.gpu_platform)
    build.check_compiler(machine, os.environ)
    environ = build.make_environment(os.environ, machine, inputs.architectures)
    with tempfile.TemporaryDirectory(prefix="rlk-repro-build-") as parent:
        sources = fetch(pin, Path(parent) / "RL-Kernel", OFFLINE)
        made = build.repair(sources, machine, environ)
        build.install(made, sources.folder, environ)
    with tempfile.TemporaryDirectory(prefix="rlk-repro-stub-") as folder:
        build.check(made, inputs.architectures, stub_environment(os.environ, Path(folder)))


def stub_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which an extension that is linked with the driver also loads where no driver exists.

    The stub of the driver is last on the library path, so a real driver is used where one exists.
    """
    home = build.find_nvcc(environ)
    stubs = [home.resolve().parent.parent / name / "libcuda.so" for name in build.STUBS] if home else []
    stub = next((path for path in stubs if path.is_file()), None)
    if stub is None:
        return dict(environ)
    (folder / "libcuda.so.1").symlink_to(stub)
    paths = [environ.get("LD_LIBRARY_PATH", ""), str(folder)]
    return {**environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}
