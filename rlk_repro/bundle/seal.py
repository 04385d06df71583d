"""Seal, pack, unpack and describe bundles (docs/formats.md)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from rlk_repro.base import files
from rlk_repro.base.disk import MORE_ROOM, Unwritable, new_folder, open_stream, temporary_folder, writing
from rlk_repro.base.errors import BundleUnreadable, CheckFailed, Problem, SpecError
from rlk_repro.base.escapes import printable
from rlk_repro.base.files import CHUNK_BYTES, parse_json, replacing, sha256_bytes, write_bytes
from rlk_repro.base.units import format_bytes
from rlk_repro.bundle.archive import ArchiveReader, ArchiveWriter, Member, find_unsafe, read_own
from rlk_repro.bundle.checksums import (
    CHECKSUMS,
    Piece,
    diff_checksums,
    hash_through,
    parse_checksums,
    render_checksums,
    sort_key,
)
from rlk_repro.rundir.paths import FIND_BUNDLE, NODES, TRIALS, RunDir
from rlk_repro.rundir.results import TrialStatus

_LAYOUT: Final = RunDir(Path())
_PLAN: Final = str(_LAYOUT.plan)
_ANALYSIS: Final = str(_LAYOUT.analysis)
_UNPACKED: Final = "bundle"
_SHORT_HASH: Final = 12
_MAX_FACT: Final = 500
_FACTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "name": (_PLAN, ("experiment", "run", "run")),
    "lane": (_PLAN, ("experiment", "run", "lane")),
    "hardware": (_PLAN, ("experiment", "hardware", "hardware")),
    "cluster": (_PLAN, ("profile", "cluster")),
    "plan_hash": (_PLAN, ("plan_hash",)),
    "verdict": (_ANALYSIS, ("verdict", "word")),
    "headline": (_ANALYSIS, ("verdict", "headline")),
    "rlk_repro": (_ANALYSIS, ("facts", "rlk-repro")),
}


@dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """A description of a bundle; ``bundle_id`` is None without a seal, and a fact is None if it is not recorded."""

    run_id: str
    bundle_id: str | None
    facts: Mapping[str, str | None]
    num_files: int
    size_bytes: int
    trials: Mapping[str, str]
    nodes: tuple[str, ...]

    @property
    def is_sealed(self) -> bool:
        return self.bundle_id is not None

    def lines(self) -> list[str]:
        facts = {name: value or "not recorded" for name, value in self.facts.items()}
        if self.facts["plan_hash"]:
            facts["plan_hash"] = facts["plan_hash"][:_SHORT_HASH]
        if self.facts["verdict"]:
            facts["verdict"] += f" (as {'sealed' if self.is_sealed else 'recorded'}, not recomputed)"
        return [
            f"run {self.run_id}",
            f"id {self.bundle_id or 'not sealed: the run was interrupted or has not finished'}",
            f"sealed {'yes' if self.is_sealed else 'no'}",
            *(f"{name.replace('_', '-')} {value}" for name, value in facts.items()),
            f"{self.num_files} files, {format_bytes(self.size_bytes)}",
            f"nodes {', '.join(map(printable, self.nodes)) or 'none'}",
            *(f"trial {printable(name)}: {printable(status)}" for name, status in self.trials.items()),
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "bundle_id": self.bundle_id,
            "is_sealed": self.is_sealed,
            **self.facts,
            "num_files": self.num_files,
            "size_bytes": self.size_bytes,
            "trials": dict(self.trials),
            "nodes": list(self.nodes),
        }


class FolderReader:
    """Reads the files of a run directory as ``ArchiveReader`` reads a bundle; ``data`` streams the current file.

    ``refused`` has the reason for each file that cannot be packed; it is complete after the iteration.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._stream: BinaryIO | None = None
        self._num_unread_bytes = 0
        self.refused: dict[str, str] = {}

    def __iter__(self) -> Iterator[Member]:
        for name in self._find_names():
            try:
                stream = (self._run_dir.root / name).open("rb")
            except FileNotFoundError:  # a file that vanishes after the listing counts as absent
                continue
            except OSError as error:
                self.refused[name] = f"unreadable ({error.strerror})"
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
        if self.refused:
            root = self._run_dir.root
            raise CheckFailed(
                *(
                    Problem(f"{root}/{printable(name)}", what, expected="a regular file")
                    for name, what in self.refused.items()
                )
            )

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
                    self.refused[name] = problem
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
            self.refused[folder] = f"unreadable ({error.strerror})"
            return []

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
                where = f"{run_dir.root}/{printable(member.name)}"
                raise CheckFailed(
                    Problem(where, "shrank while it was packed", got=num_bytes, expected=f"{member.size_bytes} bytes")
                )
        reader.check()
        writer.close()
        if run_dir.is_sealed:
            _check_seal(run_dir, digests)
    return target


def unpack(bundle: Path, destination: Path, bundle_id: str | None = None) -> RunDir:
    """Unpack a bundle into a new folder, which becomes a run directory; after an error the folder does not exist.

    With ``bundle_id``, the unpacked files must give this id: another process may exchange the bundle after its check.

    Raises:
        SpecError: there is no such bundle, or the destination exists.
        BundleUnreadable: the bundle is unsafe, or its files give another id.
    """
    if destination.exists():
        raise SpecError(Problem(str(destination), "already exists", expected="a new folder"))
    with open_archive(bundle) as reader:
        for _ in reader:  # the first reading refuses an invalid bundle before any file is written
            pass
    with open_archive(bundle) as reader, new_folder(destination) as partial:
        digests = _write_members(reader, partial)
        found = sha256_bytes(render_checksums({name: digests[name] for name in digests if name != CHECKSUMS}))
        if bundle_id not in {None, found}:
            raise BundleUnreadable(Problem(str(bundle), "changed while it was read", got=found, expected=bundle_id))
    return RunDir(destination)


@contextmanager
def open_bundle(path: Path, bundle_id: str | None = None) -> Iterator[RunDir]:
    """Yield the run directory ``path``; for a bundle, yield an unpacked copy, which exists until the block ends.

    With ``bundle_id``, a bundle that was exchanged after its check is refused.
    """
    if is_folder(path):
        yield RunDir(path)
        return
    with temporary_folder("rlk-repro-") as folder:
        with writing(folder, hint=MORE_ROOM):
            unpacked = unpack(path, folder / _UNPACKED, bundle_id)
        yield unpacked


def inspect_bundle(path: Path) -> BundleInfo:
    """Describe a bundle or run directory without checking or unpacking it."""
    if is_folder(path):
        return _inspect(FolderReader(RunDir(path)), RunDir(path).run_id)
    with open_archive(path) as reader:
        return _inspect(reader, _UNPACKED)


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
    listed, findings = parse_checksums(run_dir.checksums.read_bytes())
    found = {name: digest for name, digest in digests.items() if name != CHECKSUMS}
    findings += diff_checksums(listed, found)
    if findings:
        raise CheckFailed(
            *(Problem(f"{run_dir.root}/{item.where}", f"changed after it was sealed: {item.found}",
                      expected=item.expected)
              for item in findings)
        )  # fmt: skip


def _write_members(reader: ArchiveReader, folder: Path) -> dict[str, str]:
    """Write all members; return the sha256 of each file's written bytes."""
    digests: dict[str, str] = {}
    for member in reader:
        path = folder / member.name
        if member.is_folder:
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_stream(path, "xb") as stream:
            for piece in hash_through(member.name, reader.data(), digests):
                stream.write(piece)
    return digests


def _inspect(reader: ArchiveReader | FolderReader, folder_name: str) -> BundleInfo:
    from rlk_repro.plan import find_run_id  # imported late, because it imports pydantic, which verify.py does not need

    sizes_bytes = []
    nodes: set[str] = set()
    trials: dict[str, str] = {}
    bundle_id = None
    records: dict[str, Any] = {}
    for member in reader:
        parts = member.name.split("/")
        if not member.is_folder:
            sizes_bytes.append(member.size_bytes)
        if member.name == CHECKSUMS:
            bundle_id = sha256_bytes(read_own(reader.data(), files.MAX_RECORDS_BYTES) or b"")
        elif member.name in {_PLAN, _ANALYSIS}:
            most_bytes = files.MAX_PLAN_BYTES if member.name == _PLAN else files.MAX_ANALYSIS_BYTES
            records[member.name] = _load_own(reader.data(), most_bytes)
        elif parts[0] == NODES and len(parts) > 2:
            nodes.add(parts[1])
        elif parts[0] == TRIALS and len(parts) > 2:
            trials.setdefault(parts[1], TrialStatus.MISSING)
            if member.name == str(_LAYOUT.trial(parts[1]).exit):
                trials[parts[1]] = _read_status(reader.data())
    return BundleInfo(
        run_id=find_run_id(records.get(_PLAN), folder_name),
        bundle_id=bundle_id,
        facts={name: _find_fact(records.get(file), keys) for name, (file, keys) in _FACTS.items()},
        num_files=len(sizes_bytes),
        size_bytes=sum(sizes_bytes),
        trials=trials,
        nodes=tuple(sorted(nodes)),
    )


def _find_fact(value: Any, keys: Iterable[str]) -> str | None:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return printable(value[:_MAX_FACT]) if isinstance(value, str) and value else None


def _read_status(pieces: Iterable[Piece]) -> str:
    value = _load_own(pieces)
    if value is None:
        return "unreadable"
    status = value.get("status") if isinstance(value, dict) else None
    return status[:_MAX_FACT] if isinstance(status, str) else "not recorded"


def _load_own(pieces: Iterable[Piece], max_bytes: int = files.MAX_JSON_BYTES) -> Any:
    try:
        return parse_json("", read_own(pieces, max_bytes) or b"", max_bytes=max_bytes)
    except BundleUnreadable:
        return None
