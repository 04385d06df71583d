"""The commands of the how-to pages, run as they stand; those for a cluster are in tests/clusters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.how_to import FOLDER, read_commands

PAGES = ("publish.md", "inconclusive.md")
CASES = [(page, command) for page in PAGES for command in read_commands(page)]
TOLD = {
    "verify": "every file matches the seal",
    "replay": "the analysis is reproduced",
    "report --summary": "What this result does not show:",
    "report -o": "What this report does not show:",
    "diff": "0.219",
    "doctor": "",
    "index": "2 bundles",
    "submit": "sessions",
}


@pytest.mark.parametrize(("page", "command"), CASES)
def test_a_command_of_a_page_works(
    page: str,
    command: list[str],
    call: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(ROOT)
    words = [str(tmp_path / "site") if word == "site" else word for word in command]
    code, out, error = call(*words)
    assert code == 0 or words[0] == "doctor", (out, error)
    if "-o" in words and words[0] == "report":
        assert TOLD["report -o"] in (tmp_path / "site" / "report.md").read_text()
    else:
        assert TOLD["report --summary" if words[0] == "report" else words[0]] in out + error


@pytest.mark.parametrize("page", sorted(path.name for path in FOLDER.glob("*.md")))
def test_a_page_is_short(page: str) -> None:
    assert len((FOLDER / page).read_text().splitlines()) <= 60
