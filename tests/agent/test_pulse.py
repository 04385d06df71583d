"""A pulse's file holds what its process wrote last, and nothing of an earlier one."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.agent.pulse import Pulse


def test_a_shorter_text_leaves_no_tail(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    for text in ("a longer text", "short"):
        with Pulse(path, 60.0, text):
            pass
    assert path.read_text().split("\n")[1:] == ["short"]
