"""The documents stay true: links resolve, and the commands in code blocks run."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from rlk_repro.cli import app
from rlk_repro.report.markdown import render_markdown
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_bytes
from tests import ROOT
from tests.support.analysis_examples import EXAMPLES
from tests.support.run_plans import read_commands
from tools.wording import find_claims

Call = Callable[..., tuple[int, str, str]]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("jobs/*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"")
BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def make_anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return set(map(make_anchor, re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_inside_the_project_resolves(page: Path) -> None:
    broken = []
    for match in LINK.finditer(page.read_text()):
        target = match.group(1) or match.group(2)
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            for line in match.group(2).splitlines():
                command = line.removeprefix("$ ").partition("  #")[0].strip()
                if command.startswith("rlk-repro ") or ".venv/bin/rlk-repro " in command:
                    yield f"{page.relative_to(ROOT)}: {command}", shlex.split(command)[1:]


@pytest.mark.parametrize("arguments", [pytest.param(words, id=name) for name, words in documented_commands()])
def test_every_documented_command_is_one_the_program_understands(arguments: list[str]) -> None:
    """Parsed to the last option by the program itself, without running it."""
    context = get_command(app).make_context("rlk-repro", list(arguments), resilient_parsing=False)
    command = context.command
    rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
    while hasattr(command, "commands"):
        name, *rest = rest
        command = command.commands[name]
    command.make_context(command.name, rest, parent=context)


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            for words in re.findall(r"^make ((?:[a-z-]+ ?)+)", match.group(2), re.MULTILINE):
                assert set(words.split()) <= targets, page


def test_every_profile_in_the_documents_is_accepted() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    texts = re.findall(r"^```yaml\n(schema: 1\nprofile: .*?)^```", pages, re.DOTALL | re.MULTILINE)
    loaded = [load_bytes(Profile, "my-site.yaml", text.encode()).model for text in texts]
    assert [profile.cluster for profile in loaded] == ["k8s", "local", "slurm"]


SECTIONS = (
    ("replay.md", "Publish and compare results"),
    ("statistics.md", "My result is inconclusive"),
    ("prepare.md", "Your own model"),
)
TOLD = {
    "verify": "every file matches the seal",
    "replay": "the analysis is reproduced",
    "report --summary": "What this result does not show:",
    "report": "",
    "diff": "0.219",
    "doctor": "",
    "index": "2 bundles",
    "submit": "sessions",
    "prepare": "missing",
}


@pytest.mark.parametrize(
    "command", [pytest.param(words, id=shlex.join(words)) for each in SECTIONS for words in read_commands(*each)]
)
def test_a_command_that_a_how_to_tells_to_type_works(
    command: list[str], call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    words = [str(tmp_path / "site") if word == "site" else word for word in command]
    if words[0] == "prepare":
        words += ["--cache", str(tmp_path / "cache")]
    code, out, error = call(*words)
    assert code == 0 or words[0] == "doctor", (out, error)
    assert TOLD["report --summary" if "--summary" in words else words[0]] in out + error


# The integration pages speak of real code: every definition that they name exists in the pinned sources.


SOURCED = [ROOT / "docs" / name for name in ("integration.md", "vime.md")]
FILE = re.compile(r"^\| `(\w+)` \| `([\w/.-]+\.py)` \|$", re.MULTILINE)
NAME = re.compile(r"(?<![\w/.-])(\w+):([A-Za-z_][\w.]*)")
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
SOURCES = {"rl_engine": "RLK_SRC", "megatron": "MEGATRON_SRC", "rlk_repro": ""}
"""The variable that says where a top folder lies; vime's where none is given here."""


def find_source(path: str) -> Path | None:
    """Where a file of the pages lies, or None where its source is not given."""
    variable = SOURCES.get(path.partition("/")[0], "VIME_SRC")
    folder = os.environ.get(variable) if variable else ROOT
    return Path(folder, path) if folder else None


@functools.cache
def find_names(file: Path) -> frozenset[str]:
    """Dotted names of everything that a file defines: classes, functions and assignments, at any depth."""

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
            else:
                yield from walk(child, prefix)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in foreign strings
        return frozenset(walk(ast.parse(file.read_text()), ""))


def find_references(text: str) -> set[tuple[str, str]]:
    """Every ``short:name`` in code spans and in blocks without a language."""
    return {pair for block, span in CODE.findall(text) for pair in NAME.findall(block or span)}


@pytest.mark.parametrize("page", SOURCED, ids=lambda page: page.name)
def test_every_definition_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    files = {short: find_source(path) for short, path in FILE.findall(text)}
    named = sorted(find_references(text))
    found = [(file, short, name) for short, name in named if (file := files.get(short)) is not None]
    assert [f"{short}:{name}" for file, short, name in found if name not in find_names(file)] == []
    if len(found) < len(named):
        pytest.skip(f"{len(named) - len(found)} of {len(named)} names need VIME_SRC, MEGATRON_SRC or RLK_SRC")


# No text of this repository or of a report says that RL-Kernel changes MoE kernels or replaces vime's R3.


CLAIMING = [*ROOT.glob("*.md")]
CLAIMING += [path for kind in ("docs/**/*.md", "jobs/**/*.yaml", "rlk_repro/**/*.py") for path in ROOT.glob(kind)]


@pytest.mark.parametrize(
    "sentence",
    [
        "RL-Kernel replaces R3.",
        "All is well. RL-Kernel can **replace** vime's `R3` routing\nreplay.",
        "With RL-Kernel, routing replay is obsolete.",
        "RL-Kernel is a replacement for rollout routing replay.",
        "Use RL-Kernel instead of R3.",
        "RL-Kernel accelerates the MoE kernels.",
        "It ships optimised router/expert kernels.",
        "| fused expert GEMMs |",
    ],
)
def test_a_claim_is_found(sentence: str) -> None:
    assert len(list(find_claims(sentence))) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "RL-Kernel does not replace R3.",
        "This run shows nothing about faster MoE kernels.",
        "vime + R3 vs vime + R3 + RL-Kernel",
        "R3 replays the choices of experts.",
    ],
)
def test_other_sentences_pass(sentence: str) -> None:
    assert list(find_claims(sentence)) == []


def test_no_page_claims_it() -> None:
    assert {path.name: found for path in CLAIMING if (found := list(find_claims(path.read_text())))} == {}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "huge"])
def test_no_report_claims_it(name: str) -> None:
    assert list(find_claims(render_markdown(EXAMPLES[name]()))) == []
