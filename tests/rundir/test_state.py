"""The state of a run is read from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk_repro.base.files import write_text
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_last_word, read_state


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 9}', '{"schema": 1, "phase": "odd"}'])
def test_an_unreadable_state_file_counts_as_absent(tmp_path: Path, text: str) -> None:
    write_text(RunDir(tmp_path).state, text)
    assert read_state(RunDir(tmp_path)) is None
    assert read_last_word(RunDir(tmp_path)).exit_code is None
