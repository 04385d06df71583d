"""Check that the base image for ROCm has libraries for the stack's GPUs.

vime's docker/Dockerfile.rocm deletes the libraries of all GPUs but those that it is built for.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import CheckFailed, Problem
from tools.image_build.inputs import Inputs

WANTED: Final = "gfx942"
LIBRARIES: Final = ("lib/rocblas/library", "lib/hipblaslt/library")
_GPU: Final = re.compile(r"gfx[0-9a-f]{3,4}")


def check_gfx(_inputs: Inputs | None, rocm: Path = Path("/opt/rocm")) -> None:
    """Refuse a base image whose kernels are only for other GPUs than the stack's.

    Raises:
        CheckFailed: the error lists the GPUs of every library.
    """
    problems = []
    for name in LIBRARIES:
        found = sorted({match[0] for file in (rocm / name).rglob("*gfx*") for match in _GPU.finditer(file.name)})
        if WANTED not in found:
            hint = f"build vime's docker/Dockerfile.rocm with GPU_ARCH={WANTED} and GFX_ARCH={WANTED}"
            problems.append(
                Problem(str(rocm / name), "has no kernels for these GPUs", got=found, expected=WANTED, hint=hint)
            )
    if problems:
        raise CheckFailed(*problems)
