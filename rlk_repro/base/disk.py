"""Write files so that an error names the path and the file system, and no partial file is left."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.units import format_bytes

WANTS_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
MORE_ROOM: Final = "export TMPDIR=/a/folder/with/room"
OF_WRITING: Final = WANTS_ROOM | {errno.EROFS, errno.EFBIG}
"""Error numbers (errno) with which a write can fail, but never a read or a network connection."""
OF_FILE_SYSTEMS: Final = OF_WRITING | {errno.EIO, errno.ESTALE}


class Unwritable(EnvironmentMissing, OSError):
    @classmethod
    def at(cls, path: Path, error: OSError, hint: str | None = None) -> Unwritable:
        reason, expected = error.strerror, None
        if error.errno in WANTS_ROOM:
            expected = f"room on {describe_file_system(path)}"
        elif error.errno in OF_FILE_SYSTEMS:
            reason = f"{reason}; {describe_file_system(path)}"
        made = cls(Problem(str(path), f"cannot be written ({reason})", expected=expected, hint=hint))
        made.errno, made.strerror, made.filename = error.errno, error.strerror, str(path)
        return made


@contextmanager
def writing(path: Path, *, hint: str | None = None) -> Iterator[None]:
    """Turn write errors inside the ``with`` block into ``Unwritable`` errors about ``path``.

    ``FileExistsError`` is raised unchanged, because callers handle it.
    """
    try:
        yield
    except Unwritable as error:
        error.problems = tuple(replace(item, hint=item.hint or hint) for item in error.problems)
        raise
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno is None:
            raise
        raise Unwritable.at(path, error, hint) from error


class Stream(io.FileIO):
    """An unbuffered file whose errors name ``path``, even while the file on disk has a temporary name."""

    def __init__(self, file: Path | int, mode: str, path: Path) -> None:
        self._path = path
        with writing(path):
            super().__init__(file, mode, opener=_open_no_link)

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise Unwritable.at(self._path, error) from error

    def sync(self) -> None:
        with writing(self._path):
            os.fsync(self.fileno())

    def close(self) -> None:
        with writing(self._path):
            super().close()


def open_stream(path: Path, mode: str) -> BinaryIO:
    return io.BufferedWriter(Stream(path, mode, path))


@contextmanager
def new_folder(path: Path, *, hint: str | None = None) -> Iterator[Path]:
    """Make a folder that gets the name ``path`` when the block ends without an error; after an error, remove it.

    Raises:
        FileExistsError: ``path`` exists already.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with writing(path, hint=hint):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        parent = Path(tempfile.mkdtemp(dir=path.parent, prefix=".partial-"))
    partial = parent / path.name
    try:
        with writing(path, hint=hint):
            partial.mkdir()
            yield partial
            partial.rename(path)
    except Unwritable as error:
        error.problems = tuple(
            replace(item, where=item.where.replace(str(partial), str(path), 1)) for item in error.problems
        )
        raise
    finally:
        shutil.rmtree(parent, ignore_errors=True)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    place = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108  (only to name the folder in errors)
    with writing(place, hint=MORE_ROOM):
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_existing(path: Path, exists: Callable[[Path], bool] = os.path.exists) -> Path:
    """Return the path if it exists, otherwise its nearest parent that does."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if exists(place))


def can_make(folder: Path) -> bool:
    """Whether this user can write to a folder, or create it in an existing folder."""
    nearest = find_existing(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def describe_file_system(path: Path) -> str:
    there = find_existing(path).resolve()
    device = there.stat().st_dev
    mount = there
    while mount != mount.parent and mount.parent.stat().st_dev == device:
        mount = mount.parent
    usage = shutil.disk_usage(there)
    return f"the file system at {mount} ({format_bytes(usage.free)} of {format_bytes(usage.total)} free)"


def _open_no_link(name: str, flags: int) -> int:
    """Refuse a link, because another user may have made the link, and it may lead to another file."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # Windows has no such flag
