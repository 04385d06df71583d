"""Check the arguments of an image's build: each must be exactly the input that a stack pins.

This module uses the standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.probes.container import LOCK, find_record

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
REPOSITORY: Final = re.compile(r"https://[A-Za-z0-9][A-Za-z0-9.:/_~-]*")
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
BASE_PACKAGES: Final = Path(find_record()).with_name("base-packages.json")
ADDED_PACKAGES: Final = BASE_PACKAGES.with_name("added-packages.json")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments of the build, which the Dockerfile passes in the environment."""

    base_name: str
    base_digest: str
    stack: str
    gpu_platform: str
    image_platform: str
    revision: str
    source_date_epoch: str
    vime_repository: str
    vime_commit: str
    rl_kernel_repository: str
    rl_kernel_commit: str
    rl_kernel_architectures: str

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.rl_kernel_architectures.split())


NAMES: Final = tuple(field.name.upper() for field in fields(Inputs))


def read_inputs(environ: Mapping[str, str] | None = None) -> Inputs:
    """Read the arguments from the environment.

    Raises:
        SpecError: an argument is missing, or names what can change: an image's tag, or a branch instead of a commit.
    """
    given = os.environ if environ is None else environ
    problems = list(_find_problems(given))
    if problems:
        raise SpecError(*problems)
    return Inputs(**{name.lower(): given[name] for name in NAMES})


def _find_problems(given: Mapping[str, str]) -> Iterator[Problem]:
    hint = "rlk-repro images build --dry-run prints the whole command line"
    for name in NAMES:
        if not given.get(name) and not (name == "RL_KERNEL_ARCHITECTURES" and given.get("GPU_PLATFORM") == "rocm"):
            yield Problem(f"build argument {name}", "missing", hint=hint)
    digest = given.get("BASE_DIGEST")
    if digest and not DIGEST.fullmatch(digest):
        yield Problem("build argument BASE_DIGEST", "a tag can move", got=digest, expected="sha256:<64 hex digits>")
    for name in ("VIME_REPOSITORY", "RL_KERNEL_REPOSITORY"):
        value = given.get(name)
        if value and not REPOSITORY.fullmatch(value):
            yield Problem(
                f"build argument {name}", "not a repository that can be fetched", got=value, expected="https://…"
            )
    here = f"{given.get('GPU_PLATFORM')}-{MACHINES.get(platform.machine(), platform.machine())}"
    if given.get("IMAGE_PLATFORM", here) != here:
        yield Problem("build argument IMAGE_PLATFORM", "differs from this machine's", got=given["IMAGE_PLATFORM"],
                      expected=here)  # fmt: skip
    for name in ("VIME_COMMIT", "RL_KERNEL_COMMIT", "REVISION"):
        value = given.get(name)
        if value and not COMMIT.fullmatch(value):
            yield Problem(f"build argument {name}", "a branch or a tag can move", got=value, expected="40 hex digits")
    epoch = given.get("SOURCE_DATE_EPOCH")
    if epoch and not epoch.isdecimal():
        yield Problem("build argument SOURCE_DATE_EPOCH", "no time", got=epoch, expected="seconds since 1970")


def is_locked() -> bool:
    """Whether a lock lists the packages of this Python."""
    return (Path(sys.prefix) / LOCK).is_file()


def check_inputs(inputs: Inputs) -> None:
    """Where the stack has a lock, check that the packages fit the lock and each other; the arguments are checked."""
    if is_locked():
        from rlk_repro.images.stacks import get_stack
        from tools.image_build.locked import check_packages, check_requirements

        check_packages(get_stack(inputs.stack), inputs.image_platform)  # type: ignore[arg-type]
        check_requirements()


def list_packages() -> dict[str, str]:
    """Return the version of each installed package by name; of two copies, the version that Python imports."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version or "unknown")
    return found


def keep_base_packages(packages: Mapping[str, str]) -> None:
    """Record the packages of the base image before the build adds any."""
    BASE_PACKAGES.parent.mkdir(parents=True, exist_ok=True)
    BASE_PACKAGES.write_text(json.dumps(packages, sort_keys=True, indent=1) + "\n")
