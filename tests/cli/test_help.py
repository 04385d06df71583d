"""The help of every command has an example that parses, and flags without a type."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
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


# A newcomer's first commands work as typed.


@pytest.fixture
def without_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("without_clients")
def test_a_submission_away_from_the_cluster_says_where_to_go(call) -> None:
    code, _, err = call("submit", "--cluster", "slurm", "--run", "qwen3-30b-a3b")
    assert code == 2
    assert "--profile: needed for cluster slurm, expected a file, or one of generic-a100" in err
    assert "this machine has no sbatch: submit on the cluster, or make a profile there" in err


def test_a_run_is_named_with_or_without_a_flag(call) -> None:
    code, out, _ = call("submit", "smoke", "--dry-run")
    assert code == 0
    assert call("submit", "--run", "smoke", "--dry-run")[1].splitlines()[0] == out.splitlines()[0]
    code, _, err = call("submit", "smoke", "--run", "learn", "--dry-run")
    assert (code, "--run: names another run than the argument, got 'learn', expected smoke" in err) == (2, True)
    code, _, err = call("submit", "--dry-run")
    assert (code, "RUN: missing, expected a file, or one of " in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("qwen3-30b",), "did you mean 'qwen3-30b-a3b'?"),
        (("qwen3-4",), "did you mean 'qwen3-4b'?"),
        (("vime-train",), "did you mean 'vime-train-only'?"),
        (("smoek",), "did you mean 'smoke'?"),
        (("smoke", "--hardware", "b300"), "to add hardware, copy "),
        (("smoke", "--stack", "2026"), "did you mean '2026-07'?"),
    ],
)
def test_an_unknown_name_is_answered_with_a_similar_one(call, arguments: tuple[str, ...], hint: str) -> None:
    code, _, err = call("submit", *arguments, "--dry-run")
    assert code == 2
    assert hint in err


def test_a_run_that_ended_without_its_agent_shows_the_end_of_its_output(tmp_path: Path) -> None:
    from rlk_repro.submit.finishing import MAX_SHOWN_LINES, _read_end

    log = tmp_path / "slurm.log"
    assert _read_end(log) == ()
    secret = "gh" + "p_" + "a" * 36
    log.write_text("".join(f"line {number}\n\n" for number in range(50)) + f"No module named rlk_repro {secret}\n")
    shown = _read_end(log)
    assert len(shown) == MAX_SHOWN_LINES
    assert shown[-1].startswith("No module named rlk_repro <redacted:")
