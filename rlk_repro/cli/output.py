"""Print the output of all commands; control characters are escaped, because output can hold text from bundles."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.escapes import escape_json, printable, printable_lines
from rlk_repro.base.findings import Finding, sort_findings
from rlk_repro.cli.commands import as_typed

if TYPE_CHECKING:
    from rich.console import Console

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Unsealed: TypeAlias = Annotated[
    bool, typer.Option("--unsealed", help="Accept an unsealed run; otherwise it gives exit code 1.")
]
OTHER_FOLDER: Final = "name another folder with -o"


def say(line: str = "") -> None:
    """Write one line of the result to standard output, without wrapping or colour; line breaks in it are escaped."""
    _write(f"{printable(line)}\n")


def say_text(text: str) -> None:
    """Write several lines, unchanged to a file or pipe; on a terminal, control characters are escaped."""
    _write(f"{printable_lines(text) if sys.stdout.isatty() else text}\n")


def note(line: str) -> None:
    typer.echo(printable(as_typed(line)), err=True)


def say_json(value: Any) -> None:
    from rlk_repro.base.answer import to_plain
    from rlk_repro.base.files import dump_json

    _write(escape_json(dump_json(to_plain(value)).decode()))


def say_answer(value: Any, *lines: str, as_json: bool) -> None:
    """Print the answer of a command: as JSON if ``as_json`` is set, otherwise these lines."""
    if as_json:
        say_json(value)
        return
    for line in lines:
        say(line)


def say_yaml(name: str, value: Any) -> None:
    import yaml

    say(f"# {name}, defaults filled in")
    say_text(yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip("\n"))


def show(print_on: Callable[[Console], None]) -> None:
    """Call ``print_on`` and write its output, coloured only on a terminal; ``print_on`` must escape text of bundles."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as captured:
        print_on(console)
    _write(as_typed(captured.get()))


def _write(text: str) -> None:
    try:
        typer.echo(text, nl=False, color=True)  # without color=True, typer removes escape sequences in a pipe
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader has closed the pipe
            raise
        raise EnvironmentMissing(Problem("standard output", f"cannot be written ({error.strerror})")) from error


def say_findings(findings: Iterable[Finding]) -> None:
    for finding in sort_findings(findings):
        say(f"  {finding}")
