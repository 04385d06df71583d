"""Remove secret values from text, in every form that programs print: plain, encoded, wrapped and coloured."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final
from urllib.parse import quote, quote_plus

MIN_LENGTH: Final = 6
MARKER: Final = b"<redacted:known-value>"

# These are terminal control sequences: colours, and operating system commands (OSC), which set titles and links.
_ANSI: Final = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))"
ESCAPES: Final = re.compile(_ANSI)
# A printed value may be split by a colour code, or by a line end, after which Ray may print its prefix.
_GAP: Final = rb"(?:[\r\n]+(?:A*\([^()\r\n]{0,200}\bpid=\d+[^()\r\n]{0,200}\)A* ?)?|A)".replace(b"A", b"(?:%s)" % _ANSI)
_GAPS: Final = re.compile(_GAP)
# A block may end inside a value, so its last 4096 bytes are searched for the value's beginning (1024 bytes at most).
_REACH_BYTES: Final = 4096
_MAX_OPEN_BYTES: Final = 1024


class KnownValues:
    """Secret values to look for in a text; values of fewer than six characters are ignored."""

    def __init__(self, values: Iterable[str]) -> None:
        known = {value.strip().encode(errors="surrogateescape") for value in values}
        forms = {form for value in known if len(value) >= MIN_LENGTH for form in _list_forms(value)}
        self._forms = tuple(sorted(forms, key=lambda form: (-len(form), form)))

    def scrub(self, block: bytes) -> bytes:
        """Remove secrets from whole lines; a secret that spans lines is found only if one call has all its lines."""
        if self._forms:
            joined = _join_lines(block)
            for form in self._forms:
                if form in block or form in joined:
                    block = _compile_gapped(form).sub(_redact, block)
        return block

    def find_open(self, block: bytes) -> int:
        """If ``block`` may end inside a value, return the position of the line in which this value begins.

        Otherwise return the length of ``block``.
        """
        if not self._forms:
            return len(block)
        end = _join_lines(block[-_REACH_BYTES:])[-_MAX_OPEN_BYTES:]
        longest = max(_measure_open(form, end) for form in self._forms)
        start = len(block)
        while start and len(_join_lines(block[start:])) < longest:
            start = block.rfind(b"\n", 0, start - 1) + 1
        return start


def _measure_open(form: bytes, end: bytes) -> int:
    """Return how many of a value's first characters ``end`` ends with; up to three count only as a word's first."""
    start = end.find(form[:1], max(0, len(end) - len(form) + 1))
    while start >= 0:
        begun = end[start:]
        if form.startswith(begun) and (len(begun) > 3 or not end[:start][-1:].isalnum()):
            return len(begun)
        start = end.find(form[:1], start + 1)
    return 0


def _join_lines(block: bytes) -> bytes:
    """Remove colours, Ray's prefixes and line ends; to remove them with the regex ``_GAPS`` takes ten times longer."""
    plain = ESCAPES.sub(b"", block) if b"\x1b" in block else block
    lines = plain.replace(b"\r", b"").split(b"\n")
    return b"".join([line.partition(b") ")[2] if line[:1] == b"(" and b"pid=" in line else line for line in lines])


def _list_forms(value: bytes) -> Iterator[bytes]:
    yield _join_lines(value)
    yield json.dumps(value.decode(errors="surrogateescape"))[1:-1].encode()
    for text in {quote(value, safe=""), quote(value), quote_plus(value), quote_plus(value, safe="/")}:
        yield text.encode()
        yield re.sub(r"%..", lambda match: match[0].lower(), text).encode()
    yield value.hex().encode()
    yield value.hex().upper().encode()
    # base64 writes 6 bits as a character, so the form depends on how many bytes of other text come before the value
    for num_before, num_mixed in ((0, 0), (1, 2), (2, 3)):
        num_whole = (num_before + len(value)) * 8 // 6
        whole = base64.b64encode(bytes(num_before) + value)[num_mixed:num_whole]
        yield whole
        yield whole.replace(b"+", b"-").replace(b"/", b"_")


@cache
def _compile_gapped(form: bytes) -> re.Pattern[bytes]:
    return re.compile((_GAP + b"*").join(re.escape(form[index : index + 1]) for index in range(len(form))))


def _redact(match: re.Match[bytes]) -> bytes:
    """Replace a value, but keep the line ends inside it, so that the log keeps its lines."""
    return MARKER + b"".join(_GAPS.findall(match[0]))
