"""Read a stack's lock file for one platform: each line gives one wheel by name, version, hash and size, without URL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.resources import PACKAGE
from rlk_repro.spec import ImagePlatform, Stack

FOLDER: Final = PACKAGE.parent / "requirements"
UNPACKED: Final = 2.6
"""The size of the packages on disk, as a multiple of their download size."""
_LINE: Final = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[^ ]+) --hash=sha256:(?P<sha256>[0-9a-f]{64})  # (?P<size>[0-9]+)"
)


@dataclass(frozen=True)
class Locked:
    name: str
    version: str
    sha256: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}  # {self.size_bytes}"


def sum_sizes(locked: Sequence[Locked]) -> tuple[int, int]:
    """Return the bytes to download, and the bytes that the packages take on disk."""
    num_bytes = sum(item.size_bytes for item in locked)
    return num_bytes, int(UNPACKED * num_bytes)


def lock_path(stack: str, platform: str) -> Path:
    return FOLDER / f"{stack}-{platform}.txt"


def read_lock(stack: Stack, platform: ImagePlatform) -> list[Locked]:
    """Read the packages of the lock; raise SpecError if the lock's hash is not the one that the stack names."""
    path = lock_path(stack.stack, platform)
    if not path.is_file():
        hint = "environments and images are built from a checkout of rlk-repro"
        raise EnvironmentMissing(Problem(str(path), "is not there", hint=hint))
    data = path.read_bytes()
    locked = parse_lock(data.decode(), path.name)
    found, expected = f"sha256:{sha256_bytes(data)}", stack.locks.get(platform)
    if found != expected:
        raise SpecError(
            Problem(f"requirements/{path.name}", f"is not the lock that stack {stack.stack} names", got=found,
                    expected=expected, hint="git diff shows what was changed")
        )  # fmt: skip
    return locked


def parse_lock(text: str, name: str) -> list[Locked]:
    """Parse every line except comments; raise SpecError with all lines that lack a name, version, hash or size."""
    locked, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            expected = "NAME==VERSION --hash=sha256:<64 hex digits>  # <bytes>"
            problems.append(Problem(f"{name}:{number}", "is not a line of a lock", got=line[:100], expected=expected))
        else:
            locked.append(Locked(match["name"], match["version"], match["sha256"], int(match["size"])))
    if problems:
        raise SpecError(*problems)
    return locked
