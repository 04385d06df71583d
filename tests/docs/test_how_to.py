"""The commands of two how-to pages, run as they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT

FOLDER = ROOT / "docs/how-to"
PAGES = ("publish.md", "inconclusive.md")
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
CASES = [
    (page, line.strip().removeprefix("rlk-repro "))
    for page in PAGES
    for block in BLOCK.findall((FOLDER / page).read_text())
    for line in block.splitlines()
    if line.strip()
]
TOLD = {
    "verify": "every file is what was sealed",
    "replay": "the analysis is reproduced",
    "report": "May not claim:",
    "claims": "no claim found",
    "diff": "step time ratio 0.219",
    "doctor": "",
    "index": "2 bundles",
    "submit": "sessions",
}


@pytest.mark.parametrize(("page", "command"), CASES)
def test_a_command_of_a_page_works(
    page: str,
    command: str,
    call: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(ROOT)
    words = [str(tmp_path / "site") if word == "site" else word for word in shlex.split(command)]
    code, out, error = call(*words)
    level = words[0] == "diff" and "--gate" not in words  # the two differ by more than their margin, a caution of diff
    assert code == 0 or words[0] == "doctor" or level, (out, error)
    assert TOLD[words[0]] in out + error


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    assert len((FOLDER / page).read_text().splitlines()) <= 60
