"""The limits of an engine's record, which may be a stranger's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.logs import engines


def test_one_endless_line_is_refused_as_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(engines, "MAX_BYTES", 100)
    path = tmp_path / "0.jsonl"
    path.write_bytes(b"{}\n" + b"x" * 1000)
    with pytest.raises(BundleUnreadable, match="too large"):
        list(engines._read_lines(path))


def test_every_piece_of_a_long_line_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MAX_LINE_BYTES", 10)
    path = tmp_path / "0.jsonl"
    path.write_bytes(b"x" * 35 + b"\n")
    assert list(engines._read_lines(path)) == [None] * 4
