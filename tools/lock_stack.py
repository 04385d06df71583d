"""Resolve a stack's packages into one lock for each processor: ``python -m tools.lock_stack STACK``.

The program uv chooses the versions.  For every package the lock keeps the one wheel that Python 3.12 installs on that
processor, as a line with version, hash and size.  The lock keeps no address, because a site's mirror serves the same
bytes.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from rlk_repro.base import proc
from rlk_repro.base.disk import temporary_folder
from rlk_repro.base.errors import CheckFailed, Problem, finish
from rlk_repro.base.files import sha256_bytes, write_text
from rlk_repro.images.lock import Locked, lock_path

FOLDER: Final = Path(__file__).resolve().parents[1] / "requirements"
PYTHON: Final = (3, 12)
# the oldest glibc on which every wheel runs: Debian 12, Ubuntu 22.04, RHEL 9
GLIBC: Final = 34
MACHINES: Final = {"cuda-amd64": "x86_64", "cuda-arm64": "aarch64"}
TIMEOUT_S: Final = 600.0


def lock(stack: str) -> None:
    for platform, machine in MACHINES.items():
        text = render(resolve(stack, machine), machine)
        write_text(lock_path(stack, platform), text)
        print(f"{platform}: sha256:{sha256_bytes(text.encode())}")


def resolve(stack: str, machine: str) -> list[dict[str, Any]]:
    """Return the packages that uv chooses, as in a pylock.toml (PEP 751).

    Raises:
        CheckFailed: uv failed; the error quotes its output.
    """
    with temporary_folder("rlk-repro-lock-") as folder:
        target = folder / "pylock.toml"
        done = proc.run(
            ["uv", "pip", "compile", str(FOLDER / f"{stack}.in"), "--override", str(FOLDER / f"{stack}-overrides.txt"),
             "--python-version", ".".join(map(str, PYTHON)), "--python-platform", f"{machine}-manylinux_2_{GLIBC}",
             "--only-binary", ":all:", "--no-annotate", "--quiet", "--output-file", str(target)],
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        if not done.is_ok:
            raise CheckFailed(Problem("uv pip compile", "did not finish:", quoted=tuple(done.stderr.splitlines()[:8])))
        packages: list[dict[str, Any]] = tomllib.loads(target.read_text())["packages"]
    return packages


def render(packages: list[dict[str, Any]], machine: str) -> str:
    """Return the text of the lock, sorted by name as uv sorts.

    Raises:
        CheckFailed: some packages have no wheel for this processor.
    """
    rank = {tag: place for place, tag in enumerate(_tags(machine))}
    chosen = [(package, _choose(package, rank)) for package in packages]
    missing = [str(package["name"]) for package, wheel in chosen if wheel is None]
    if missing:
        raise CheckFailed(*(Problem(name, f"has no wheel for {machine}") for name in missing))
    lines = [
        Locked(package["name"], package["version"], wheel["hashes"]["sha256"], wheel["size"])
        for package, wheel in chosen
        if wheel is not None
    ]
    head = "# one wheel for each package, and its size in bytes: make lock STACK=…\n"
    return head + "".join(f"{line}\n" for line in lines)


def _choose(package: dict[str, Any], rank: dict[Tag, int]) -> dict[str, Any] | None:
    """Return the wheel that pip would choose: the wheel with the most specific tag."""
    best = len(rank)
    found = None
    for wheel in package.get("wheels", ()):
        name = wheel["url"].rpartition("/")[2].replace("%2B", "+")
        place = min((rank[tag] for tag in parse_wheel_filename(name)[3] if tag in rank), default=best)
        if place < best:
            best, found = place, wheel
    return found


def _tags(machine: str) -> Iterator[Tag]:
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]
    yield from cpython_tags(PYTHON, platforms=platforms)
    yield from compatible_tags(PYTHON, f"cp{PYTHON[0]}{PYTHON[1]}", platforms)


if __name__ == "__main__":
    sys.exit(finish(lambda: lock(sys.argv[1]), has_title=False))
