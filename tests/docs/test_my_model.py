"""The commands of docs/how-to/my-model.md, run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT

PAGE = (ROOT / "docs/how-to/my-model.md").read_text()
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
COMMANDS = [line.removeprefix("rlk-repro ") for block in BLOCK.findall(PAGE) for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_names_what_is_missing(
    command: str, call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, error = call(*shlex.split(command), "--cache", str(tmp_path))
    assert (code, error) == (0, "")
    assert re.search(rf"^model +missing +{re.escape(str(tmp_path))}/models/", out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_short_and_names_each_kind_of_source() -> None:
    assert len(PAGE.splitlines()) <= 60
    assert len(COMMANDS) == 3
    for kind in ("random", "hub", "package"):
        assert f"kind: {kind}" in PAGE
