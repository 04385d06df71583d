"""Find the few relevant lines of a huge log, by byte search over blocks.

Long lines are read in pieces, because a progress bar, or the NUL bytes that a crashed node leaves, may be one endless
line.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rlk_repro.base.errors import BundleUnreadable, Problem

BLOCK_BYTES: Final = 1 << 20
MAX_LINE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log, up to ``\\n``; ``is_continued`` marks the second and later pieces of an over-long line."""

    number: int
    text: bytes
    is_continued: bool = False


@contextmanager
def open_log(path: Path, buffering: int = -1) -> Iterator[IO[bytes]]:
    """Open a file for reading.

    Raises:
        BundleUnreadable: the file is absent or cannot be read.
    """
    try:
        with path.open("rb", buffering=buffering) as stream:
            yield stream
    except OSError as error:
        raise BundleUnreadable(Problem(str(path), f"not readable ({error.strerror})")) from error


def read_lines(stream: IO[bytes], max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers, counted from 1; a line is cut to at most ``max_bytes`` + 1 bytes."""
    number = 0
    while text := stream.readline(max_bytes + 1):
        number += 1
        yield number, text
        while len(text) > max_bytes and not text.endswith(b"\n"):
            text = stream.readline(max_bytes + 1)


def scan_lines(
    stream: IO[bytes],
    needles: Mapping[bytes, bytes],
    *,
    block_bytes: int = BLOCK_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[LogLine]:
    """Yield the lines of ``stream`` that hold one of ``needles``.

    ``needles`` maps each searched byte string to the bytes allowed right before it (``b""``: any byte).  An unfinished
    last line and the pieces of an over-long line are always yielded.
    """
    number, rest, is_continued = 0, b"", False
    while block := stream.read(block_bytes):
        data = rest + block
        start, end = 0, data.rfind(b"\n", len(rest)) + 1
        if is_continued and end:
            start, is_continued = data.find(b"\n") + 1, False
            number += 1
            yield LogLine(number, data[:start], is_continued=True)
        number = yield from _scan_block(data, start, end, needles, number)
        rest = data[end:]
        if len(rest) > max_line_bytes:
            cut = rest.rfind(b"\r")
            cut = cut if cut > 0 else len(rest)
            yield LogLine(number + 1, rest[:cut], is_continued)
            rest, is_continued = rest[cut:], True
    if rest or is_continued:
        yield LogLine(number + 1, rest, is_continued)


def _scan_block(
    data: bytes, start: int, end: int, needles: Mapping[bytes, bytes], number: int
) -> Generator[LogLine, None, int]:
    """Yield the lines from ``start`` to ``end`` that hold a needle; ``number`` lines precede. Return the new number."""
    hits = {needle: _find(data, needle, before, start, end) for needle, before in needles.items()}
    while (position := min(hits.values(), default=end)) < end:
        line_start = data.rfind(b"\n", start, position) + 1 or start
        line_end = data.find(b"\n", position, end) + 1
        number += data.count(b"\n", start, line_end)
        start = line_end
        yield LogLine(number, data[line_start:line_end])
        for needle, hit in hits.items():
            if hit < line_end:
                hits[needle] = _find(data, needle, needles[needle], line_end, end)
    return number + data.count(b"\n", start, end)


def _find(data: bytes, needle: bytes, before: bytes, start: int, end: int) -> int:
    position = data.find(needle, start, end)
    while position >= 0 and before and data[position - 1] not in before:
        position = data.find(needle, position + len(needle), end)
    return position if position >= 0 else end
