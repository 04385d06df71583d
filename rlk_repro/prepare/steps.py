"""Make the folders that a run needs: each once, under a lock, in a work folder beside it.

A folder counts as complete if it has a record.  If a process is killed, the next one resumes or repeats its work.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from rlk_repro.base.disk import find_existing, writing
from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import load_json, make_folder, write_json
from rlk_repro.base.findings import refuse_blocking
from rlk_repro.base.units import format_bytes
from rlk_repro.prepare.contents import Contents, FileRecord, check_contents, load_contents, record_path
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.spec import Hardware, Run, Stack

Tell: TypeAlias = Callable[[str], object]
# These bytes stay free, because a full file system is slow and jobs write files too.
SPARE_BYTES: Final = 1 << 30
LIVE_S: Final = 1.0
PLAIN_S: Final = 30.0
ANOTHER_FOLDER: Final = "--cache DIR names another folder"


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    run: Run
    stack: Stack
    hardware: Hardware
    prepared: PreparedDir
    mirror: Path | None = None
    is_offline: bool = False


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
class PrepareStep:
    """One folder that ``prepare`` makes; ``is_wanted`` tells whether the run can use content from a source.

    ``estimate`` returns the number of bytes still to be written, if known.  ``pin`` is the key with which a run pins
    the repository's revision; it is empty if nothing is left to pin.  ``check`` refuses a folder that is whole by its
    record, but not what the run needs.
    """

    kind: str
    folder: Path
    is_wanted: Callable[[Mapping[str, Any]], bool]
    make: Callable[[WorkDir, Tell], Made]
    what: str = ""
    estimate: Callable[[], int | None] = lambda: None
    pin: str = ""
    command: Callable[[], Sequence[str]] = list
    check: Callable[[Path], None] = lambda _: None

    @property
    def is_there(self) -> bool:
        return find_contents(self) is not None


@dataclass(frozen=True, kw_only=True)
class Done:
    step: PrepareStep
    contents: Contents

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.contents.kind,
            "folder": str(self.step.folder),
            "source": dict(self.contents.source),
            "num_files": len(self.contents.files),
            "size_bytes": self.contents.size_bytes,
            "digest": self.contents.digest,
        }

    @property
    def unpinned(self) -> dict[str, str] | None:
        """The key with which a run pins the revision, and the revision in use; None if nothing is left to pin."""
        if not self.step.pin:
            return None
        return {"path": self.step.pin, "revision": str(self.contents.source.get("revision"))}


def prepare(request: PrepareRequest, steps: Sequence[PrepareStep], tell: Tell, *, is_live: bool) -> list[Done]:
    """Do every step whose folder is not complete."""
    sizes = {step.folder: step.estimate() for step in steps if not step.is_there}
    require_room(request.prepared.root, sum(size or 0 for size in sizes.values()))
    done = []
    for step in steps:
        with watch_growth(step.folder, step.what, sizes.get(step.folder), tell, is_live=is_live):
            done.append(Done(step=step, contents=fill(step, tell)))
            step.check(step.folder)
    return done


def verify(done: Sequence[Done], tell: Tell) -> None:
    for item in done:
        tell(f"{item.contents.name}: hashing {format_bytes(item.contents.size_bytes)}")
        require_unchanged(item.step.folder, item.contents, is_full=True)


def require_room(root: Path, needed: int) -> None:
    free = shutil.disk_usage(find_existing(root)).free
    if needed + SPARE_BYTES > free and needed:
        raise EnvironmentMissing(
            Problem(str(root), "does not have enough space", got=f"{format_bytes(free)} free",
                    expected=f"{format_bytes(needed)} for the files and {format_bytes(SPARE_BYTES)} to spare",
                    hint=ANOTHER_FOLDER)
        )  # fmt: skip


def describe_steps(steps: Sequence[PrepareStep]) -> Iterator[str]:
    for step in steps:
        kind = f"{step.kind:<10}"
        if step.is_there:
            yield f"{kind} there    {step.folder}"
            continue
        size_bytes: int | None = None
        words: Sequence[str] = ()
        with suppress(EnvironmentMissing):
            size_bytes = step.estimate()
        with suppress(EnvironmentMissing):
            words = step.command()
        told = "size not known here" if size_bytes is None else format_bytes(size_bytes)
        yield f"{kind} missing  {step.folder}  ({told})"
        if words:
            yield f"{'':<10} by       {shlex.join(words)}"


@contextmanager
def watch_growth(folder: Path, what: str, expected: int | None, tell: Tell, *, is_live: bool) -> Iterator[None]:
    """Inside the ``with`` block, report the size of the unfinished copy of ``folder`` and the speed."""
    stop = threading.Event()
    work = WorkDir.of(folder).path

    def watch() -> None:
        first, started_s = measure_folder(work), time.monotonic()
        of_all = f" of {format_bytes(first + expected)}" if expected else ""
        while not stop.wait(LIVE_S if is_live else PLAIN_S):
            size_bytes = measure_folder(work)
            if size_bytes > first:
                speed = (size_bytes - first) / (time.monotonic() - started_s)
                tell(f"{what}: {format_bytes(size_bytes)}{of_all}, {format_bytes(int(speed))}/s")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure_folder(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # os.walk skips a folder that vanished; rglob would raise an error
        for name in names:
            with suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total


def find_contents(step: PrepareStep) -> Contents | None:
    """Load the record of a complete folder; return None if the folder must be made.

    Raises:
        SpecError: a folder with this name exists and has other content or no record.
    """
    contents = load_contents(step.folder)
    if contents is None:
        if step.folder.exists() and not WorkDir.of(step.folder).record.is_file():
            raise SpecError(
                Problem(str(step.folder), "exists without a record, so it may be incomplete",
                        expected="a folder that prepare made",
                        hint="move the folder away; give a cache of huggingface_hub as --mirror instead")
            )  # fmt: skip
        return None
    if contents.kind != step.kind or not step.is_wanted(contents.source):
        raise SpecError(
            Problem(str(step.folder), "exists, but its content is not what the run needs", got=dict(contents.source),
                    hint="remove the folder and its .json file, or choose another name in the run")
        )  # fmt: skip
    return contents


def fill(step: PrepareStep, tell: Tell) -> Contents:
    """Make a folder unless it exists or another process makes it; raise CheckFailed if the folder is damaged."""
    contents = find_contents(step)
    if contents is None:
        with writing(step.folder, hint=ANOTHER_FOLDER), _locked(step.folder, tell):
            contents = find_contents(step) or _make(step, tell)
    require_unchanged(step.folder, contents)
    return contents


def require_unchanged(folder: Path, contents: Contents, *, is_full: bool = False) -> None:
    """Raise CheckFailed for files that differ from their record."""
    findings = check_contents(folder, contents, is_full=is_full)
    hint = f"remove {folder} and prepare again"
    refuse_blocking(findings, "differs from its record", under=f"{folder.name}: ", hint=hint)


def _make(step: PrepareStep, tell: Tell) -> Contents:
    folder, work = step.folder, WorkDir.of(step.folder)
    if work.record.is_file():  # an earlier process was killed while it moved the folder
        contents = Contents.from_json(load_json(work.record), str(work.record))
    else:
        work.files.mkdir(parents=True, exist_ok=True)
        made = step.make(work, tell)
        contents = Contents(kind=step.kind, name=folder.name, source=made.source, files=made.files, made=made.made)
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
