"""Fetch the files of a repository, one by one, into a work folder.

A journal lists the files whose hash was checked, so that after a kill at most one file is fetched again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import CHUNK_BYTES, write_text
from rlk_repro.prepare.contents import FileRecord
from rlk_repro.prepare.making import Made, WorkDir
from rlk_repro.prepare.origins import Listing, Origin, RemoteFile, Repository, find_listing

_REVISION: Final = "revision"
_JOURNAL: Final = "verified.jsonl"
_INCOMING: Final = "incoming"
_ATTEMPTS: Final = 2


@dataclass(frozen=True, kw_only=True)
class Fetch:
    repository: Repository
    origins: Sequence[Origin]

    def find(self, work: WorkDir) -> tuple[Origin, Listing]:
        """If the run pins no commit, the commit of an earlier attempt is used again."""
        begun = work.path / _REVISION
        revision = begun.read_text() if begun.is_file() else self.repository.revision
        return find_listing(self.origins, dataclasses.replace(self.repository, revision=revision))

    def run(self, work: WorkDir, tell: Callable[[str], object]) -> Made:
        """Fetch all missing files; raise BundleUnreadable if a file's hash was wrong twice."""
        origin, listing = self.find(work)
        write_text(work.path / _REVISION, listing.revision)
        verified = _load_journal(work)
        shutil.rmtree(work.path / _INCOMING, ignore_errors=True)  # a killed attempt may leave an incomplete file
        for file in listing.files:
            if file.name not in verified:
                tell(f"{self.repository} {file.name}")
                verified[file.name] = self._fetch(work, origin, listing, file)
        source = {
            "repository": self.repository.name,
            "revision": listing.revision,
            "is_pinned": self.repository.revision is not None,
        }
        return Made(source=source, files={file.name: verified[file.name] for file in listing.files})

    def _fetch(self, work: WorkDir, origin: Origin, listing: Listing, file: RemoteFile) -> FileRecord:
        incoming = work.path / _INCOMING
        found = ""
        try:
            for _ in range(_ATTEMPTS):
                shutil.rmtree(incoming, ignore_errors=True)
                origin.fetch(self.repository, listing, file.name, incoming)
                sha256, found = _hash(incoming / file.name, file)
                if not found:
                    return _take(work, incoming / file.name, file.name, sha256)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        expected = ", ".join(filter(None, [f"{file.size_bytes} bytes", file.sha256 or file.git_sha1]))
        what = "differs from its expected size or hash, also when fetched again"
        raise BundleUnreadable(Problem(f"{self.repository} {file.name}", what, got=found, expected=expected))


def _hash(path: Path, file: RemoteFile) -> tuple[str, str]:
    """Return the file's sha256, and the size or hash that is wrong; the second text is empty for a correct file.

    Git's hash covers a header and the bytes: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
    """
    size_bytes = path.stat().st_size
    sha256 = hashlib.sha256()
    git_sha1 = hashlib.sha1(f"blob {size_bytes}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            sha256.update(piece)
            if file.git_sha1 is not None:
                git_sha1.update(piece)
    digest = sha256.hexdigest()
    if size_bytes != file.size_bytes:
        return digest, f"{size_bytes} bytes"
    if file.sha256 not in {None, digest}:
        return digest, digest
    if file.git_sha1 not in {None, git_sha1.hexdigest()}:
        return digest, git_sha1.hexdigest()
    return digest, ""


def _take(work: WorkDir, path: Path, name: str, sha256: str) -> FileRecord:
    """When this function returns, the file is in its place and in the journal, both on disk."""
    target = work.files / name
    target.parent.mkdir(parents=True, exist_ok=True)
    record = FileRecord.of(path, sha256)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    path.chmod(0o644)
    path.replace(target)
    with (work.path / _JOURNAL).open("a") as journal:
        journal.write(json.dumps({"name": name, **dataclasses.asdict(record)}) + "\n")
        journal.flush()
        os.fsync(journal.fileno())
    return record


def _load_journal(work: WorkDir) -> dict[str, FileRecord]:
    """A killed process may leave an incomplete line in the journal; such a line is ignored."""
    path = work.path / _JOURNAL
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            value = json.loads(line)
            record, file = FileRecord.from_json(value), work.files / value["name"]
        except (KeyError, TypeError, ValueError):
            continue
        if file.is_file() and file.stat().st_size == record.size_bytes:
            found[value["name"]] = record
    return found


def bytes_there(work: WorkDir) -> int:
    return sum(record.size_bytes for record in _load_journal(work).values())
