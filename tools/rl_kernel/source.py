"""Copy RL-Kernel's sources into a new folder: fetched, or from a checkout or an unpacked archive of the user.

The user's folder is only read.  git's hash of the files identifies the sources, so that an archive, which names no
commit, can also be compared with a pin.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base import git
from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.trees import REPOSITORY, hash_tree
from rlk_repro.probes.checkout import probe_checkout, read_checkout
from rlk_repro.rundir.manifest import Unknown
from rlk_repro.spec import Pin

FETCH_TIMEOUT_S: Final = 600.0
OFFLINE: Final = "copy the sources here and name them by RLK_SRC=/path/to/RL-Kernel"
# What git prints, and what it means; checked in this order.
FETCH_TROUBLE: Final = (
    ("not our ref", "the repository has no such commit: is the pin right?"),
    ("could not read Username", "git was asked for a password: is the repository's address right?"),
    ("Repository not found", "is the repository's address right?"),
)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources in the build folder; ``tree`` is their hash, ``commit`` is None where nothing proves a commit."""

    folder: Path
    repository: str | None
    commit: str | None
    tree: str
    is_dirty: bool = False
    diff_sha256: str = "clean"


def get_sources(pin: Pin | None, origin: Path | None, folder: Path) -> Sources:
    """Put the sources into the new ``folder`` and compare them with the pin.

    Raises:
        SpecError: pin and path are both missing, or the path's files differ from the pin.
        EnvironmentMissing: git is absent, or the repository cannot be reached.
    """
    if origin is None:
        if pin is None:
            raise SpecError(Problem("stack", "pins no rl_kernel", hint="name sources: RLK_SRC=/path/to/RL-Kernel"))
        return fetch(pin, folder)
    if not (origin / "pyproject.toml").is_file() or not (origin / "rl_engine").is_dir():
        raise SpecError(Problem(str(origin), "is no RL-Kernel", expected="a folder with pyproject.toml and rl_engine"))
    is_checkout = (origin / ".git").exists()
    return copy_checkout(pin, origin, folder) if is_checkout else copy_archive(pin, origin, folder)


def fetch(pin: Pin, folder: Path, offline: str = OFFLINE) -> Sources:
    """Fetch one commit, without its history and without credentials; ``offline`` is the hint if the network fails."""
    folder.mkdir(parents=True)
    _git(folder, "init", "--quiet")
    done = git.fetch(folder, pin.repository, pin.commit, timeout_s=FETCH_TIMEOUT_S)
    if not done.is_ok:
        words = git.explain(done)
        found = (hint for needle, hint in FETCH_TROUBLE if needle in done.stderr)
        hint = next(found, f"without a network: {offline}")
        raise EnvironmentMissing(
            Problem(f"{pin.repository} at {pin.commit[:12]}", f"cannot be fetched ({words})", hint=hint)
        )
    _git(folder, "checkout", "--quiet", "FETCH_HEAD")
    commit, tree = _git(folder, "rev-parse", "HEAD", "HEAD^{tree}").split()
    _require("fetched commit", commit, pin.commit)
    _require("fetched files", hash_tree(folder), tree)
    _require(f"tree of {commit[:12]}", tree, pin.tree or tree)
    return Sources(folder=folder, repository=pin.repository, commit=commit, tree=tree)


def copy_checkout(pin: Pin | None, origin: Path, folder: Path) -> Sources:
    """Copy the files of a checkout that git tracks or does not ignore, so that an old build in it is not copied."""
    found = read_checkout(origin)
    if isinstance(found, Unknown):
        raise EnvironmentMissing(Problem(str(origin), f"cannot be copied ({found.reason})"))
    commit, committed = found.commit, found.tree
    _copy(origin, folder, sorted(found.names))
    tree = hash_tree(folder)
    if pin is not None and commit != pin.commit:
        raise _other_sources(origin, f"commit {commit}", f"{pin.commit}, as the stack pins", "git checkout that commit")
    if pin is not None and tree != committed:
        raise _other_sources(origin, "changed files", f"{pin.commit} unchanged", "git stash them")
    diff = probe_checkout(origin)["diff_sha256"]
    return Sources(
        folder=folder,
        repository=pin.repository if pin else None,
        commit=commit,
        tree=tree,
        is_dirty=tree != committed,
        diff_sha256="clean" if tree == committed else str(diff),
    )


def copy_archive(pin: Pin | None, origin: Path, folder: Path) -> Sources:
    """Copy an unpacked archive.

    An archive names no commit, but its files prove the pin's commit if their hash is the hash of the pin's tree.
    """
    shutil.copytree(origin, folder, symlinks=True, ignore=shutil.ignore_patterns(*REPOSITORY))
    tree = hash_tree(folder)
    if pin is not None and tree != pin.tree:
        expected = (
            f"{pin.tree}, the files of {pin.commit[:12]}"
            if pin.tree
            else "a git checkout: the pin has no hash of files"
        )
        raise _other_sources(origin, f"an archive of tree {tree}", expected, "unpack a fresh one")
    return Sources(
        folder=folder,
        repository=pin.repository if pin else None,
        commit=pin.commit if pin else None,
        tree=tree,
    )


def _copy(origin: Path, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        source, target = origin / name, folder / name
        if source.is_symlink() or source.is_file():  # git also lists deleted files, and a submodule is a folder
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _other_sources(origin: Path, got: str, expected: str, remedy: str) -> SpecError:
    hint = f"{remedy}, or measure these sources without a pin: RLK_STACK=host"
    return SpecError(Problem(str(origin), f"is {got}", expected=expected, hint=hint))


def _require(what: str, got: str, expected: str) -> None:
    if got != expected:
        raise SpecError(Problem(what, "is another one", got=got, expected=expected))


def _git(folder: Path, *arguments: str) -> str:
    return git.require(f"git {arguments[0]}", git.ask_git(folder, *arguments, timeout_s=60.0)).rstrip("\n")
