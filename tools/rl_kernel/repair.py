"""Repair a file of RL-Kernel's sources: only in a copy for the build, and only the exact file that a repair is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.probes.installed import AppliedRepair


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A named repair; ``substitutions`` are (anchor, replacement), and every place of an anchor is replaced."""

    name: str
    file: str
    before_sha256: str
    after_sha256: str
    substitutions: tuple[tuple[str, str], ...]


# CUDA 13 brings CCCL 3, which no longer has cub::Max and cub::Sum; these are their replacements
_FUNCTIONALS: Final = (
    (
        "#include <cub/cub.cuh>\n",
        "#include <cub/cub.cuh>\n#include <cuda/functional>\n#include <cuda/std/functional>\n",
    ),
    ("cub::Max()", "cuda::maximum<>{}"),
    ("cub::Sum()", "cuda::std::plus<>{}"),
)
CCCL3_FUNCTIONALS: Final = Repair(
    name="cccl3-functionals",
    file="csrc/cuda/fused_logp_sm90.cu",
    before_sha256="c2aa72ce91173d4ee47d2c289cc19f9929d68adb4bc2385cff3f10c27756f27e",
    after_sha256="34eb015e74b22b75e4967905b1e32560920fcdc04527eeef4cf50fbf4e785b21",
    substitutions=_FUNCTIONALS,
)
CCCL3_BATCH_INVARIANT: Final = Repair(
    name="cccl3-batch-invariant",
    file="csrc/cuda/batch_invariant_logp_kernel_sm90.cu",
    before_sha256="d5384205caa56b0ca14d9e464b188b3f0e38ddb9b9e13291fb41f2531f305633",
    after_sha256="9abb9b7893043770add2d270b8830e594729cbe1b7ea61aaa33357fc64c60841",
    substitutions=_FUNCTIONALS,
)


def apply_repairs(toolkit: str | None, folder: Path) -> tuple[AppliedRepair, ...]:
    """Apply the repairs that Hopper's kernels need with this CUDA release.

    A commit of RL-Kernel may lack a file, or may have replaced the functions itself.
    """
    if int((toolkit or "0").split(".")[0]) < 13:
        return ()
    repairs = (CCCL3_FUNCTIONALS, CCCL3_BATCH_INVARIANT)
    return tuple(apply_repair(repair, folder) for repair in repairs if _needs(repair, folder / repair.file))


def _needs(repair: Repair, path: Path) -> bool:
    text = path.read_text() if path.is_file() else ""
    return any(anchor in text for anchor, _ in repair.substitutions[1:])


def apply_repair(repair: Repair, folder: Path) -> AppliedRepair:
    """Change one file in a copy of RL-Kernel's sources.

    Raises:
        SpecError: the file is not the one for which the repair was written.
    """
    path = folder / repair.file
    found = sha256_bytes(path.read_bytes()) if path.is_file() else "absent"
    if found != repair.before_sha256:
        where = f"repair {repair.name}: {repair.file}"
        raise SpecError(Problem(where, "differs from the file of the repair", got=found, expected=repair.before_sha256))
    text = path.read_text()
    for anchor, replacement in repair.substitutions:
        text = text.replace(anchor, replacement)
    data = text.encode()
    assert sha256_bytes(data) == repair.after_sha256, "the repaired file differs from the expected one"
    path.write_bytes(data)
    return AppliedRepair(
        name=repair.name, file=repair.file, before_sha256=repair.before_sha256, after_sha256=repair.after_sha256
    )
