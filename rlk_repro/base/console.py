"""Lines of progress: rewritten in place on a terminal, a line each time elsewhere.  No tables, no reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from rlk_repro.base.escapes import printable

Tell: TypeAlias = Callable[[str], object]
"""Takes a line of progress."""


def silence(text: str) -> None:
    """Drop progress: no one reads it, or JSON is printed, whose reader wants only errors on standard error."""
    del text


@dataclass(frozen=True, kw_only=True)
class LiveLine:
    """Where progress goes; ``is_live`` means that a line replaces the one before."""

    tell: Tell
    is_live: bool


@contextmanager
def live_line(*, is_quiet: bool = False) -> Iterator[LiveLine]:
    """A line on standard error for the time of the block; it is gone afterwards where it was live."""
    if is_quiet:
        yield LiveLine(tell=silence, is_live=False)
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield LiveLine(tell=lambda text: console.print(printable(text), soft_wrap=True), is_live=False)
        return
    from rich.status import Status
    from rich.text import Text

    with Status("", console=console) as status:
        yield LiveLine(tell=lambda text: status.update(Text(printable(text))), is_live=True)
