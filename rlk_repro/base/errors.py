"""Define every error that a user can meet, with its exit code. Any other exception is a bug and keeps its traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final

from rlk_repro.base.escapes import printable

_NOTHING: Final = object()

EXIT_BUG: Final = 70
HINT: Final = "  hint: "
MAX_GOT: Final = 200
MAX_PLACE: Final = 2000
MAX_TEXT: Final = 10_000


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; ``quoted`` are lines that another program printed."""

    where: str
    what: str
    got: object = field(default=_NOTHING, kw_only=True)
    expected: str | None = field(default=None, kw_only=True)
    hint: str | None = field(default=None, kw_only=True)
    quoted: tuple[str, ...] = field(default=(), kw_only=True)

    def __str__(self) -> str:
        text = f"{shorten(self.where, MAX_PLACE)}: {self.what}"
        if self.got is not _NOTHING:
            text += f", got {shorten(repr(self.got), MAX_GOT)}"
        if self.expected is not None:
            text += f", expected {self.expected}"
        lines = [text, *(f"  | {line}" for line in self.quoted)]
        if self.hint is not None:
            lines.append(f"{HINT}{self.hint}")
        return "\n".join(map(printable, lines))


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


class RlkReproError(Exception):
    exit_code: ClassVar[int] = EXIT_BUG
    title: ClassVar[str] = "error"

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems: tuple[Problem, ...] = problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class CheckFailed(RlkReproError):
    """The command ran, but a check failed, for example of a bundle, a trial or a pair."""

    exit_code = 1
    title = "check failed"


class NotReproduced(RlkReproError):
    exit_code = 6
    title = "the re-analysis gives the sealed result, but the new run does not"


class SpecError(RlkReproError):
    exit_code = 2
    title = "input"


class EnvironmentMissing(RlkReproError):
    """This machine cannot run the command: for example a tool is not installed, or a cluster is not reachable."""

    exit_code = 3
    title = "this machine cannot"


class SchedulerRefused(RlkReproError):
    exit_code = 4
    title = "the scheduler refused"


class BundleUnreadable(RlkReproError):
    exit_code = 5
    title = "bundle"


def finish(work: Callable[[], int | None], *, has_title: bool = True) -> int:
    """Run ``work`` and return its exit code (0 for None); after an RlkReproError, print it and return its exit code."""
    try:
        return work() or 0
    except RlkReproError as error:
        sys.stderr.write(f"{error.title}: {error}\n" if has_title else f"{error}\n")
        return error.exit_code


def code_after(signal_number: int | None) -> int:
    """Return 128 + n for a process that signal n ended, as a shell does; return 0 without a signal."""
    return 0 if signal_number is None else 128 + signal_number
