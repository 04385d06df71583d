"""Record the files of a prepared folder, and compare the folder with its record.

The record is written last, so a folder with a record is complete.  The quick check reads all sizes, all small files,
and the first and last MiB of large files.  The full check reads every byte.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import MAX_RECORDS_BYTES, load_json, sha256_bytes, sha256_file, write_json
from rlk_repro.base.findings import Finding, Level

ROLLOUTS: Final = "rollouts"
SCHEMA: Final = 1
END_BYTES: Final = 1 << 20
SMALL_BYTES: Final = 16 << 20


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file; ``ends_sha256`` covers the first and the last MiB, or all of a small file."""

    size_bytes: int
    sha256: str
    ends_sha256: str

    @classmethod
    def of(cls, path: Path, sha256: str | None = None) -> FileRecord:
        size_bytes = path.stat().st_size
        digest = sha256_file(path) if sha256 is None else sha256
        return cls(size_bytes=size_bytes, sha256=digest, ends_sha256=hash_ends(path, size_bytes, digest))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileRecord:
        return cls(size_bytes=int(value["size_bytes"]), sha256=str(value["sha256"]),
                   ends_sha256=str(value["ends_sha256"]))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The record of one prepared folder: a model, checkpoint, data set or set of rollouts.

    ``source`` is the repository and revision, or the recipe.  ``made`` is the command that made the folder, if any, and
    the commits of its tools.
    """

    kind: str
    name: str
    source: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    made: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.files.values())

    @property
    def digest(self) -> str:
        return digest_of({name: item.sha256 for name, item in self.files.items()})

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "digest": self.digest, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str) -> Contents:
        """Read a record; raise BundleUnreadable if it is invalid or its digest does not fit its files."""
        try:
            files = {str(name): FileRecord.from_json(item) for name, item in value["files"].items()}
            contents = cls(kind=str(value["kind"]), name=str(value["name"]), source=dict(value["source"]), files=files,
                        made=dict(value["made"]))  # fmt: skip
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BundleUnreadable(Problem(where, f"not a record of a prepared folder ({error!r})")) from None
        if contents.digest != value.get("digest"):
            raise BundleUnreadable(Problem(where, "the digest differs from that of the files", got=value.get("digest")))
        return contents


def digest_of(sha256s: Mapping[str, str], order: Mapping[str, int] | None = None) -> str:
    """Return the sha256 of the lines ``<sha256>  <name>``, sorted by name, or by ``order`` if it is given."""
    names = sorted(sha256s, key=None if order is None else order.__getitem__)
    return sha256_bytes("".join(f"{sha256s[name]}  {name}\n" for name in names).encode())


def hash_ends(path: Path, size_bytes: int, sha256: str | None = None) -> str:
    if size_bytes <= SMALL_BYTES:
        return sha256_file(path) if sha256 is None else sha256
    with path.open("rb") as stream:
        digest = hashlib.sha256(stream.read(END_BYTES))
        stream.seek(-END_BYTES, os.SEEK_END)
        digest.update(stream.read(END_BYTES))
    return digest.hexdigest()


def record_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def load_contents(folder: Path) -> Contents | None:
    """Load the record of a folder; return None if the folder was never finished."""
    path = record_path(folder)
    if not path.is_file() or not folder.is_dir():
        return None
    return Contents.from_json(_load_records(path), str(path))


def record_files(folder: Path) -> dict[str, FileRecord]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): FileRecord.of(path) for path in paths}


def check_contents(folder: Path, contents: Contents, *, is_full: bool = False) -> Iterator[Finding]:
    """Yield a blocking finding for each file that is absent or has another size or content; extra files are allowed."""
    for name, expected in contents.files.items():
        path = folder / name
        where = f"prepared.{contents.kind}.{name}"
        try:
            size_bytes = path.stat().st_size
            if size_bytes != expected.size_bytes:
                yield Finding(Level.BLOCKING, where, f"{expected.size_bytes} bytes", f"{size_bytes} bytes")
                continue
            wanted = expected.sha256 if is_full else expected.ends_sha256
            found = sha256_file(path) if is_full else hash_ends(path, size_bytes)
        except OSError as error:
            yield Finding(Level.BLOCKING, where, "a readable file", str(error.strerror).lower())
            continue
        if found != wanted:
            what = "sha256" if is_full else "sha256 of its ends"
            yield Finding(Level.BLOCKING, where, f"{what} {wanted}", found)


def write_parts(path: Path, parts: Mapping[str, Contents]) -> None:
    held = _load_records(path) if path.is_file() else {}
    write_json(path, {**held, **parts_json(parts)})


def parts_json(parts: Mapping[str, Contents]) -> dict[str, Any]:
    return {"schema": SCHEMA, "parts": {kind: contents.to_json() for kind, contents in parts.items()}}


def load_parts(path: Path) -> dict[str, Contents]:
    value = _load_records(path).get("parts", {}) if path.is_file() else {}
    if not isinstance(value, dict):
        raise BundleUnreadable(Problem(str(path), "holds no records of prepared folders", got=value))
    return {str(kind): Contents.from_json(item, f"{path}: parts.{kind}") for kind, item in value.items()}


def _load_records(path: Path) -> Any:
    return load_json(path, schema=SCHEMA, max_bytes=MAX_RECORDS_BYTES)


def find_parts(folders: Mapping[str, Path]) -> dict[str, Contents]:
    found = ((kind, load_contents(folder)) for kind, folder in folders.items())
    return {kind: contents for kind, contents in found if contents is not None}


def diff_contents(recorded: Mapping[str, Contents], here: Mapping[str, Contents]) -> Iterator[Finding]:
    """Yield the differences between the folders of two runs; different weights or data are blocking findings.

    The bytes of a converted checkpoint vary with the tool's threads, so only the sources of checkpoints are compared.
    """
    for kind in sorted(recorded.keys() | here.keys()):
        was, now = recorded.get(kind), here.get(kind)
        where = f"prepared.{kind}"
        if was is None or now is None:
            yield Finding(Level.BLOCKING, where, _describe(was), _describe(now))
        elif kind == "checkpoint":
            for key in sorted(was.source.keys() | now.source.keys()):
                if was.source.get(key) != now.source.get(key):
                    yield Finding(Level.BLOCKING, f"{where}.{key}", str(was.source.get(key)), str(now.source.get(key)))
        elif was.digest != now.digest:
            yield Finding(Level.BLOCKING, where, _describe(was), _describe(now))


def _describe(contents: Contents | None) -> str:
    return "none" if contents is None else f"{contents.name}, digest {contents.digest}"


def check_parts(path: Path, folders: Mapping[str, Path], rollouts: Sequence[str]) -> Iterator[Finding]:
    """Check that the folders hold what ``path`` records, and that each of the ``rollouts`` has its file.

    A trainer silently takes rollout 0 in place of a missing one.
    """
    try:
        recorded, found = load_parts(path), find_parts(folders)
    except BundleUnreadable as error:
        yield Finding(Level.BLOCKING, "prepared", "readable records", str(error.problems[0]))
        return
    for kind in folders.keys() - found.keys():
        expected = "what `rlk-repro prepare` makes with the run and the options of this run's `submit`"
        yield Finding(Level.BLOCKING, f"prepared.{kind}", expected, f"no complete folder {folders[kind].name}")
    both = recorded.keys() & found.keys()
    yield from diff_contents({kind: recorded[kind] for kind in both}, {kind: found[kind] for kind in both})
    for kind, contents in sorted(found.items()):
        yield from check_contents(folders[kind], contents)
    absent = [name for name in rollouts if ROLLOUTS in found and name not in found[ROLLOUTS].files]
    if absent:
        expected = f"{len(rollouts)} files, one per rollout of a trial"
        yield Finding(Level.BLOCKING, f"prepared.{ROLLOUTS}", expected, f"{len(absent)} missing, such as {absent[0]}")


def copy_rollouts(source: Path, target: Path) -> None:
    """Copy stored rollouts that the bundle will hold, but not those that are there already."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.pt")):
        if not (target / path.name).is_file():
            partial = target / f".partial-{path.name}"
            shutil.copyfile(path, partial)
            partial.replace(target / path.name)
