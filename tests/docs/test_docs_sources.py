"""The integration pages speak of real code: every definition and every flag in them exists in the pinned sources.

A page begins with a list of files under short names; ``short:name`` in it, as code or in a drawing, is defined there.

The sources are found by VIME_SRC, MEGATRON_SRC and RLK_SRC.  Our own names are checked in any case.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

PAGES = sorted((ROOT / "docs" / "integration").glob("*.md"))
FILE = re.compile(r"^\| `(\w+)` \| `([\w/.-]+\.py)` \|$", re.MULTILINE)
NAME = re.compile(r"(?<![\w/.-])(\w+):([A-Za-z_][\w.]*)")
CODE = re.compile(r"^```\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
SOURCES = {"rl_engine": "RLK_SRC", "megatron": "MEGATRON_SRC", "rlk_repro": ""}
"""The variable that says where a top folder lies; vime's where none is given here."""

ABSENT_FLAGS = {
    "--enable-rl-kernel",
    "--linear-logp-provider",
    "--linear-logp-provider-mode",
    "--rl-kernel-ops",
    "--rl-kernel-strict",
}
"""The pages say that the pinned vime does not have these."""
FOREIGN_FLAGS = {"--address", "--no-deps", "--runtime-env-json"}
"""Of Ray's and pip's command lines."""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_lists_the_files_that_it_names_and_no_others(page: Path) -> None:
    text = page.read_text()
    assert {short for short, _ in FILE.findall(text)} == {short for short, _ in find_references(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_definition_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    files = {short: find_source(path) for short, path in FILE.findall(text)}
    named = sorted(find_references(text))
    found = [(file, short, name) for short, name in named if (file := files.get(short)) is not None]
    assert [f"{short}:{name}" for file, short, name in found if name not in find_names(file)] == []
    if len(found) < len(named):
        pytest.skip(f"{len(named) - len(found)} of {len(named)} names need VIME_SRC, MEGATRON_SRC or RLK_SRC")


@functools.cache
def find_flags() -> frozenset[str]:
    """Everything in vime's and Megatron-LM's argument files that looks like a flag."""
    vime, megatron = Path(os.environ["VIME_SRC"]), Path(os.environ["MEGATRON_SRC"])
    files = [*vime.glob("vime/**/arguments.py"), *megatron.glob("megatron/training/**/*.py")]
    return frozenset(flag for file in files for flag in FLAG.findall(file.read_text()))


@pytest.mark.skipif(not {"VIME_SRC", "MEGATRON_SRC"} <= os.environ.keys(), reason="VIME_SRC or MEGATRON_SRC unset")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_a_page_names_is_one_of_vime(page: Path) -> None:
    named = set(FLAG.findall(page.read_text()))
    made_from_vllm = {flag for flag in named if flag.startswith("--vllm-")}
    assert named - made_from_vllm - FOREIGN_FLAGS - ABSENT_FLAGS - find_flags() == set()
    assert not ABSENT_FLAGS & find_flags()
