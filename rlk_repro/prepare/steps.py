"""Prepare one run: check for free space, then make the folders one by one."""

from __future__ import annotations

import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from rlk_repro.base.disk import find_existing
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.units import format_bytes, format_duration
from rlk_repro.prepare.contents import Contents
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.prepare.making import Order, Tell, WorkDir, fill, find_contents, require_unchanged
from rlk_repro.spec import Hardware, Run, Stack

T = TypeVar("T")

# These bytes stay free, because a full file system is slow and jobs write files too.
SPARE_BYTES: Final = 1 << 30
LIVE_S: Final = 1.0
PLAIN_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    run: Run
    stack: Stack
    hardware: Hardware
    prepared: PreparedDir
    mirror: Path | None = None
    is_offline: bool = False


@dataclass(frozen=True, kw_only=True)
class PrepareStep(Order):
    """One folder of a run; ``estimate`` returns the number of bytes still to be written, if known.

    ``pin`` is the key with which a run pins the repository's revision; it is empty if nothing is left to pin.
    """

    what: str
    estimate: Callable[[], int | None]
    pin: str = ""
    command: Callable[[], Sequence[str]] = list

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
                    hint="--cache DIR names another folder")
        )  # fmt: skip


def describe_steps(steps: Sequence[PrepareStep]) -> Iterator[str]:
    for step in steps:
        kind = f"{step.kind:<10}"
        if step.is_there:
            yield f"{kind} there    {step.folder}"
            continue
        yield f"{kind} missing  {step.folder}  ({_describe_size(step)})"
        words: Sequence[str] = _try(step.command, default=())
        if words:
            yield f"{'':<10} by       {shlex.join(words)}"


def _describe_size(step: PrepareStep) -> str:
    size_bytes = _try(step.estimate, default=None)
    return "size not known here" if size_bytes is None else format_bytes(size_bytes)


def _try(ask: Callable[[], T], default: T) -> T:
    try:
        return ask()
    except EnvironmentMissing:
        return default


@contextmanager
def watch_growth(folder: Path, what: str, expected: int | None, tell: Tell, *, is_live: bool) -> Iterator[None]:
    """Inside the ``with`` block, report the size of the unfinished copy of ``folder``, the speed and the time left."""
    stop = threading.Event()
    work = WorkDir.of(folder).path

    def watch() -> None:
        first, started_s = measure_folder(work), time.monotonic()
        while not stop.wait(LIVE_S if is_live else PLAIN_S):
            size_bytes = measure_folder(work)
            if size_bytes:
                tell(f"{what}: {describe_growth(size_bytes, first, expected, time.monotonic() - started_s)}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def describe_growth(size_bytes: int, first: int, missing: int | None, elapsed_s: float) -> str:
    """Describe the growth of a folder that held ``first`` bytes when ``missing`` bytes were still to come.

    The time left is given from one percent of ``missing`` on, because first files are often small and slow.
    """
    growth = size_bytes - first
    speed = growth / elapsed_s if elapsed_s > 0 else 0.0
    text = format_bytes(size_bytes)
    if missing:
        text += f" of {format_bytes(max(first + missing, size_bytes))}"
    if speed <= 0:
        return text
    text += f", {format_bytes(int(speed))}/s"
    left = (missing - growth) / speed if missing and growth >= missing / 100 else 0.0
    return f"{text}, {format_duration(left)} left" if left > 0 else text


def measure_folder(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # os.walk skips a folder that vanished; rglob would raise an error
        for name in names:
            with suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total
