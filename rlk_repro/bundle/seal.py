"""Seal and pack bundles (docs/formats.md)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from rlk_repro.base.disk import Unwritable, open_stream
from rlk_repro.base.errors import BundleUnreadable, CheckFailed, Problem, SpecError
from rlk_repro.base.escapes import printable
from rlk_repro.base.files import CHUNK_BYTES, replacing, sha256_bytes, write_bytes
from rlk_repro.base.findings import Finding, Level, refuse_blocking
from rlk_repro.bundle.archive import ArchiveReader, ArchiveWriter, Member, find_unsafe
from rlk_repro.bundle.checksums import CHECKSUMS, Piece, check_seal, hash_through, render_checksums, sort_key
from rlk_repro.rundir.paths import FIND_BUNDLE, RunDir

UNPACKED: Final = "bundle"


class FolderReader:
    """Reads the files of a run directory as ``ArchiveReader`` reads a bundle; ``data`` streams the current file.

    ``refused`` names each file that cannot be packed; it is complete after the iteration.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._stream: BinaryIO | None = None
        self._num_unread_bytes = 0
        self.refused: list[Finding] = []

    def __iter__(self) -> Iterator[Member]:
        for name in self._find_names():
            try:
                stream = (self._run_dir.root / name).open("rb")
            except FileNotFoundError:  # a file that vanishes after the listing counts as absent
                continue
            except OSError as error:
                self._refuse(name, f"unreadable ({error.strerror})")
                continue
            with stream as self._stream:
                self._num_unread_bytes = os.fstat(stream.fileno()).st_size
                yield Member(name=name, size_bytes=self._num_unread_bytes)

    def data(self) -> Iterator[bytes]:
        assert self._stream is not None
        try:
            # If a file grows meanwhile, only the bytes present when it was opened are read.
            while piece := self._stream.read(min(self._num_unread_bytes, CHUNK_BYTES)):
                self._num_unread_bytes -= len(piece)
                yield piece
        except OSError as error:
            raise _unreadable(Path(self._stream.name), error) from error

    def check(self) -> None:
        refuse_blocking(self.refused, "cannot be packed", under=f"{self._run_dir.root}/")

    def _find_names(self) -> list[str]:
        names = []
        folders = [""]
        while folders:
            folder = folders.pop()
            for entry in self._list(folder):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if not self._run_dir.is_packed(name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif (problem := self._find_problem(name, entry)) is not None:
                    self._refuse(name, problem)
                else:
                    names.append(name)
        return sorted(names, key=sort_key)

    def _list(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._run_dir.root / folder) as entries:
                return list(entries)
        except OSError as error:
            if not folder:
                raise _unreadable(self._run_dir.root, error) from error
            self._refuse(folder, f"unreadable ({error.strerror})")
            return []

    def _refuse(self, name: str, why: str) -> None:
        self.refused.append(Finding(Level.BLOCKING, printable(name), "a regular file", why))

    def _find_problem(self, name: str, entry: os.DirEntry[str]) -> str | None:
        if entry.is_symlink():
            return "a symbolic link"
        if not entry.is_file(follow_symlinks=False):
            return "a device, socket or named pipe"
        return find_unsafe(name)


def seal(run_dir: RunDir) -> str:
    """Write the digests of all packed files to SHA256SUMS; return the bundle id, which is the sha256 of SHA256SUMS.

    Raises:
        CheckFailed: the directory holds a link or device, or its files changed after an earlier seal.
    """
    reader = FolderReader(run_dir)
    digests: dict[str, str] = {}
    for member in reader:
        if member.name != CHECKSUMS:
            for _ in hash_through(member.name, reader.data(), digests):
                pass
    reader.check()
    if run_dir.is_sealed:
        _check_seal(run_dir, digests)
    else:
        write_bytes(run_dir.checksums, render_checksums(digests))
    return sha256_bytes(run_dir.checksums.read_bytes())


def pack(run_dir: RunDir, target: Path | None = None) -> Path:
    """Write the run directory, sealed or not, as a bundle; the default path is ``run_dir.bundle``.

    Raises:
        CheckFailed: the directory holds a link or device, or a file changed after sealing or shrank while it was read.
    """
    target = target or run_dir.bundle
    reader = FolderReader(run_dir)
    digests: dict[str, str] = {}
    with replacing(target) as stream:
        writer = ArchiveWriter(stream)
        for member in reader:
            num_bytes = writer.add(member, hash_through(member.name, reader.data(), digests))
            if num_bytes < member.size_bytes:
                where, expected = f"{run_dir.root}/{printable(member.name)}", f"{member.size_bytes} bytes"
                raise CheckFailed(Problem(where, "shrank while it was packed", got=num_bytes, expected=expected))
        reader.check()
        writer.close()
        if run_dir.is_sealed:
            _check_seal(run_dir, digests)
    return target


def write_through(path: Path, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces of a new file unchanged, each after it was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_stream(path, "xb") as stream:
        for piece in pieces:
            stream.write(piece)
            yield piece


@contextmanager
def open_archive(path: Path) -> Iterator[ArchiveReader]:
    """Stream the members of a bundle without unpacking it.

    Raises:
        BundleUnreadable: the file is not a bundle, or is broken, unsafe or over the limits; also raised during reading.
    """
    try:
        if not path.exists():
            expected = "a bundle or a run directory"
            raise SpecError(Problem(str(path), "no such file", expected=expected, hint=FIND_BUNDLE))
        if not path.is_file():
            raise BundleUnreadable(Problem(str(path), "a device, socket or named pipe", expected="a regular file"))
        with path.open("rb") as stream:
            yield ArchiveReader(stream, str(path))
    except Unwritable:
        raise
    except OSError as error:  # a failed write raises Unwritable, so here a read failed
        raise _unreadable(path, error) from error


def is_folder(path: Path) -> bool:
    """Tell whether the path is a run directory instead of a packed bundle.

    Raises:
        BundleUnreadable: the path is unreadable, or is a folder without the files of a run directory.
    """
    try:
        if not path.is_dir():
            return False
        names = sorted(item.name for item in os.scandir(f"{path}/."))  # a path with "/." also needs search permission
    except OSError as error:
        raise _unreadable(path, error) from error
    if not {RunDir(path).plan.name, RunDir(path).checksums.name}.intersection(names):
        bundles = [f"give the bundle {path / name} instead" for name in names if name.endswith(".tgz")]
        hint = (*bundles, FIND_BUNDLE)[0]
        raise BundleUnreadable(Problem(str(path), "is not a run directory: it has no plan.json", hint=hint))
    return True


def _unreadable(path: Path, error: OSError) -> BundleUnreadable:
    return BundleUnreadable(Problem(str(path), f"cannot be read ({error.strerror})"))


def _check_seal(run_dir: RunDir, digests: Mapping[str, str]) -> None:
    findings = check_seal(run_dir.checksums.read_bytes(), digests)
    refuse_blocking(findings, "changed after it was sealed", under=f"{run_dir.root}/")
