"""Prepare one run: check for free space, then make the folders one by one."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from rlk_repro.base.disk import find_existing
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.units import format_bytes
from rlk_repro.prepare.contents import Contents
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.prepare.making import Order, Tell, fill, find_contents, require_unchanged
from rlk_repro.prepare.progress import watch_growth
from rlk_repro.spec import Hardware, Run, Stack

T = TypeVar("T")

# These bytes stay free, because a full file system is slow and jobs write files too.
SPARE_BYTES: Final = 1 << 30


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
