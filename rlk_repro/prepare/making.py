"""Make a prepared folder once, under a lock, in a work folder beside it.

A folder counts as complete if it has a record.  If a process is killed, the next one resumes or repeats its work.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rlk_repro.base.disk import writing
from rlk_repro.base.errors import CheckFailed, Problem, SpecError
from rlk_repro.base.files import load_json, make_folder, write_json
from rlk_repro.prepare.contents import Contents, FileRecord, check_contents, load_contents, record_path

Tell: TypeAlias = Callable[[str], object]


@dataclass(frozen=True)
class WorkDir:
    """A temporary folder beside a prepared folder: ``files`` becomes the prepared folder, ``record`` its record."""

    path: Path

    @classmethod
    def of(cls, folder: Path) -> WorkDir:
        return cls(folder.with_name(f".partial-{folder.name}"))

    @property
    def files(self) -> Path:
        return self.path / "files"

    @property
    def record(self) -> Path:
        return self.path / "record.json"


@dataclass(frozen=True, kw_only=True)
class Made:
    source: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    made: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Order:
    """One folder that ``prepare`` makes; ``is_wanted`` tells whether the run can use content from the given source."""

    kind: str
    folder: Path
    is_wanted: Callable[[Mapping[str, Any]], bool]
    make: Callable[[WorkDir, Tell], Made]


def find_contents(order: Order) -> Contents | None:
    """Load the record of a complete folder; return None if the folder must be made.

    Raises:
        SpecError: a folder with this name exists and has other content or no record.
    """
    contents = load_contents(order.folder)
    if contents is None:
        if order.folder.exists() and not WorkDir.of(order.folder).record.is_file():
            raise SpecError(
                Problem(str(order.folder), "exists without a record, so it may be incomplete",
                        expected="a folder that prepare made",
                        hint="move the folder away; give a cache of huggingface_hub as --mirror instead")
            )  # fmt: skip
        return None
    if contents.kind != order.kind or not order.is_wanted(contents.source):
        raise SpecError(
            Problem(str(order.folder), "exists, but its content is not what the run needs", got=dict(contents.source),
                    hint="remove the folder and its .json file, or choose another name in the run")
        )  # fmt: skip
    return contents


def fill(order: Order, tell: Tell) -> Contents:
    """Make a folder unless it exists or another process makes it; raise CheckFailed if the folder is damaged."""
    contents = find_contents(order)
    if contents is None:
        with writing(order.folder, hint="--cache DIR names another folder"), _locked(order.folder, tell):
            contents = find_contents(order) or _make(order, tell)
    require_unchanged(order.folder, contents)
    return contents


def require_unchanged(folder: Path, contents: Contents, *, is_full: bool = False) -> None:
    """Raise CheckFailed for files that differ from their record."""
    problems = [
        Problem(f"{folder.name}: {item.where}", "differs from its record", got=item.found, expected=item.expected,
                hint=f"remove {folder} and prepare again")
        for item in check_contents(folder, contents, is_full=is_full)
    ]  # fmt: skip
    if problems:
        raise CheckFailed(*problems)


def _make(order: Order, tell: Tell) -> Contents:
    folder, work = order.folder, WorkDir.of(order.folder)
    if work.record.is_file():  # an earlier process was killed while it moved the folder
        contents = Contents.from_json(load_json(work.record), str(work.record))
    else:
        work.files.mkdir(parents=True, exist_ok=True)
        made = order.make(work, tell)
        contents = Contents(kind=order.kind, name=folder.name, source=made.source, files=made.files, made=made.made)
        write_json(work.record, contents.to_json())
    if work.files.is_dir():
        work.files.rename(folder)
    work.record.replace(record_path(folder))
    shutil.rmtree(work.path, ignore_errors=True)
    return contents


@contextmanager
def _locked(folder: Path, tell: Tell) -> Iterator[None]:
    """The operating system releases the lock of a process that ends."""
    make_folder(folder.parent)
    handle = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise
            tell(f"{folder.name}: waiting for another process that makes this folder")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
