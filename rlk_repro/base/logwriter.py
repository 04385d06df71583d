"""Write the output of a process to a log file, line by line, without secrets and with time stamps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from rlk_repro.base.disk import Stream

MAX_HELD_BYTES: Final = 1 << 20
TAIL_BYTES: Final = 64 << 10

_NEAR_BYTES: Final = 4096
_SEPARATOR: Final = re.compile(rb"[\r\s,;]")
_OPEN_KEY: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----(?!.*-----END [A-Z ]*PRIVATE KEY-----)", re.DOTALL)
_KEY_HINT: Final = b"PRIVATE KEY-----"


@dataclass
class LogWriter:
    """Append output to a log file, without secrets and with a time stamp on every line; may raise Unwritable.

    Memory is bounded: an endless line is written in pieces, and no piece ends inside a secret.
    ``find_open`` returns how many bytes can be written now; the other bytes wait, because a secret may start in them.
    ``tail`` holds the last 64 KiB, without secrets and time stamps.
    """

    path: Path
    scrub: Callable[[bytes], bytes]
    now: Callable[[], str]
    find_open: Callable[[bytes], int] = len
    tail: bytes = b""

    def __post_init__(self) -> None:
        self._held = b""
        self._is_midline = False
        self._stream = Stream(self.path, "ab", self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def feed(self, data: bytes) -> bytes:
        """Take a block of output, remove secrets from the lines that are now complete, then write and return them."""
        end = data.rfind(b"\n") + 1
        if end:
            end += len(self._held)
        self._held += data
        if _KEY_HINT in self._held:
            end = self._hold_open_key(end)
        end = self.find_open(self._held[:end])
        if len(self._held) - end > MAX_HELD_BYTES:
            end = self._find_cut()
        return self._write(end) if end else b""

    def close(self) -> None:
        if self._stream.closed:
            return
        with self._stream:
            self._write(len(self._held))
            self._stream.sync()

    def _hold_open_key(self, end: int) -> int:
        """Hold back an unfinished private key, since the scrubber must see the whole key."""
        opened = _OPEN_KEY.search(self._held)
        if opened is None or len(self._held) - opened.start() > MAX_HELD_BYTES:
            return end
        return min(end, self._held.rfind(b"\n", 0, opened.start()) + 1)

    def _find_cut(self) -> int:
        """Return a position at which an endless line can be cut: not inside a word."""
        limit = len(self._held) - _NEAR_BYTES
        ends = [match.end() for match in _SEPARATOR.finditer(self._held, limit - _NEAR_BYTES, limit)]
        return ends[-1] if ends else limit

    def _write(self, end: int) -> bytes:
        block = self.scrub(self._held[:end])
        self._held = self._held[end:]
        if not block:
            return b""
        stamp = self.now().encode() + b" "
        is_ended = block.endswith(b"\n")
        body = block[:-1] if is_ended else block
        stamped = body.replace(b"\n", b"\n" + stamp) + (b"\n" if is_ended else b"")
        self._write_all(stamped if self._is_midline else stamp + stamped)
        self._is_midline = not is_ended
        self.tail = (self.tail + block[-TAIL_BYTES:])[-TAIL_BYTES:]
        return block

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._stream.write(view) :]
