"""The commands of a how-to page, in order."""

from __future__ import annotations

import re
import shlex

from tests import ROOT

FOLDER = ROOT / "docs" / "how-to"
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def read_commands(page: str) -> list[list[str]]:
    """The words after ``rlk-repro`` of each line in the page's ``sh`` blocks."""
    lines = "".join(BLOCK.findall((FOLDER / page).read_text())).splitlines()
    return [shlex.split(line.strip().removeprefix("rlk-repro ")) for line in lines if line.strip()]
