"""Find a repository in a mirror directory or on the hub, and list and copy the repository's files."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

from rlk_repro.base.disk import OF_FILE_SYSTEMS, OF_WRITING, Unwritable
from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem, SpecError
from rlk_repro.bundle.archive import find_unsafe
from rlk_repro.prepare.contents import load_contents
from rlk_repro.prepare.downloads import Bounds, guarded
from rlk_repro.prepare.layout import name_repository

Kind: TypeAlias = Literal["model", "dataset"]

# Weights in other formats are not fetched.
MODEL_FILES: Final = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "LICENSE*")
_SHA256: Final = re.compile("[0-9a-f]{64}")
_SHA1: Final = re.compile("[0-9a-f]{40}")
# a list of ten thousand files is 4 MB long
MAX_LISTING_BYTES: Final = 64 << 20
_FOLDERS: Final = {"model": "models", "dataset": "datasets"}


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


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file with its expected hash: sha256 for a large file, git's hash for a small file."""

    name: str
    size_bytes: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The needed files of one repository at one commit; in a mirror, ``place`` is the folder of the files."""

    revision: str
    files: tuple[RemoteFile, ...]
    place: Path | None = None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Origin(Protocol):
    def find(self, repository: Repository) -> Listing | None:
        """List the needed files at the needed commit; return None if the origin does not have this commit."""

    def fetch(self, repository: Repository, listing: Listing, name: str, folder: Path) -> None:
        """Copy the file ``name`` of the listing into ``folder``, which only this process uses."""


@dataclass(frozen=True)
class Mirror:
    """A local copy of a prepared directory, or of the cache of huggingface_hub."""

    root: Path

    def find(self, repository: Repository) -> Listing | None:
        found = self._find_prepared(repository)
        return self._find_cached(repository) if found is None else found

    def fetch(self, repository: Repository, listing: Listing, name: str, folder: Path) -> None:
        assert listing.place is not None
        source, target = listing.place / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            if error.errno in OF_WRITING:
                raise Unwritable.at(target, error) from error
            what = f"cannot be copied ({error.strerror})"
            raise EnvironmentMissing(Problem(f"mirror {repository.name}: {name}", what)) from error

    def _find_prepared(self, repository: Repository) -> Listing | None:
        """Find the folder of this commit, even if the run that prepared the folder pinned no commit."""
        parent = self.root / _FOLDERS[repository.kind]
        wanted = [name_repository(repository.name, commit) for commit in (repository.revision, None)]
        if repository.revision is None:
            wanted += sorted(path.name for path in parent.glob(f"{name_repository(repository.name, None)[:-8]}*"))
        for folder in dict.fromkeys(parent / name for name in wanted):
            contents = load_contents(folder)
            revision = "" if contents is None else str(contents.source.get("revision"))
            if contents is not None and repository.revision in {None, revision}:
                files = [
                    RemoteFile(name=name, size_bytes=item.size_bytes, sha256=item.sha256)
                    for name, item in contents.files.items()
                    if repository.wants(name)
                ]
                return _listing(f"mirror {folder.name}", revision, files, folder)
        return None

    def _find_cached(self, repository: Repository) -> Listing | None:
        """In huggingface_hub's cache, ``snapshots/<commit>`` holds links to ``blobs/<hash>``."""
        folder = self.root / f"{_FOLDERS[repository.kind]}--{repository.name.replace('/', '--')}"
        main = folder / "refs" / "main"
        revision = repository.revision or (main.read_text().strip() if main.is_file() else "")
        snapshot = folder / "snapshots" / revision
        if not _SHA1.fullmatch(revision) or not snapshot.is_dir():
            return None
        names = (path.relative_to(snapshot).as_posix() for path in sorted(snapshot.rglob("*")) if path.is_file())
        files = [_from_cache(snapshot / name, name) for name in names if repository.wants(name)]
        return _listing(f"mirror {folder.name}", revision, files, snapshot)


def _from_cache(path: Path, name: str) -> RemoteFile:
    """A linked blob is named by its sha256 (large file) or by git's hash (small file)."""
    blob = path.resolve().name
    is_large = _SHA256.fullmatch(blob) is not None
    if not is_large and not _SHA1.fullmatch(blob):
        raise EnvironmentMissing(
            Problem(str(path), "is not a link to a blob, so its expected hash is unknown",
                    expected="a link to blobs/<hash>, as in the cache of huggingface_hub",
                    hint="copy the cache with its links, or give a prepared directory as --mirror")
        )  # fmt: skip
    return RemoteFile(name=name, size_bytes=path.stat().st_size, sha256=blob if is_large else None,
                      git_sha1=None if is_large else blob)  # fmt: skip


def _listing(where: str, revision: str, files: Iterable[RemoteFile], place: Path | None = None) -> Listing:
    # A file name must not lead out of the folder: the mirror and the hub are not trusted.
    found = tuple(files)
    for file in found:
        reason = find_unsafe(file.name)
        if reason is not None:
            raise BundleUnreadable(Problem(where, f"has an unsafe file name ({reason})", got=file.name))
    return Listing(revision=revision, files=found, place=place)


class Hub:
    def find(self, repository: Repository) -> Listing | None:
        with _explained(repository), _guarded(f"the file list of {repository.name}", MAX_LISTING_BYTES):
            from huggingface_hub import HfApi

            info = HfApi(endpoint=_endpoint(), library_name="rlk-repro").repo_info(
                repository.name, revision=repository.revision, repo_type=repository.kind, files_metadata=True
            )
        files = [
            RemoteFile(
                name=item.rfilename,
                size_bytes=item.size or 0,
                sha256=item.lfs.sha256 if item.lfs else None,
                git_sha1=None if item.lfs else item.blob_id,
            )
            for item in getattr(info, "siblings", None) or ()
            if repository.wants(item.rfilename)
        ]
        if info.sha is None or (repository.revision is not None and info.sha != repository.revision):
            raise SpecError(Problem(repository.name, "the hub serves another commit", got=info.sha,
                                    expected=repository.revision))  # fmt: skip
        return _listing(f"hub {repository.name}", info.sha, files)

    def fetch(self, repository: Repository, listing: Listing, name: str, folder: Path) -> None:
        size_bytes = next(file.size_bytes for file in listing.files if file.name == name)
        with _explained(repository), _guarded(f"{repository} {name}", size_bytes):
            from huggingface_hub import hf_hub_download

            hf_hub_download(
                repository.name,
                name,
                repo_type=repository.kind,
                revision=listing.revision,
                local_dir=folder,
                endpoint=_endpoint(),
                library_name="rlk-repro",
            )


def _endpoint() -> str | None:
    # huggingface_hub itself reads this variable only once, at its import.
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _guarded(what: str, limit: int) -> Iterator[None]:
    from huggingface_hub import constants, get_session

    with guarded(get_session(), Bounds(asked=_endpoint() or constants.ENDPOINT, what=what, limit=limit)):
        yield


@contextmanager
def _explained(repository: Repository) -> Iterator[None]:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # the limits on downloads need hooks, and huggingface_hub's second protocol, xet, has no hooks
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    try:
        from huggingface_hub.errors import (
            HfHubHTTPError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise EnvironmentMissing(
            Problem("python module huggingface_hub", "missing", expected="the hub's client, or --mirror DIR --offline",
                    hint="python -m pip install 'rlk-repro[prepare]'")
        ) from None  # fmt: skip
    connection_errors: tuple[type[BaseException], ...] = (OSError, *HfHubHTTPError.__bases__)
    where = f"hub {repository.name}"
    try:
        yield
    except RevisionNotFoundError:
        raise SpecError(Problem(where, "has no such commit", got=repository.revision)) from None
    except RepositoryNotFoundError as error:
        hint = "export HF_TOKEN=… if the repository is private or asks for consent"
        what = (
            "cannot be fetched"
            if "gated" in type(error).__name__.lower()
            else "the repository does not exist, or you have no access"
        )
        raise SpecError(Problem(where, what, hint=hint)) from None
    except OfflineModeIsEnabled:
        raise EnvironmentMissing(
            Problem(
                where,
                "is not asked, because HF_HUB_OFFLINE is set",
                hint="unset HF_HUB_OFFLINE, or add --mirror DIR --offline",
            )
        ) from None
    except connection_errors as error:
        if isinstance(error, OSError) and error.errno in {*OF_FILE_SYSTEMS, errno.EACCES}:
            raise  # the error comes from this machine's disk, not from the network
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise EnvironmentMissing(
            Problem(where, f"cannot be reached ({reason})", hint="try again: files that were fetched are kept")
        ) from None


def list_origins(mirror: Path | None, *, is_offline: bool) -> list[Origin]:
    """Return the mirror (if given) and the hub (unless offline); raise SpecError if the mirror is not a folder."""
    if mirror is not None and not mirror.is_dir():
        raise SpecError(Problem("--mirror", "no such folder", got=str(mirror), expected="a mirror directory"))
    origins: list[Origin] = [] if mirror is None else [Mirror(mirror)]
    return origins if is_offline else [*origins, Hub()]


def find_listing(origins: Sequence[Origin], repository: Repository) -> tuple[Origin, Listing]:
    """Return the first origin that has the repository, and the list of the repository's files.

    Raises:
        EnvironmentMissing: no origin has the repository, or the hub cannot be reached.
    """
    for origin in origins:
        listing = origin.find(repository)
        if listing is not None:
            if not listing.files:
                expected = ", ".join(repository.patterns)
                raise SpecError(Problem(str(repository), "lacks the files that the run needs", expected=expected))
            return origin, listing
    raise EnvironmentMissing(
        Problem(str(repository), "is not in the mirror, and --offline forbids the hub",
                expected="the repository in the mirror",
                hint="prepare the run on a machine with a network, and copy the prepared directory")
    )  # fmt: skip
