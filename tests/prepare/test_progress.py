"""The size of a growing folder, which others change while it is measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.prepare.steps import describe_growth, measure_folder


def test_a_folder_that_vanishes_during_the_measurement_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "incoming"
    for folder in (tmp_path / "kept", gone):
        folder.mkdir()
        (folder / "part").write_bytes(b"x" * 100)
    listed = os.scandir

    def list_after_removal(folder: Any) -> Any:
        if str(folder) == str(gone):
            gone.joinpath("part").unlink(missing_ok=True)
            gone.rmdir()
        return listed(folder)

    assert measure_folder(tmp_path) == 200
    monkeypatch.setattr(os, "scandir", list_after_removal)
    assert measure_folder(tmp_path) == 100


def test_a_folder_that_is_absent_has_no_size(tmp_path: Path) -> None:
    assert measure_folder(tmp_path / "absent") == 0


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B of 976.6 KiB"), (9_000, "8.8 KiB of 976.6 KiB, 4.4 KiB/s"),
     (10_000, "9.8 KiB of 976.6 KiB, 4.9 KiB/s, 3 min 18 s left"), (1_000_000, "976.6 KiB of 976.6 KiB, 488.3 KiB/s")],
)  # fmt: skip
def test_the_time_left_is_given_from_one_percent_on(size_bytes: int, text: str) -> None:
    assert describe_growth(size_bytes, 0, 1_000_000, 2.0) == text
