"""Check the arguments of an image's build: each must be exactly the input that a stack pins.

This module uses the standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import CheckFailed, Problem, SpecError
from rlk_repro.images.record import ARCHITECTURES
from rlk_repro.operators import Platform
from rlk_repro.probes.container import LOCK, find_record

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
REPOSITORY: Final = re.compile(r"https://[A-Za-z0-9][A-Za-z0-9.:/_~-]*")
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
BASE_PACKAGES: Final = Path(find_record()).with_name("base-packages.json")
ADDED_PACKAGES: Final = BASE_PACKAGES.with_name("added-packages.json")
MI300X: Final = "gfx942"
ROCM_LIBRARIES: Final = ("lib/rocblas/library", "lib/hipblaslt/library")
_GPU: Final = re.compile(r"gfx[0-9a-f]{3,4}")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments of the build, which the Dockerfile passes in the environment."""

    base_name: str
    base_digest: str
    stack: str
    image_platform: str
    revision: str
    source_date_epoch: str
    vime_repository: str
    vime_commit: str
    rl_kernel_repository: str
    rl_kernel_commit: str

    @property
    def gpu_platform(self) -> str:
        return self.image_platform.partition("-")[0]

    @property
    def architectures(self) -> list[str]:
        """The GPUs to compile for, such as ``80``; with ``90``, Hopper's own files get ``90a``."""
        if self.gpu_platform != Platform.CUDA:
            return []
        numbers = [name.removeprefix("sm_") for name in ARCHITECTURES[Platform.CUDA]]
        return sorted(filter(str.isdecimal, numbers), key=int)


NAMES: Final = tuple(field.name.upper() for field in fields(Inputs))


_FORMS: Final = (
    ("BASE_DIGEST", DIGEST, "a tag can move", "sha256:<64 hex digits>"),
    ("VIME_REPOSITORY", REPOSITORY, "not a repository that can be fetched", "https://…"),
    ("RL_KERNEL_REPOSITORY", REPOSITORY, "not a repository that can be fetched", "https://…"),
    ("VIME_COMMIT", COMMIT, "a branch or a tag can move", "40 hex digits"),
    ("RL_KERNEL_COMMIT", COMMIT, "a branch or a tag can move", "40 hex digits"),
    ("REVISION", COMMIT, "a branch or a tag can move", "40 hex digits"),
    ("SOURCE_DATE_EPOCH", re.compile("[0-9]+"), "no time", "seconds since 1970"),
)


def read_inputs(given: Mapping[str, str] = os.environ) -> Inputs:
    """Read the arguments from the environment.

    Raises:
        SpecError: an argument is missing, or names what can change: an image's tag, or a branch instead of a commit.
    """
    problems = list(_find_problems(given))
    if problems:
        raise SpecError(*problems)
    return Inputs(**{name.lower(): given[name] for name in NAMES})


def _find_problems(given: Mapping[str, str]) -> Iterator[Problem]:
    hint = "rlk-repro images build --dry-run prints the whole command line"
    for name in NAMES:
        if not given.get(name):
            yield Problem(f"build argument {name}", "missing", hint=hint)
    for name, form, what, expected in _FORMS:
        value = given.get(name)
        if value and not form.fullmatch(value):
            yield Problem(f"build argument {name}", what, got=value, expected=expected)
    here, wanted = MACHINES.get(platform.machine(), platform.machine()), given.get("IMAGE_PLATFORM")
    if wanted and wanted.partition("-")[2] != here:
        where = "build argument IMAGE_PLATFORM"
        yield Problem(where, "differs from this machine's", got=wanted, expected=f"cuda-{here}")


def is_locked() -> bool:
    """Whether a lock lists the packages of this Python."""
    return (Path(sys.prefix) / LOCK).is_file()


def check_inputs(inputs: Inputs) -> None:
    """Check the base for ROCm; where the stack has a lock, that packages fit it and each other."""
    if inputs.gpu_platform == Platform.ROCM:
        check_gfx()
    if is_locked():
        from rlk_repro.images.stacks import get_stack
        from tools.image_build.locked import check_packages, check_requirements

        check_packages(get_stack(inputs.stack), inputs.image_platform)  # type: ignore[arg-type]
        check_requirements()


def check_gfx(rocm: Path = Path("/opt/rocm")) -> None:
    """Refuse a base whose kernels are only for other GPUs; vime's Dockerfile deletes those of others.

    Raises:
        CheckFailed: the error lists the GPUs of every library.
    """
    problems = []
    for name in ROCM_LIBRARIES:
        names = " ".join(file.name for file in (rocm / name).rglob("*gfx*"))
        found = sorted(set(_GPU.findall(names)))
        if MI300X not in found:
            hint = f"build vime's docker/Dockerfile.rocm with GPU_ARCH={MI300X} and GFX_ARCH={MI300X}"
            what = "has no kernels for these GPUs"
            problems.append(Problem(str(rocm / name), what, got=found, expected=MI300X, hint=hint))
    if problems:
        raise CheckFailed(*problems)
