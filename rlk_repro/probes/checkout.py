"""Find the commit of a git checkout, and whether the checkout's files are those of the commit.

A checkout's configuration, attributes and hooks can start programs, so git runs only in an empty repository that uses
the checkout's objects.  The reason for an unknown fact contains no path, because a path can hold a user name.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, ParamSpec

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.trees import GENERATED, hash_listed, hash_tree
from rlk_repro.rundir.manifest import Fact, Unknown

P = ParamSpec("P")

TIMEOUT_S: Final = 20.0
# The user's git settings may start a file system monitor, which would then watch this short-lived repository.
_GIT: Final = ("git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false")
_LITERAL: Final = ("--literal-pathspecs",)
PROJECT_FILES: Final = ("pyproject.toml", "setup.py")
"""A source tree has one of these files beside the package; an installed package has no such file beside it."""
NOT_A_CHECKOUT: Final = Unknown("its folder is not a git checkout")
_GITLINK: Final = "160000"
_NO_COMMIT: Final = "0" * 40
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_REFERENCE: Final = re.compile(r"ref: (refs/[^\0\n]+)")
_MOST_REFERENCES: Final = 5  # HEAD and at most 4 references, each named by the one before; the last holds the commit
_HEAD_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A git checkout.  ``names`` are the commit's files and ``untracked`` files, which git does not ignore.

    ``common`` is the folder that holds objects and branches.

    ``links`` maps the name of each repository inside the checkout to that repository's commit, or to the hash of its
    files if they were changed.
    """

    top: Path
    common: Path
    commit: str
    tree: str
    names: frozenset[str]
    untracked: frozenset[str]
    links: Mapping[str, str]


def probe_checkout(folder: Path) -> dict[str, Fact]:
    """Return the facts ``commit``, ``is_dirty``, ``tree`` and ``diff_sha256`` of a git checkout.

    ``tree`` is git's hash of the files as they are now, without those that git ignores.  ``diff_sha256`` is ``clean``
    if the commit's tree has the same hash; otherwise it is the sha256 of a text with both hashes.
    """
    found = read_checkout(folder)
    if isinstance(found, Unknown):
        return unknown_checkout(found.reason)
    tree = hash_files(hash_listed, found.top, found.names, found.links)
    if isinstance(tree, Unknown):
        return {"commit": found.commit, "is_dirty": tree, "diff_sha256": tree, "tree": tree}
    facts: dict[str, Fact] = {"commit": found.commit, "is_dirty": False, "diff_sha256": "clean", "tree": tree}
    if tree != found.tree:
        facts |= {"is_dirty": True, "diff_sha256": sha256_bytes(f"{found.tree} {tree}".encode())}
    return facts


def probe_archive(folder: Path) -> Fact:
    """Return git's hash of sources that have no repository; the hash leaves out files that a build makes."""
    if not any((folder / name).is_file() for name in PROJECT_FILES):
        return NOT_A_CHECKOUT
    return hash_files(hash_tree, folder, GENERATED)


def hash_files(hash_function: Callable[P, str], *places: P.args, **options: P.kwargs) -> str | Unknown:
    try:
        return hash_function(*places, **options)
    except OSError as error:
        return Unknown(f"its files cannot be read ({error.strerror})")


def unknown_checkout(reason: str) -> dict[str, Fact]:
    return {name: Unknown(reason) for name in ("commit", "is_dirty", "diff_sha256", "tree")}


def read_checkout(folder: Path) -> Checkout | Unknown:
    """Read the checkout that a folder belongs to; a folder that git ignores, such as .venv, belongs to no checkout."""
    if not folder.is_dir():
        return Unknown("its folder is absent")
    try:
        return _read_checkout(folder.resolve())
    except OSError:
        return NOT_A_CHECKOUT


def _read_checkout(folder: Path) -> Checkout | Unknown:
    found = _find_repository(folder)
    commit = None if found is None else _read_head(*found[1:])
    if found is None or commit is None:
        return NOT_A_CHECKOUT
    top, _, common = found
    answer = _ask_git(top, common, commit)
    if isinstance(answer, Unknown):
        return answer
    tree, listed, others = answer
    entries = dict(_split_entries(listed))
    place = folder.relative_to(top).as_posix()
    if place != "." and not any(name.startswith(f"{place}/") for name in entries):
        return NOT_A_CHECKOUT
    recorded = {name: digest for name, (mode, digest) in entries.items() if mode == _GITLINK}
    nested = {name.rstrip("/"): "" for name in others if name.endswith("/")}
    links = {name: _read_link(top / name, digest) for name, digest in (nested | recorded).items()}
    names = {*entries, *others} - links.keys() - {f"{name}/" for name in links}
    return Checkout(
        top=top,
        common=common,
        commit=commit,
        tree=tree,
        names=frozenset(names),
        untracked=frozenset(names - entries.keys()),
        links=links,
    )


def _find_repository(folder: Path) -> tuple[Path, Path, Path] | None:
    """Return the folder of the sources, the folder that holds HEAD, and the folder that holds objects and branches."""
    for top in (folder, *folder.parents):
        own = top / ".git"
        if own.is_file():  # in a worktree or a submodule, the file .git names the folder
            own = top / own.read_text(errors="replace")[:_HEAD_BYTES].removeprefix("gitdir:").strip()
        if (own / "HEAD").is_file():
            shared = own / "commondir"
            return top, own, own / shared.read_text(errors="replace").strip() if shared.is_file() else own
    return None


def _read_head(own: Path, common: Path) -> str | None:
    text = _read_start(own / "HEAD")
    for _ in range(_MOST_REFERENCES):
        if _COMMIT.fullmatch(text):
            return text
        match = _REFERENCE.fullmatch(text)
        if match is None or ".." in Path(match[1]).parts:
            return None
        loose = common / match[1]
        text = _read_start(loose) if loose.is_file() else _find_packed(common / "packed-refs", match[1])
    return None


def _read_start(path: Path) -> str:
    with path.open("rb") as stream:
        return stream.read(_HEAD_BYTES).decode(errors="replace").strip()


def _find_packed(path: Path, reference: str) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return next((line[:40] for line in lines if line[40:] == f" {reference}"), "")


def _ask_git(top: Path, common: Path, commit: str) -> tuple[str, list[str], list[str]] | Unknown:
    """Ask git for the commit's tree, the commit's entries, and the other files that git does not ignore."""
    with _borrow_objects(top, common, commit) as places:
        exclude = common / "info" / "exclude"
        excludes = ["--exclude-standard"]
        if exclude.is_file():
            excludes.append(f"--exclude-from={exclude}")
        answers = []
        for words in (
            ("rev-parse", "--verify", "--end-of-options", f"{commit}^{{tree}}"),
            ("ls-tree", "-r", "-z", "--full-tree", commit),
            ("ls-files", "--others", "-z", *excludes),
        ):
            answer = _git(top, places, *words)
            if isinstance(answer, Unknown):
                return answer
            answers.append([os.fsdecode(item) for item in answer.split(b"\0") if item])
    return answers[0][0].splitlines()[-1], answers[1], answers[2]


@contextmanager
def _borrow_objects(top: Path, common: Path, commit: str) -> Iterator[dict[str, str]]:
    """Make an empty repository that uses the checkout's objects; yield environment variables that make git use it."""
    with tempfile.TemporaryDirectory(prefix="rlk-repro-git-") as folder:
        own = Path(folder)
        for name in ("objects", "refs"):
            (own / name).mkdir()
        (own / "HEAD").write_text(f"{commit}\n")
        yield {
            "GIT_DIR": str(own),
            "GIT_WORK_TREE": str(top),
            "GIT_OBJECT_DIRECTORY": str(own / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(common / "objects"),
        }


def make_patch(folder: Path, names: Sequence[str]) -> tuple[bytes, list[str]] | Unknown:
    """Return a patch from the commit to the present state of its files in ``names`` (files and folders).

    Files that the commit lacks may be private, so they are only named, in the second part of the result.
    """
    found = read_checkout(folder)
    if isinstance(found, Unknown):
        return found
    folders = tuple(f"{item}/" for item in names)
    untracked = sorted(name for name in found.untracked if name.startswith(folders))
    with _borrow_objects(found.top, found.common, found.commit) as places:
        # With these variables git ignores the user's own configuration, which can set filters and text conversions.
        places |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        answer = _git(found.top, places, *_LITERAL, "read-tree", found.commit)
        if isinstance(answer, Unknown):
            return answer
        diff = ("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", found.commit)
        patch = _git(found.top, places, *_LITERAL, *diff, "--", *names)
        return patch if isinstance(patch, Unknown) else (patch, untracked)


def _split_entries(listed: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Split lines ``<mode> <type> <hash>\\t<name>``; yield each name with its mode and hash."""
    for line in listed:
        facts, _, name = line.partition("\t")
        mode, _, digest = facts.split()
        yield name, (mode, digest)


def _read_link(folder: Path, recorded: str) -> str:
    """An empty folder is a submodule that is not checked out: its commit is ``recorded``, from the outer repository."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return recorded
    facts = probe_checkout(folder) if (folder / ".git").exists() else {}
    found = facts.get("commit" if facts.get("is_dirty") is False else "tree")
    return found if isinstance(found, str) else _NO_COMMIT


def _git(top: Path, places: Mapping[str, str], *arguments: str, stdin: bytes = b"") -> bytes | Unknown:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = proc.run(
            [*_GIT, *arguments],
            cwd=top,
            env={**env, **places, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            timeout_s=TIMEOUT_S,
            stdin=stdin,
            is_binary=True,
        )
    except EnvironmentMissing:
        return Unknown("git is not on PATH")
    if done.is_timeout:
        return Unknown(f"git did not answer in {TIMEOUT_S:g} s")
    return done.data if done.is_ok else NOT_A_CHECKOUT
