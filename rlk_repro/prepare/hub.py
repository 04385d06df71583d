"""Fetch a repository's files from a mirror or, with huggingface_hub, from the hub; each file's hash is checked."""

from __future__ import annotations

import dataclasses
import errno
import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal, TypeAlias

from rlk_repro.base.disk import OF_FILE_SYSTEMS
from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import CHUNK_BYTES, write_text
from rlk_repro.bundle.archive import find_unsafe
from rlk_repro.prepare.contents import FileRecord, load_contents
from rlk_repro.prepare.layout import name_repository
from rlk_repro.prepare.steps import Made, Tell, WorkDir

Kind: TypeAlias = Literal["model", "dataset"]

# Weights in other formats are not fetched.
MODEL_FILES: Final = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "LICENSE*")
_REVISION: Final = "revision"
_SHA256: Final = re.compile("[0-9a-f]{64}")
_SHA1: Final = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository that a run needs; without a revision, the newest commit is used."""

    kind: Kind
    name: str
    revision: str | None
    patterns: tuple[str, ...]

    def wants(self, name: str) -> bool:
        """Whether a run needs a file; wildcards match no file in a subfolder, because subfolders hold other formats."""
        is_at_top = "/" not in name
        return name in self.patterns or (is_at_top and any(fnmatchcase(name, pattern) for pattern in self.patterns))

    def __str__(self) -> str:
        return f"{self.name}@{self.revision[:12] if self.revision else 'unpinned'}"


@dataclass(frozen=True)
class RemoteFile:
    """One file with its expected hash: sha256 for a large file, git's hash for a small file."""

    name: str
    size_bytes: int
    expected_hash: str


@dataclass(frozen=True)
class Listing:
    """The needed files of one repository at one commit; in a mirror, ``place`` is the folder of the files."""

    revision: str
    files: tuple[RemoteFile, ...]
    place: Path | None = None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """Fetch one repository: from the mirror if it has the commit, otherwise from the hub."""

    repository: Repository
    mirror: Path | None
    is_offline: bool

    def find(self, work: WorkDir) -> Listing:
        """List the files to fetch; if the run pins no commit, the commit of an earlier attempt is used again.

        Raises:
            SpecError: the repository or its commit does not exist, or it lacks the files.
            EnvironmentMissing: neither mirror nor hub has the repository, or the hub cannot be reached.
        """
        begun = work.path / _REVISION
        revision = begun.read_text() if begun.is_file() else self.repository.revision
        repository = dataclasses.replace(self.repository, revision=revision)
        listing = None if self.mirror is None else _find_mirrored(self.mirror, repository)
        if listing is None:
            if self.is_offline:
                raise EnvironmentMissing(
                    Problem(str(repository), "is not in the mirror, and --offline forbids the hub",
                            expected="the repository in the mirror",
                            hint="prepare the run on a machine with a network, and copy the prepared directory")
                )  # fmt: skip
            listing = _ask_hub(repository)
        if not listing.files:
            expected = ", ".join(repository.patterns)
            raise SpecError(Problem(str(repository), "lacks the files that the run needs", expected=expected))
        for file in listing.files:
            reason = find_unsafe(file.name)
            if reason is not None:
                what = f"has an unsafe file name ({reason})"
                raise BundleUnreadable(Problem(str(repository), what, got=file.name))
        return listing

    def run(self, work: WorkDir, tell: Tell) -> Made:
        """Fetch all files; a repeated call continues with the same commit.

        Raises:
            BundleUnreadable: files differ from their expected size or hash; these are fetched again by the next call.
        """
        listing = self.find(work)
        write_text(work.path / _REVISION, listing.revision)
        tell(f"{self.repository}: fetching {len(listing.files)} files")
        if listing.place is None:
            _download(self.repository, listing, work.files)
        else:
            _copy(listing.place, listing.files, work.files)
        files, problems = {}, []
        for file in listing.files:
            path = work.files / file.name
            sha256, found = _hash(path, file)
            if found == file.expected_hash:
                path.chmod(0o644)
                files[file.name] = FileRecord.of(path, sha256)
                continue
            path.unlink(missing_ok=True)
            problems.append(
                Problem(f"{self.repository} {file.name}", "differs from its expected size or hash", got=found,
                        expected=f"{file.size_bytes} bytes, {file.expected_hash}",
                        hint="the same command fetches this file again")
            )  # fmt: skip
        if problems:
            raise BundleUnreadable(*problems)
        shutil.rmtree(work.files / ".cache", ignore_errors=True)  # huggingface_hub's notes for resumption
        is_pinned = self.repository.revision is not None
        source = {"repository": self.repository.name, "revision": listing.revision, "is_pinned": is_pinned}
        return Made(source=source, files=files)


def _find_mirrored(mirror: Path, repository: Repository) -> Listing | None:
    """Find the commit in a copy of a prepared directory, or in a cache of huggingface_hub."""
    if not mirror.is_dir():
        raise SpecError(Problem("--mirror", "no such folder", got=str(mirror), expected="a mirror directory"))
    parent = mirror / f"{repository.kind}s"
    unpinned = name_repository(repository.name, None)
    names = [name_repository(repository.name, repository.revision), unpinned]
    if repository.revision is None:
        names += sorted(path.name for path in parent.glob(f"{unpinned.removesuffix('unpinned')}*"))
    for folder in dict.fromkeys(parent / name for name in names):
        contents = load_contents(folder)
        revision = None if contents is None else str(contents.source.get("revision"))
        if contents is None or revision is None or repository.revision not in {None, revision}:
            continue
        items = contents.files.items()
        files = tuple(RemoteFile(name, item.size_bytes, item.sha256) for name, item in items if repository.wants(name))
        return Listing(revision, files, folder)
    return _find_cached(mirror, repository)


def _find_cached(mirror: Path, repository: Repository) -> Listing | None:
    """In huggingface_hub's cache, ``snapshots/<commit>`` holds links to ``blobs/<hash>``."""
    folder = mirror / f"{repository.kind}s--{repository.name.replace('/', '--')}"
    main = folder / "refs" / "main"
    revision = repository.revision or (main.read_text().strip() if main.is_file() else "")
    snapshot = folder / "snapshots" / revision
    if not _SHA1.fullmatch(revision) or not snapshot.is_dir():
        return None
    files = []
    for path in sorted(snapshot.rglob("*")):
        name, blob = path.relative_to(snapshot).as_posix(), path.resolve().name
        if not path.is_file() or not repository.wants(name):
            continue
        if not _SHA256.fullmatch(blob) and not _SHA1.fullmatch(blob):
            raise EnvironmentMissing(
                Problem(str(path), "is not a link to a blob, so its expected hash is unknown",
                        expected="a link to blobs/<hash>, as in the cache of huggingface_hub",
                        hint="copy the cache with its links, or give a prepared directory as --mirror")
            )  # fmt: skip
        files.append(RemoteFile(name, path.stat().st_size, blob))
    return Listing(revision, tuple(files), snapshot)


def _ask_hub(repository: Repository) -> Listing:
    with _explained(repository):
        from huggingface_hub import HfApi

        info = HfApi(endpoint=_endpoint(), library_name="rlk-repro").repo_info(
            repository.name, revision=repository.revision, repo_type=repository.kind, files_metadata=True
        )
    if info.sha is None or (repository.revision is not None and info.sha != repository.revision):
        raise SpecError(Problem(repository.name, "the hub serves another commit", got=info.sha,
                                expected=repository.revision))  # fmt: skip
    files = [
        RemoteFile(item.rfilename, item.size or 0, item.lfs.sha256 if item.lfs else str(item.blob_id))
        for item in getattr(info, "siblings", None) or ()
        if repository.wants(item.rfilename)
    ]
    return Listing(info.sha, tuple(files))


def _download(repository: Repository, listing: Listing, folder: Path) -> None:
    with _explained(repository):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # prepare shows the growth of the folder itself
        snapshot_download(
            repository.name,
            repo_type=repository.kind,
            revision=listing.revision,
            local_dir=folder,
            allow_patterns=[glob.escape(file.name) for file in listing.files],
            endpoint=_endpoint(),
            library_name="rlk-repro",
        )


def _copy(place: Path, files: Iterable[RemoteFile], folder: Path) -> None:
    for file in files:
        target = folder / file.name
        if target.is_file() and target.stat().st_size == file.size_bytes:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            stream = (place / file.name).open("rb")
        except OSError as error:
            what = f"cannot be read ({error.strerror})"
            raise EnvironmentMissing(Problem(f"mirror {place.name}: {file.name}", what)) from error
        with stream, target.open("wb") as copy:
            shutil.copyfileobj(stream, copy)


def _hash(path: Path, file: RemoteFile) -> tuple[str, str]:
    """Return the file's sha256, and the hash to compare with the expected one.

    Git's hash covers a header and the bytes: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
    """
    if not path.is_file():
        return "", "no file"
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        return "", f"{size_bytes} bytes"
    sha256 = hashlib.sha256()
    git_sha1 = hashlib.sha1(f"blob {size_bytes}\0".encode(), usedforsecurity=False)
    is_git = _SHA1.fullmatch(file.expected_hash) is not None
    with path.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            sha256.update(piece)
            if is_git:
                git_sha1.update(piece)
    digest = sha256.hexdigest()
    return digest, git_sha1.hexdigest() if is_git else digest


def _endpoint() -> str | None:
    # huggingface_hub itself reads this variable only once, at its import.
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _explained(repository: Repository) -> Iterator[None]:
    """Turn the errors of huggingface_hub into errors that name the next step."""
    try:
        from huggingface_hub import errors
    except ImportError:
        raise EnvironmentMissing(
            Problem("python module huggingface_hub", "missing", expected="the hub's client, or --mirror DIR --offline",
                    hint="python -m pip install 'rlk-repro[prepare]'")
        ) from None  # fmt: skip
    where = f"hub {repository.name}"
    network_errors: tuple[type[BaseException], ...] = (OSError, *errors.HfHubHTTPError.__bases__)
    try:
        yield
    except errors.RevisionNotFoundError:
        raise SpecError(Problem(where, "has no such commit", got=repository.revision)) from None
    except errors.RepositoryNotFoundError as error:
        is_gated = isinstance(error, errors.GatedRepoError)
        what = "cannot be fetched" if is_gated else "the repository does not exist, or you have no access"
        hint = "export HF_TOKEN=… if the repository is private or asks for consent"
        raise SpecError(Problem(where, what, hint=hint)) from None
    except errors.OfflineModeIsEnabled:
        hint = "unset HF_HUB_OFFLINE, or add --mirror DIR --offline"
        raise EnvironmentMissing(Problem(where, "is not asked, because HF_HUB_OFFLINE is set", hint=hint)) from None
    except network_errors as error:
        if isinstance(error, OSError) and error.errno in {*OF_FILE_SYSTEMS, errno.EACCES}:
            raise  # the error comes from this machine's disk, not from the network
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        hint = "try again: files that were fetched are kept"
        raise EnvironmentMissing(Problem(where, f"cannot be reached ({reason})", hint=hint)) from None
