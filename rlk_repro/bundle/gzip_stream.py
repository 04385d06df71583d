"""Write and read the gzip file around a bundle's tar archive; its header records the sha256 of all later bytes.

The sha256 also detects changed bytes that inflate to the same content, which gzip's CRC does not.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NoReturn, cast

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.escapes import printable
from rlk_repro.base.files import CHUNK_BYTES
from rlk_repro.base.units import format_bytes
from rlk_repro.rundir.paths import FIND_BUNDLE

try:
    from isal import isal_zlib as deflate
except ImportError:  # an image may lack isal; zlib writes the same format at a third of the speed
    import zlib as deflate  # type: ignore[no-redef]

LEVEL: Final = 2
_DeflateError: Final = cast("type[Exception]", deflate.error)  # isal's type stub declares no class ``error``
_TRAILER_BYTES: Final = 8
_WINDOW_BITS: Final = -15  # negative for raw deflate: this module itself reads and writes the gzip header

_MAGIC: Final = b"\x1f\x8b\x08"
_FLAG_EXTRA: Final = 4
_FLAG_NAME: Final = 8
_PLAIN_HEADER_BYTES: Final = 10
_MAX_FILE_NAME_BYTES: Final = 1024
# The header has no time and no operating system.  Its 36-byte extra field has one subfield, "RK", for the digest.
_OUR_HEADER: Final = _MAGIC + bytes([_FLAG_EXTRA]) + b"\0\0\0\0\0\xff" + b"\x24\0RK\x20\0"
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a bundle: the number of files and folders, the inflated bytes, and inflated bytes per compressed byte.

    Inflating enlarges a log by a factor of 4 to 7, a file of one repeated line by 70, and a file of zeros by 1000.
    """

    num_members: int = 100_000
    total_bytes: int = 64 << 30
    ratio: int = 200
    ratio_floor_bytes: int = 1 << 30
    small_file_bytes: int = 1 << 20
    small_total_bytes: int = 32 << 20
    small_num_members: int = 10_000
    small_num_lines: int = 500_000

    def most_bytes(self, file_bytes: int) -> int:
        beyond_bytes = max(0, file_bytes - self.small_file_bytes)
        return min(self.total_bytes, self.small_total_bytes + self.ratio * beyond_bytes)

    def most_members(self, file_bytes: int) -> int:
        is_small = file_bytes <= self.small_file_bytes
        return min(self.num_members, self.small_num_members) if is_small else self.num_members

    def most_lines(self, file_bytes: int) -> float:
        return self.small_num_lines if file_bytes <= self.small_file_bytes else math.inf


LIMITS: Final = Limits()
ADVICE: Final = {
    "expected": "files and folders as rlk-repro packs them",
    "hint": "get the bundle again from its author, and compare its id with the published one",
}


@dataclass
class ReaderPlace:
    archive: str
    member: str = ""

    def refuse(self, what: str, **details: Any) -> NoReturn:
        where = f"{self.archive}: {printable(self.member)}" if self.member else self.archive
        raise BundleUnreadable(Problem(where, what, **(details or ADVICE))) from None


class GzipReader:
    """Inflates a gzip file within limits; length and CRC are checked before the last piece is returned.

    ``packed_digest`` is the sha256 that ``GzipWriter`` recorded, or None for a file of another tool.
    """

    def __init__(self, stream: BinaryIO, place: ReaderPlace) -> None:
        self._stream = stream
        self._place = place
        self._digest = hashlib.sha256()
        self._file_bytes = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        self._num_read_bytes = 0
        self._num_inflated_bytes = 0
        self._num_lines_left = LIMITS.most_lines(self._file_bytes)
        self._rest = memoryview(b"")
        self.packed_digest = self._read_header()
        self._pieces = self._inflate()

    def next_piece(self, max_bytes: int) -> memoryview:
        """Return the next bytes, at least one and at most ``max_bytes``; return empty bytes at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        piece, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return piece

    def check_room(self, size_bytes: int) -> None:
        self._check_size(self._num_inflated_bytes + size_bytes, self._file_bytes)

    @property
    def is_as_packed(self) -> bool:
        return self._digest.digest() == self.packed_digest

    @property
    def most_members(self) -> int:
        return LIMITS.most_members(self._file_bytes)

    def _read_header(self) -> bytes | None:
        header = self._stream.read(_PLAIN_HEADER_BYTES)
        if len(header) < _PLAIN_HEADER_BYTES or not header.startswith(_MAGIC):
            self._place.refuse("not a gzip file", hint=FIND_BUNDLE)
        flags = header[len(_MAGIC)]
        if flags == _FLAG_EXTRA:
            header += self._stream.read(len(_OUR_HEADER) - _PLAIN_HEADER_BYTES)
            digest = self._stream.read(_DIGEST_BYTES)
            if header != _OUR_HEADER or len(digest) < _DIGEST_BYTES:
                self._place.refuse("gzip header is damaged")
            return digest
        if flags == _FLAG_NAME:
            self._skip_file_name()
        elif flags:
            self._place.refuse("gzip header is damaged or unusual", got=flags, expected="flags 0, 4 or 8")
        return None

    def _skip_file_name(self) -> None:
        for _ in range(_MAX_FILE_NAME_BYTES):
            if self._stream.read(1) == b"\0":
                return
        self._place.refuse("gzip header is damaged (file name without end)")

    def _read_compressed(self) -> bytes:
        # The first reads are small, so that the error names the damaged member.  Later reads are larger and faster.
        step_bytes = min(max(self._num_read_bytes >> 6, 256), CHUNK_BYTES >> 3)
        data = self._stream.read(step_bytes)
        self._num_read_bytes += len(data)
        self._digest.update(data)
        return data

    def _inflate(self) -> Iterator[bytes]:
        engine = deflate.decompressobj(_WINDOW_BITS)
        crc = 0
        while not engine.eof:
            data = engine.unconsumed_tail or self._read_compressed()
            try:
                piece = engine.decompress(data, CHUNK_BYTES)
            except _DeflateError as error:
                self._place.refuse(f"compressed data is damaged here or shortly before ({error})")
            if not (data or piece or engine.eof):
                self._refuse_cut()
            crc = deflate.crc32(piece, crc)
            self._num_inflated_bytes += len(piece)
            self._check_size(self._num_inflated_bytes, self._num_read_bytes)
            if self._num_lines_left < math.inf:
                self._count_lines(piece)
            if piece:
                yield piece
        self._check_trailer(engine.unused_data, crc)

    def _count_lines(self, piece: bytes) -> None:
        self._num_lines_left -= piece.count(b"\n")
        if self._num_lines_left < 0:
            limit = f"at most {LIMITS.small_num_lines} in a file of {format_bytes(self._file_bytes)}"
            self._place.refuse("refused: too many lines", expected=limit)

    def _check_size(self, num_bytes: int, num_compressed_bytes: int) -> None:
        most_bytes, size = LIMITS.most_bytes(self._file_bytes), format_bytes(num_bytes)
        if num_bytes > LIMITS.total_bytes:
            expected = f"at most {format_bytes(LIMITS.total_bytes)}"
            self._place.refuse("refused: too large in total", got=size, expected=expected)
        if num_bytes > max(LIMITS.ratio_floor_bytes, LIMITS.ratio * num_compressed_bytes):
            size += f" from {format_bytes(num_compressed_bytes)}"
            expected = f"at most {LIMITS.ratio} times the compressed size"
            self._place.refuse("refused: a compression bomb", got=size, expected=expected)
        if num_bytes > most_bytes:
            limit = f"at most {format_bytes(most_bytes)} decompressed from a file of {format_bytes(self._file_bytes)}"
            self._place.refuse("refused: a compression bomb", got=size, expected=limit)

    def _refuse_cut(self) -> NoReturn:
        self._place.refuse("ends early: the file was cut off", hint=f"copy the bundle again; {FIND_BUNDLE}")

    def _check_trailer(self, tail: bytes, crc: int) -> None:
        while len(tail) <= _TRAILER_BYTES and (more := self._read_compressed()):
            tail += more
        size = self._num_inflated_bytes & 0xFFFFFFFF
        if len(tail) > _TRAILER_BYTES:
            self._place.refuse("data after the end of the archive")
        if len(tail) < _TRAILER_BYTES:
            self._refuse_cut()
        if tail != crc.to_bytes(4, "little") + size.to_bytes(4, "little"):
            self._place.refuse("content is damaged (CRC or length differs)")


class GzipWriter:
    """Writes a gzip file; equal data give equal bytes with the same compression library and processor."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._engine = deflate.compressobj(LEVEL, deflate.DEFLATED, _WINDOW_BITS)
        self._digest = hashlib.sha256()
        self._crc = 0
        self._num_bytes = 0
        stream.write(_OUR_HEADER + bytes(_DIGEST_BYTES))

    def write(self, data: bytes | memoryview) -> None:
        self._crc = deflate.crc32(data, self._crc)
        self._num_bytes += len(data)
        self._put(self._engine.compress(data))

    def close(self) -> None:
        size = self._num_bytes & 0xFFFFFFFF
        self._put(self._engine.flush() + self._crc.to_bytes(4, "little") + size.to_bytes(4, "little"))
        self._stream.seek(len(_OUR_HEADER))
        self._stream.write(self._digest.digest())

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        self._stream.write(data)
