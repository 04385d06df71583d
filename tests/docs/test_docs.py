"""The documents stay true: links resolve, the command table is what the program says, code blocks are real commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from rlk_repro.bundle.verify import verify
from rlk_repro.cli import app
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_bytes
from tests import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_page_on_images_is_short_and_begins_with_its_two_commands() -> None:
    text = (ROOT / "docs/images.md").read_text()
    assert len(text.splitlines()) <= 120
    match = BLOCK.search(text)
    assert match is not None
    assert [" ".join(line.split()[:3]) for line in match.group(2).splitlines()] == [
        "rlk-repro env create", "rlk-repro images build",
    ]  # fmt: skip


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


@pytest.mark.parametrize("bundle", sorted((ROOT / "docs" / "evidence").glob("*.tgz")), ids=lambda path: path.name)
def test_evidence_exists_and_verifies(bundle: Path) -> None:
    verification = verify(bundle)
    assert verification.findings == ()
    assert verification.bundle_id is not None


def test_every_profile_in_the_documents_is_accepted() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    texts = re.findall(r"^```yaml\n(schema: 1\nprofile: .*?)^```", pages, re.DOTALL | re.MULTILINE)
    loaded = [load_bytes(Profile, "my-site.yaml", text.encode()).model for text in texts]
    assert [profile.cluster for profile in loaded] == ["k8s", "local", "slurm"]
