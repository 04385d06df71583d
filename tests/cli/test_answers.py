"""Commands answer with the keys of docs/commands.md, and mistakes with a next step."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from rlk_repro.cli import app
from rlk_repro.cli.commands import EXAMPLES
from rlk_repro.rundir.paths import FIND_BUNDLE
from tests import ROOT

Call = Callable[..., tuple[int, str, str]]
EVIDENCE = ROOT / "docs" / "evidence"
OPERATORS, MODULE, VIME = (
    str(EVIDENCE / f"{name}-h200.tgz") for name in ("operators", "module-qwen3-4b-pairs", "qwen3-4b-random-live")
)
ROWS = re.findall(r"^\| `([a-z ]+)` \| .* \| (.*) \|$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
KEYS = {words: [set(re.findall(r"`(\w+)`", part)) for part in cell.split("; ")] for words, cell in ROWS}
# commands that this machine can run, with options; test_road has those about a submission
ALONE = (
    "doctor", "list", "prepare smoke",
    "images build --stack 2026-07 --platform cuda-amd64 --dry-run",
    "prepare vime-train-only --hardware h200 --dry-run", "profile init --cluster local -o mine.yaml",
    "profile check local", "runs list", "predict qwen3-4b-random --hardware h200",
    "submit qwen3-30b-a3b --cluster slurm --stack example --dry-run",
    f"index {OPERATORS} -o site", f"inspect {MODULE}", f"verify {VIME}", f"diff {VIME} {VIME}",
    f"diff {OPERATORS} {VIME}", f"report {MODULE} -o r",
    f"replay {OPERATORS} --analyze-only", f"replay {OPERATORS}", f"replay {VIME} --dry-run",
)  # fmt: skip


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
def test_help_shows_an_example_that_parses(call: Call, words: str) -> None:
    os.environ["COLUMNS"] = "160"
    code, out, _ = call(*words.split(), "-h")
    assert (code, f"Example: {EXAMPLES[words]}" in out, "<bool>" in out) == (0, True, False)
    name, *line = shlex.split(EXAMPLES[words])
    context, group = GROUP.make_context(name, list(line), resilient_parsing=True), GROUP
    for name in words.split():
        assert line[0] == name
        command, line = group.get_command(context, name), line[1:]
        parent, group = context, command
        is_group = hasattr(command, "commands")
        context = command.make_context(name, list(line), parent=parent, resilient_parsing=is_group)


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(call: Call, line: str) -> Any:
    out = call(*line.split(), "--json")[1]
    words = next(words for words in sorted(KEYS, reverse=True) if f"{line} ".startswith(f"{words} "))
    values = [json.loads(text) for text in (out.splitlines() if words == "logs" else [out])]
    for value in values:
        for answer in value if isinstance(value, list) else [value]:
            assert set(answer) in KEYS[words]
    return values[0]


def test_the_table_has_every_command() -> None:
    assert sorted(KEYS) == sorted(EXAMPLES)


@pytest.mark.parametrize("line", ALONE, ids=lambda line: line.replace(f"{EVIDENCE}/", ""))
def test_an_answer_has_the_keys_of_the_table(call: Call, line: str) -> None:
    assert check(call, line) is not None


# Each mistake of a stranger gets an answer that says what to type next.


NO_RUNS = "call this in the folder in which you submitted, or set RLK_REPRO_RUNS"

MISTAKES = (
    ("submit --dry-run", 2, "hint: rlk-repro submit smoke"),
    ("submit xyzzy", 2, "hint: rlk-repro list runs"),
    ("submit smoke learn", 2, "example: rlk-repro submit qwen3-30b-a3b --cluster slurm --dry-run"),
    ("submit smoke --runn x", 2, "Possible options: --dry-run, --run"),
    ("submit smoke --pairs six", 2, "--pairs: wrong value, got 'six', expected a whole number"),
    ("submit smoke --hardware h201 --dry-run", 2, "jobs/hardware/h200.yaml, change its values and give its path"),
    ("submit qwen3-30b-a3b-r3 --hardware cpu --dry-run", 2, "expected one of "),
    ("submit qwen3-30b-a3b", 2, "hint: --hardware a100 --dry-run shows the job for a100"),
    ("submit glm-4.5-air --hardware a100 --dry-run", 2, "rlk-repro runs list names each"),
    ("submit qwen3-30b-a3b --dry-run", 0, "no --hardware given: the plan is shown for h200"),
    ("verify folder", 5, FIND_BUNDLE),
    ("submit smoke --cluster slrum", 2, "did you mean 'slurm'?"),
    ("submit smoke --cluster lsf", 2, "expected one of local, slurm, k8s"),
    ("submit smoke --cluster slurm", 2, "make a profile there with rlk-repro profile init"),
    ("submit smoke --cluster slurm --profile generic-h200", 3, "hint: --dry-run works anywhere"),
    ("submit smoke --profile nope", 2, "hint: rlk-repro list profiles"),
    ("submit smoke --stack latest --dry-run", 2, "hint: rlk-repro list stacks"),
    ("submit smoke --stack 2026 --dry-run", 2, "did you mean '2026-07'?"),
    ("submit smoke --lane fast --dry-run", 2, "expected 'live', 'fixed-rollout' or 'train-only'"),
    ("submit smoke --variants baseline,enabeld --dry-run", 2, "did you mean 'enabled'?"),
    ("submit smoke --machines 3", 2, "hint: run it on each machine, then: rlk-repro combine with their bundles"),
    ("predict", 2, "Missing argument"),
    ("predict one two", 2, "RUN|LOG: name one"),
    ("submit smoke --gpus first", 2, "--gpus: not a list of GPUs, got 'first', expected numbers"),
    ("submit smoke --gpus 0 --cluster slurm", 2, "a scheduler assigns GPUs itself"),
    ("submit --resume 2026", 2, NO_RUNS),
    ("status", 2, NO_RUNS),
    ("verify", 2, NO_RUNS),
    ("claims check", 2, "hint: claims was removed in version 0.3; use rlk-repro combine"),
    ("images export -o x", 2, "hint: images export was removed in version 0.3; use skopeo copy"),
    ("verify nope.tgz", 2, FIND_BUNDLE),
    ("verify cut.tgz", 5, FIND_BUNDLE),
    ("replay BUNDLE --cluster slurm", 2, "hint: rlk-repro profile init --cluster slurm"),
    ("report folder", 5, FIND_BUNDLE),
    ("report BUNDLE -o README.md", 3, "hint: name another folder with -o"),
    ("diff BUNDLE", 2, "example: rlk-repro diff a.tgz b.tgz"),
    ("profile show generic", 2, "did you mean 'generic-a100'?"),
    ("profile init --cluster slurm", 3, "log in to the cluster, or copy a shipped profile: rlk-repro profile show "),
    ("images build --platform cuda", 2, "expected --platform cuda-amd64"),
    ("prepare qwen3-4b", 2, "expected one of a100, h100, h200"),
    ("statsu", 2, "Did you mean 'status'?"),
    ("list run", 2, "did you mean 'runs'?"),
)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make files that are not bundles, on a machine without a scheduler or an engine."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "README.md").write_text("# Hello\n")
    (tmp_path / "cut.tgz").write_bytes(Path(OPERATORS).read_bytes()[:5000])
    monkeypatch.setenv("PATH", str(tmp_path / "folder"))
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.parametrize(("line", "exit_code", "next_step"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_answered_with_the_next_step(
    bare: None, call: Call, line: str, exit_code: int, next_step: str
) -> None:
    code, _, err = call(*shlex.split(line.replace("BUNDLE", OPERATORS)))
    assert (code, next_step in err) == (exit_code, True), err
    assert "Traceback" not in err
