"""The help of every command has an example that parses, and flags without a type."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from rlk_repro.cli import app
from rlk_repro.cli.commands import EXAMPLES

Call = Callable[..., tuple[int, str, str]]
GROUP: Any = typer.main.get_command(app)


def list_commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from list_commands(command, (*words, name))
        else:
            yield " ".join((*words, name))


def test_every_command_has_an_example() -> None:
    assert sorted(EXAMPLES) == sorted(list_commands(GROUP))


@pytest.mark.parametrize("words", sorted(EXAMPLES))
def test_help_shows_the_example_and_no_type_of_a_flag(call: Call, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = call(*words.split(), "-h")
    assert code == 0
    assert f"Example: {EXAMPLES[words]}" in out
    assert "<bool>" not in out


@pytest.mark.parametrize("words", sorted(EXAMPLES))
def test_an_example_parses(words: str) -> None:
    line = shlex.split(EXAMPLES[words])[1:]
    assert line[: len(words.split())] == words.split()
    context, group = GROUP.make_context("rlk-repro", list(line), resilient_parsing=True), GROUP
    for name in words.split():
        command = group.get_command(context, name)
        rest = line[line.index(name) + 1 :]
        parent, group = context, command
        context = command.make_context(name, list(rest), parent=parent, resilient_parsing=hasattr(command, "commands"))
