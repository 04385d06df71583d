"""The integration pages speak of real code: every definition that they name exists in the pinned sources.

A page has a list of files under short names; ``short:name``, as code or in a drawing, is defined in that file.

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

PAGES = [ROOT / "docs" / name for name in ("integration.md", "vime.md")]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_definition_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    files = {short: find_source(path) for short, path in FILE.findall(text)}
    named = sorted(find_references(text))
    found = [(file, short, name) for short, name in named if (file := files.get(short)) is not None]
    assert [f"{short}:{name}" for file, short, name in found if name not in find_names(file)] == []
    if len(found) < len(named):
        pytest.skip(f"{len(named) - len(found)} of {len(named)} names need VIME_SRC, MEGATRON_SRC or RLK_SRC")
