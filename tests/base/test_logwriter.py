"""The trainer's output on its way to the log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base import logwriter
from rlk_repro.base.logwriter import LogWriter
from rlk_repro.base.secrets import Scrubber, scrub_bytes

STAMP = "2026-11-20T13:45:12.345Z"
TOKEN = b"hf_" + b"a1B2c3D4e5" * 3
KEY = b"-----BEGIN PRIVATE KEY-----\n" + b"MIIEvQIBADANBgkqhkiG9w0BAQ\n" * 3 + b"-----END PRIVATE KEY-----\n"


def write(path: Path, pieces: Sequence[bytes]) -> bytes:
    with LogWriter(path, scrub_bytes, lambda: STAMP) as writer:
        for piece in pieces:
            writer.feed(piece)
    return path.read_bytes()


def unstamped(data: bytes) -> bytes:
    stamp = STAMP.encode() + b" "
    assert all(line.startswith(stamp) for line in data.split(b"\n")[:-1])
    return data.replace(stamp, b"")


def test_every_physical_line_is_stamped_when_it_is_complete(tmp_path: Path) -> None:
    numbers = count()
    with LogWriter(tmp_path / "log", scrub_bytes, lambda: str(next(numbers))) as writer:
        assert writer.feed(b"one\ntw") == b"one\n"
        assert writer.feed(b"o\rthree") == b""
        assert writer.feed(b"\n\nfour\n") == b"two\rthree\n\nfour\n"
    assert (tmp_path / "log").read_bytes() == b"0 one\n1 two\rthree\n1 \n1 four\n"


def test_a_last_line_without_its_end_stays_without_one(tmp_path: Path) -> None:
    assert write(tmp_path / "log", [b"whole\n", b"cut o"]) == f"{STAMP} whole\n{STAMP} cut o".encode()


def test_no_output_is_an_empty_log(tmp_path: Path) -> None:
    assert write(tmp_path / "log", []) == b""


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_nothing_is_lost_however_the_output_is_cut(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    with LogWriter(path, lambda line: line, lambda: STAMP) as writer:
        for piece in pieces:
            writer.feed(piece)
    lines = b"".join(pieces).split(b"\n")
    stamp = STAMP.encode() + b" "
    assert path.read_bytes() == b"\n".join(stamp + line if line or index + 1 < len(lines) else b""
                                           for index, line in enumerate(lines))  # fmt: skip


@pytest.mark.parametrize("cut", range(1, len(TOKEN) + 8))
def test_a_token_cut_by_the_pipe_is_redacted(tmp_path: Path, cut: int) -> None:
    line = b"login " + TOKEN + b" done\n"
    assert unstamped(write(tmp_path / "log", [line[:cut], line[cut:]])) == b"login <redacted:huggingface-token> done\n"


def test_a_known_value_is_redacted_and_the_watcher_sees_no_more(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", Scrubber(["correct horse"]).bytes, lambda: STAMP) as writer:
        seen = writer.feed(b"say correct horse\n")
    assert seen == writer.tail == b"say <redacted:known-value>\n"


@pytest.mark.parametrize("cut", range(0, len(KEY), 7))
def test_a_private_key_is_redacted_whole_however_its_lines_arrive(tmp_path: Path, cut: int) -> None:
    text = b"before\n" + KEY + b"after\n"
    written = unstamped(write(tmp_path / "log", [text[: cut + 7], text[cut + 7 :]]))
    assert written == b"before\n<redacted:private-key>\nafter\n"


def test_a_private_key_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logwriter, "MAX_HELD_BYTES", 1000)
    pieces = [b"-----BEGIN PRIVATE KEY-----\n", *[b"text that goes on\n"] * 100]
    with LogWriter(tmp_path / "log", scrub_bytes, lambda: STAMP) as writer:
        written = b"".join(writer.feed(piece) for piece in pieces)
    assert written.count(b"text that goes on\n") > 30


def test_an_endless_line_is_written_in_pieces_with_one_stamp(tmp_path: Path) -> None:
    progress = b"\r 50% |####    |" * 200_000
    with LogWriter(tmp_path / "log", scrub_bytes, lambda: STAMP) as writer:
        for start in range(0, len(progress), 65536):
            writer.feed(progress[start : start + 65536])
            assert len(writer._held) <= logwriter.MAX_HELD_BYTES + 65536
        writer.feed(b"\nnext\n")
    assert (tmp_path / "log").read_bytes() == f"{STAMP} ".encode() + progress + f"\n{STAMP} next\n".encode()


@pytest.mark.parametrize("offset", range(-45, 5, 7))
def test_an_endless_line_is_not_cut_through_a_token(tmp_path: Path, offset: int) -> None:
    where = logwriter.MAX_HELD_BYTES - logwriter._NEAR_BYTES + offset
    line = b"x," * (where // 2) + b"Bearer " + TOKEN + b"," + b"y," * 4096
    written = write(tmp_path / "log", [line[: logwriter.MAX_HELD_BYTES + 1], line[logwriter.MAX_HELD_BYTES + 1 :]])
    assert TOKEN not in written
    assert written.count(b"<redacted") == 1


def test_the_tail_is_bounded(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", scrub_bytes, lambda: STAMP) as writer:
        for _ in range(20):
            writer.feed(b"z" * 9_999 + b"\n")
        assert writer.tail == (b"z" * 9_999 + b"\n")[-(logwriter.TAIL_BYTES % 10_000) :] + (b"z" * 9_999 + b"\n") * 6
