"""Show progress: on a terminal each line replaces the line before it; elsewhere all lines stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from rlk_repro.base.escapes import printable

Tell: TypeAlias = Callable[[str], object]


def silence(text: str) -> None:
    """Print no progress: with ``--json``, standard error holds errors only."""
    del text


@dataclass(frozen=True, kw_only=True)
class LiveLine:
    tell: Tell
    is_live: bool


@contextmanager
def live_line(*, is_quiet: bool = False) -> Iterator[LiveLine]:
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
