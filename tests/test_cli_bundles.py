"""The commands that take a bundle: what they print, in text and JSON, and their exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", ["verify", "inspect", "diff", "report", "replay"])
def test_a_path_that_does_not_exist_is_a_wrong_argument(call: Call, tmp_path: Path, command: str) -> None:
    path = str(tmp_path / "no.tgz")
    message = f"rlk-repro: {path}: no such file, expected a bundle or a run directory\n"
    assert call(command, *[path] * (1 + (command == "diff"))) == (2, "", message)
