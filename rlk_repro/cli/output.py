"""What every command shares: the ``--json`` option, printing, findings as text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from rlk_repro.findings import Finding, sort_findings

if TYPE_CHECKING:
    from rich.console import Console

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Unsealed: TypeAlias = Annotated[
    bool, typer.Option("--unsealed", help="A run that was not sealed is no reason to exit with 1.")
]


def say(text: str = "") -> None:
    """One line (or several) of the result, to standard output, never wrapped or coloured."""
    typer.echo(text)


def note(text: str) -> None:
    """Progress and remarks, to standard error."""
    typer.echo(text, err=True)


def say_json(value: Any) -> None:
    from rlk_repro.files import dump_json

    sys.stdout.write(dump_json(value).decode())


def say_findings(findings: Iterable[Finding]) -> None:
    for finding in sort_findings(findings):
        say(f"  {finding}")


def make_console() -> Console:
    """A console that uses colour only on a terminal."""
    from rich.console import Console

    return Console(highlight=False)
