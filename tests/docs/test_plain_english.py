"""A short word list keeps idioms out of docs, messages and docstrings."""

import re
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path(__file__).parents[2]
# Recorded evidence, other versions' notes and the denials that a linter must know keep their words.
_SKIPPED: Final = ("docs/evidence/", "docs/images.md", "CHANGELOG.md", "tools/wording/lint.py")
IDIOMS: Final = re.compile(
    r'\b(?:is|are) none\b|\bwhoever\b|\bnobody\b|\bwithout a word\b|"""The same\b|\bleft no (?:last )?word\b'
    r"|\bnone of ours\b|\bis no (?:archive|list|number|schedule|time)\b|\bat hand\b|\bcame twice\b"
)


def list_texts() -> list[Path]:
    found = [
        *_ROOT.glob("*.md"),
        *(_ROOT / "docs").rglob("*.md"),
        *(_ROOT / "rlk_repro").rglob("*.py"),
        *(_ROOT / "tools").rglob("*.py"),
    ]
    return [path for path in found if not path.relative_to(_ROOT).as_posix().startswith(_SKIPPED)]


def find_idioms(text: str) -> list[str]:
    return [f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in IDIOMS.finditer(text)]


def test_docs_and_source_use_plain_words() -> None:
    found = {path.relative_to(_ROOT).as_posix(): find_idioms(path.read_text()) for path in list_texts()}
    assert {path: hits for path, hits in found.items() if hits} == {}


@pytest.mark.parametrize(
    "text", ["the baseline is none", "whoever knows the id", "it falls back without a word", '"""The same on one line.']
)
def test_an_idiom_is_found_with_its_line(text: str) -> None:
    assert find_idioms(f"first line\n{text}\n")[0].startswith("line 2: ")


@pytest.mark.parametrize(
    "text", ["none of the pairs", "no time is left", "a word at the end of a line", "the same bytes"]
)
def test_plain_sentences_pass(text: str) -> None:
    assert find_idioms(text) == []
