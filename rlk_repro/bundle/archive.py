"""Write and read the tar archive of a bundle (docs/formats.md) as a stream.

tarfile's own reader is not used, because its behaviour depends on Python's patch release: 3.11.7 reads beyond the end
of a pax record, and a broken header after the first member silently ends the archive.
"""

from __future__ import annotations

import re
import shlex
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from rlk_repro.base.escapes import printable
from rlk_repro.base.files import MAX_JSON_BYTES
from rlk_repro.base.units import format_bytes
from rlk_repro.bundle.checksums import CHECKSUMS, CODEC
from rlk_repro.bundle.gzip_stream import GzipReader, GzipWriter, ReaderPlace
from rlk_repro.rundir.paths import RunDir

_BLOCK_BYTES: Final = tarfile.BLOCKSIZE
_ZERO_BLOCK: Final = bytes(_BLOCK_BYTES)
_MAX_OCTAL: Final = 8**11
_BLANK_CHECKSUM: Final = sum(b" " * 8)
_AFTER_CHECKSUM_BYTES: Final = 356
_LAYOUT: Final = RunDir(Path())
_PLAN: Final = str(_LAYOUT.plan)

_MAX_NAME_BYTES: Final = 1024
_MAX_PART_BYTES: Final = 255
_MAX_PARTS: Final = 32
_MAX_EXTENSION_BYTES: Final = 1 << 16
_MAX_EXTENSIONS: Final = 1  # of two, tools read different ones
_PREFIX: Final = slice(345, 500)
_MAGIC: Final = slice(257, 263)
_NO_END: Final = "ends without an end-of-archive mark"
_FILE_TYPES: Final = {tarfile.REGTYPE, tarfile.AREGTYPE}
_REFUSED_TYPES: Final = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.GNUTYPE_LONGLINK: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    tarfile.XGLTYPE: "a global pax header",
}
_PAX_RECORD: Final = re.compile(rb"([1-9][0-9]{0,5}) ([^=\n]+)=")
_NUMBERS: Final = (slice(100, 108), slice(108, 116), slice(116, 124), slice(124, 136), slice(136, 148),
                  slice(148, 156), slice(329, 337), slice(337, 345))  # fmt: skip
"""Mode, owner, group, size, time, checksum and both numbers of a device in a tar header."""
_OCTAL: Final = re.compile(rb" *[0-7]*[ \0]*|\x80[\0-\xff]+", re.DOTALL)
_DRIVE: Final = re.compile(r"[A-Za-z]:|\\")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One file or folder of a bundle; ``name`` is relative to the run directory, whose own name is empty."""

    name: str
    size_bytes: int
    is_folder: bool = False


def find_unsafe(path: str) -> str | None:
    parts = path.split("/")
    if path.startswith("/"):
        return "absolute path"
    if ".." in parts:
        return "path leads out of its folder"
    if "\0" in path:
        return "NUL in the name"
    if _DRIVE.match(path):
        return "Windows path with a drive or share"
    if "" in parts or "." in parts:
        return 'path with an empty part or the part "."'
    if len(path.encode(*CODEC)) > _MAX_NAME_BYTES or any(len(part.encode(*CODEC)) > _MAX_PART_BYTES for part in parts):
        return "name too long"
    if len(parts) > _MAX_PARTS:
        return f"path with more than {_MAX_PARTS} levels"
    return None


def render_header(path: str, size_bytes: int) -> bytes:
    """Return a file's header blocks: GNU format, owner 0, time 0, mode 644.

    Python's tarfile is not used, because the bytes that it writes may depend on Python's version.
    """
    raw = path.encode(*CODEC)
    header = _render_block(raw, size_bytes, tarfile.REGTYPE)
    if len(raw) <= tarfile.LENGTH_NAME:
        return header
    body = raw + bytes(1 + -(len(raw) + 1) % _BLOCK_BYTES)
    return _render_block(b"././@LongLink", len(raw) + 1, tarfile.GNUTYPE_LONGNAME) + body + header


def _render_block(name: bytes, size_bytes: int, kind: bytes) -> bytes:
    size = b"%011o\0" % size_bytes if size_bytes < _MAX_OCTAL else b"\x80" + size_bytes.to_bytes(11, "big")
    mode, owner, time = b"0000644\0", b"0000000\0", b"00000000000\0"
    before = name[: tarfile.LENGTH_NAME].ljust(tarfile.LENGTH_NAME, b"\0") + mode + owner + owner + size + time
    after = (kind + bytes(tarfile.LENGTH_LINK) + tarfile.GNU_MAGIC).ljust(_AFTER_CHECKSUM_BYTES, b"\0")
    checksum = sum(before) + _BLANK_CHECKSUM + sum(after)
    return before + b"%06o\0 " % checksum + after


class ArchiveWriter:
    def __init__(self, stream: BinaryIO) -> None:
        self._gzip = GzipWriter(stream)

    def add(self, member: Member, pieces: Iterable[bytes | memoryview]) -> int:
        """Write one file; return its number of bytes, which must be ``size_bytes`` for a valid archive."""
        self._gzip.write(render_header(member.name, member.size_bytes))
        num_bytes = 0
        for piece in pieces:
            num_bytes += len(piece)
            self._gzip.write(piece)
        self._gzip.write(bytes(-num_bytes % _BLOCK_BYTES))
        return num_bytes

    def close(self) -> None:
        self._gzip.write(2 * _ZERO_BLOCK)
        self._gzip.close()


class ArchiveReader:
    """Iterates over the members of an archive; ``data`` streams the current member.

    An iteration that ends without an error has checked the length and the CRC of the whole file. ``is_own`` says
    whether the header names ``ArchiveWriter`` as the packer; ``foreign_member`` is the first member with a header or
    padding that ``ArchiveWriter`` does not write.
    """

    def __init__(self, stream: BinaryIO, archive: str) -> None:
        self._place = ReaderPlace(archive)
        self._gzip = GzipReader(stream, self._place)
        self._num_unread_bytes = 0
        self._is_file: dict[str, bool | None] = {}  # None marks a folder without an entry of its own
        self.is_own = self._gzip.packed_digest is not None
        self.foreign_member: str | None = None

    def __iter__(self) -> Iterator[Member]:
        while (member := self._next_member()) is not None:
            self._num_unread_bytes = member.size_bytes
            yield member
            for _ in self.data():
                pass
            if self._take(-member.size_bytes % _BLOCK_BYTES).strip(b"\0"):
                self._note_foreign(member.name)
        self._check_end()

    @property
    def is_as_packed(self) -> bool:
        """Whether ``ArchiveWriter`` wrote every byte of the archive; known after the iteration."""
        return self._gzip.is_as_packed

    def data(self) -> Iterator[memoryview]:
        while self._num_unread_bytes:
            piece = self._gzip.next_piece(self._num_unread_bytes)
            if not piece:
                self._place.refuse("the archive ends inside this member")
            self._num_unread_bytes -= len(piece)
            yield piece

    def _take(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self._gzip.next_piece(num_bytes - len(data))
            if not piece:
                self._place.refuse(_NO_END)
            data += piece
        return data

    def _next_member(self) -> Member | None:
        blocks = b""
        overrides: dict[str, str] = {}
        for _ in range(_MAX_EXTENSIONS + 1):
            block = self._take(_BLOCK_BYTES)
            if block == _ZERO_BLOCK and not blocks:
                return None
            blocks += block
            info = self._parse_header(block)
            if info.type not in {tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME}:
                return self._admit(info, overrides, blocks)
            body = self._take_extension(info.size)
            blocks += body
            body = body[: info.size]
            if info.type == tarfile.XHDTYPE:
                overrides |= self._parse_pax(body)
            else:
                overrides["path"] = body.removesuffix(b"\0").decode(*CODEC)
        return self._place.refuse("refused: too many headers for one member")

    def _parse_header(self, block: bytes) -> tarfile.TarInfo:
        try:
            info = tarfile.TarInfo.frombuf(block, *CODEC)
        except tarfile.HeaderError as error:
            self._place.refuse(f"a tar header is missing or broken ({error})")
        if block[_PREFIX].strip(b"\0") and block[_MAGIC] != tarfile.POSIX_MAGIC[:6]:
            self._place.refuse("refused: a name in two parts, which other tools read differently")
        if info.size < 0:
            self._place.refuse("a tar header is missing or broken (negative size)")
        odd = next((block[place] for place in _NUMBERS if not _OCTAL.fullmatch(block[place])), None)
        if odd is not None:
            self._place.refuse("refused: a number that other tools read differently", got=ascii(odd),
                               expected="octal digits")  # fmt: skip
        return info

    def _take_extension(self, num_bytes: int) -> bytes:
        if num_bytes > _MAX_EXTENSION_BYTES:
            limit = format_bytes(_MAX_EXTENSION_BYTES)
            self._place.refuse("refused: name too long", got=format_bytes(num_bytes), expected=f"at most {limit}")
        return self._take(num_bytes + -num_bytes % _BLOCK_BYTES)

    def _parse_pax(self, body: bytes) -> dict[str, str]:
        records: dict[str, str] = {}
        position = 0
        while position < len(body):
            match = _PAX_RECORD.match(body, position)
            end = position + int(match[1]) if match else 0
            if match is None or end <= match.end() or body[end - 1 : end] != b"\n":
                self._place.refuse("a pax header is missing or broken")
            records[match[2].decode(*CODEC)] = body[match.end() : end - 1].decode(*CODEC)
            position = end
        return records

    def _admit(self, info: tarfile.TarInfo, overrides: dict[str, str], blocks: bytes) -> Member:
        is_folder = info.type == tarfile.DIRTYPE
        path = overrides.get("path", info.name)
        path = path.removesuffix("/") if is_folder else path
        self._place.member = path
        self._check_type(info.type, overrides)
        name = self._check_path(path, is_folder)
        size_bytes = self._find_size(info, overrides)
        self._gzip.check_room(size_bytes)
        if is_folder and size_bytes:
            self._place.refuse("refused: a folder entry must not hold data")
        self._place.member = name or "."
        self._register(name, is_file=not is_folder)
        if blocks != render_header(name, size_bytes):
            self._note_foreign(name)
        return Member(name=name, size_bytes=size_bytes, is_folder=is_folder)

    def _check_type(self, kind: bytes, overrides: dict[str, str]) -> None:
        if kind not in _FILE_TYPES and kind != tarfile.DIRTYPE:
            self._place.refuse(f"refused: {_REFUSED_TYPES.get(kind, f'a tar entry of type {kind!a}')}")
        if any(key.startswith("GNU.sparse") for key in overrides):
            self._place.refuse("refused: a sparse file")

    def _check_path(self, path: str, is_folder: bool) -> str:
        """Remove the ``./`` that ``tar -C folder .`` adds."""
        if is_folder and path == ".":
            return ""
        name = path.removeprefix("./")
        unsafe = find_unsafe(name)
        if unsafe is not None:
            self._place.refuse(f"refused: {unsafe}")
        if not _LAYOUT.is_packed(name):
            self._place.refuse("refused: a file that rlk-repro makes beside a bundle's files, and never packs")
        return name

    def _find_size(self, info: tarfile.TarInfo, overrides: dict[str, str]) -> int:
        text = overrides.get("size", str(info.size))
        if not re.fullmatch("[0-9]{1,20}", text):
            self._place.refuse("refused: the size is not a number", got=text, expected="digits")
        return int(text)

    def _register(self, name: str, *, is_file: bool) -> None:
        """Refuse a duplicate name, a name that is both a file and a folder, and too many entries."""
        if name in self._is_file and (is_file or self._is_file[name] is not None):
            self._place.refuse("refused: appears twice")
        self._is_file[name] = is_file
        while name:
            name = name.rpartition("/")[0]
            if name in self._is_file and not self._is_file[name]:
                break
            if self._is_file.setdefault(name, None):
                self._place.refuse("refused: a folder in this path is also a file")
        if len(self._is_file) > self._gzip.most_members:
            self._place.refuse("refused: too many members", expected=f"at most {self._gzip.most_members}")

    def _note_foreign(self, name: str) -> None:
        self.foreign_member = self.foreign_member or name or "."

    def _check_end(self) -> None:
        self._place.member = ""
        if not self._is_file:
            self._place.refuse("is empty")
        if self._take(_BLOCK_BYTES) != _ZERO_BLOCK:
            self._place.refuse(_NO_END)
        while piece := self._gzip.next_piece(_BLOCK_BYTES << 7):
            if bytes(piece).strip(b"\0"):
                self._place.refuse("data after the end of the archive")
        lists = [name for name in self._is_file if name.rpartition("/")[2].casefold() == CHECKSUMS.casefold()]
        if len(lists) > 1:
            self._place.refuse("refused: a second list of checksums", got=max(lists, key=len), expected=CHECKSUMS)
        self._check_layout()

    def _check_layout(self) -> None:
        """Refuse an archive that holds the run directory inside another folder."""
        files = [name for name, is_file in self._is_file.items() if is_file]
        plan = min((name for name in files if name.endswith(f"/{_PLAN}")), key=len, default="")
        folder = plan.removesuffix(_PLAN)
        if folder and all(name.startswith(folder) for name in files):
            command = f"tar czf bundle.tgz -C {shlex.quote(printable(folder))} ."
            self._place.refuse("holds the run directory inside another folder", got=plan,
                               expected=f"{_PLAN} at the top", hint=f"pack its content: {command}")  # fmt: skip


def read_own(pieces: Iterable[bytes | memoryview], max_bytes: int = MAX_JSON_BYTES) -> bytes | None:
    data = bytearray()
    num_bytes = 0
    for piece in pieces:
        num_bytes += len(piece)
        if num_bytes <= max_bytes:
            data += piece
    return bytes(data) if num_bytes <= max_bytes else None
