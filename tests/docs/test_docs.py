"""The documents stay true: links resolve, and the commands in code blocks run."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from rlk_repro.cli import app
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_bytes
from tests import ROOT
from tests.support.run_plans import read_commands
from tools.wording import find_claims

Call = Callable[..., tuple[int, str, str]]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("jobs/*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"")
BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def make_anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@functools.cache
def anchors(page: Path) -> set[str]:
    return set(map(make_anchor, re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)))


def test_every_link_inside_the_project_resolves() -> None:
    broken = []
    for page in PAGES:
        for match in LINK.finditer(page.read_text()):
            target = match.group(1) or match.group(2)
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append((page.name, target))
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


def test_files_that_the_documents_name_exist() -> None:
    named = re.compile(r"`((?:rlk_repro|tests|tools|docs|k8s|slurm|manifests)/[\w./-]+)`")
    for page in {*PAGES} - {ROOT / "CHANGELOG.md"}:
        missing = [path for path in named.findall(page.read_text()) if not (ROOT / path).exists()]
        assert missing == [], page


def test_every_profile_in_the_documents_is_accepted() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    texts = re.findall(r"^```yaml\n(schema: 1\nprofile: .*?)^```", pages, re.DOTALL | re.MULTILINE)
    loaded = [load_bytes(Profile, "my-site.yaml", text.encode()).model for text in texts]
    assert [profile.cluster for profile in loaded] == ["k8s", "slurm"]


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


# No text of this repository or of a report says that RL-Kernel changes MoE kernels or replaces vime's R3.


CLAIMING = [*ROOT.glob("*.md"), ROOT / "tests/assets/reports.txt"]
CLAIMING += [path for kind in ("docs/**/*.md", "jobs/**/*.yaml", "rlk_repro/**/*.py") for path in ROOT.glob(kind)]


@pytest.mark.parametrize(
    ("sentence", "num_claims"),
    [
        ("RL-Kernel replaces R3.", 1),
        ("All is well. RL-Kernel can **replace** vime's `R3` routing\nreplay.", 1),
        ("With RL-Kernel, routing replay is obsolete.", 1),
        ("RL-Kernel is a replacement for rollout routing replay.", 1),
        ("Use RL-Kernel instead of R3.", 1),
        ("RL-Kernel accelerates the MoE kernels.", 1),
        ("It ships optimised router/expert kernels.", 1),
        ("| fused expert GEMMs |", 1),
        ("RL-Kernel does not replace R3.", 0),
        ("This run shows nothing about faster MoE kernels.", 0),
        ("vime + R3 vs vime + R3 + RL-Kernel", 0),
        ("R3 replays the choices of experts.", 0),
    ],
)
def test_a_claim_is_found(sentence: str, num_claims: int) -> None:
    assert len(list(find_claims(sentence))) == num_claims


def test_no_page_and_no_report_claims_it() -> None:
    assert {path.name: found for path in CLAIMING if (found := list(find_claims(path.read_text())))} == {}
