"""Sections of pages, and the commands that they tell the reader to type."""

from __future__ import annotations

import re
import shlex

from tests import ROOT

BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def read_section(page: str, title: str) -> str:
    """The text of the section ``title`` of a page in docs/, with its own subsections."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert match is not None, title
    return match[1]


def read_commands(page: str, title: str) -> list[list[str]]:
    """The words after ``rlk-repro`` of each line in the section's ``sh`` blocks."""
    lines = "".join(BLOCK.findall(read_section(page, title))).splitlines()
    return [shlex.split(line.strip().removeprefix("rlk-repro ")) for line in lines if line.strip()]
