"""Make nvcc, headers and libraries of a lock's packages one CUDA toolkit that compilers and linkers find.

The packages hold only what a program needs to run.  A linker also needs names of libraries without versions, a folder
lib64, and the driver's library.  No package has the driver's library, so this module compiles a stand-in with the
driver's functions that extensions here call.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from tools.rl_kernel.build import require_done

PACKAGES: Final = Path(sysconfig.get_path("purelib"))
HOME: Final = PACKAGES / "nvidia" / "cu13"
BESIDE: Final = ("cudnn", "nccl")
DRIVER_FUNCTIONS: Final = ("cuGetErrorString", "cuInit", "cuTensorMapEncodeTiled")


def use_toolkit(environ: Mapping[str, str]) -> dict[str, str]:
    """Complete the toolkit, and return environment variables by which torch and the compilers find it."""
    _complete()
    headers = [HOME / "include", *(PACKAGES / "nvidia" / name / "include" for name in BESIDE)]
    libraries = [HOME / "lib", *(PACKAGES / "nvidia" / name / "lib" for name in BESIDE)]
    scripts = Path(sysconfig.get_path("scripts"))
    return {
        **environ,
        "CUDA_HOME": str(HOME),
        "PATH": _join([HOME / "bin", scripts], environ.get("PATH", os.defpath)),
        "CPATH": _join(headers, environ.get("CPATH", "")),
        "LIBRARY_PATH": _join(libraries, environ.get("LIBRARY_PATH", "")),
    }


def _complete() -> None:
    for folder in (HOME / "lib", *(PACKAGES / "nvidia" / name / "lib" for name in BESIDE)):
        for library in sorted(folder.glob("lib*.so.*")):
            plain = folder / f"{library.name.partition('.so.')[0]}.so"
            if not plain.exists():
                plain.symlink_to(library.name)
    if not (HOME / "lib64").exists():
        (HOME / "lib64").symlink_to("lib")
    stub = HOME / "lib" / "stubs" / "libcuda.so"
    if not stub.exists():
        stub.parent.mkdir(exist_ok=True)
        source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER_FUNCTIONS)
        argv = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(stub)]
        require_done("cc", proc.run(argv, stdin=source.encode()))


def _join(folders: list[Path], rest: str) -> str:
    return os.pathsep.join([*map(str, folders), *([rest] if rest else [])])
