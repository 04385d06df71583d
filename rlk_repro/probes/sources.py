"""Read facts from files below a root folder and from tools; a fact that cannot be read is Unknown, with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.rundir.manifest import Unknown

T = TypeVar("T")
U = TypeVar("U")


def locate(root: Path, path: str) -> Path:
    """Map a file's absolute path on the machine to its path below ``root``."""
    return root / path.lstrip("/")


def read_text(root: Path, path: str) -> str | Unknown:
    """Return the text of a file without blanks at its ends, or Unknown with ``<path> absent`` or the kernel's error."""
    try:
        return locate(root, path).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return Unknown(f"{path} absent")
    except OSError as error:
        return Unknown(f"{path}: {error.strerror}")


def read_int(root: Path, path: str) -> int | Unknown:
    return derive(read_text(root, path), lambda text: parse_int(text, path))


def parse_int(text: str, what: str) -> int | Unknown:
    try:
        return int(text, 0)
    except ValueError:
        return Unknown(f"{what}: {text[:40]!r} is not a whole number")


def derive(value: T | Unknown, convert: Callable[[T], U]) -> U | Unknown:
    """Return ``convert(value)``; an Unknown value stays as it is."""
    return value if isinstance(value, Unknown) else convert(value)


def known_or(value: T | Unknown, default: U) -> T | U:
    return default if isinstance(value, Unknown) else value


def list_names(root: Path, folder: str) -> list[str]:
    """Return the sorted names in a folder; the list is empty if the folder is absent or unreadable."""
    try:
        return sorted(path.name for path in locate(root, folder).iterdir())
    except OSError:
        return []


def link_name(root: Path, path: str) -> str | Unknown:
    """Return the last name in a symbolic link's target, such as the driver's name for the link ``…/device/driver``."""
    try:
        return locate(root, path).readlink().name
    except OSError:
        return Unknown(f"{path} absent")


def ask(argv: Sequence[str], *, timeout_s: float = 10.0) -> str | Unknown:
    """Return the output of a tool; if the tool fails, return Unknown with the first line of its error message."""
    try:
        done = proc.ask(argv, timeout_s=timeout_s)
    except EnvironmentMissing as error:
        problem = error.problems[0]
        return Unknown(f"{problem.where} {problem.what}")
    if done.is_timeout:
        return Unknown(f"{argv[0]} did not answer twice in {timeout_s:g} s")
    if not done.is_ok:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[0][:120]
        return Unknown(f"{argv[0]}: exit {done.returncode}: {words}")
    return done.stdout


def agreed(values: Iterable[T | Unknown]) -> T | str | Unknown:
    """Return the value that all facts share; if the values differ, join them, sorted: ``performance,powersave``."""
    found = list(values)
    known = [value for value in found if not isinstance(value, Unknown)]
    if len(set(known)) > 1:
        return ",".join(sorted(map(str, set(known))))
    return next(iter([*known, *found]), Unknown("no value"))
