"""Copy RL-Kernel's sources into a new folder: fetched, or from a checkout or an unpacked archive of the user.

The user's folder is only read.  git's hash of the files identifies the sources, so that an archive, which
names no commit, can also be compared with a pin.  A file is repaired only in the copy for the build, and only
the exact file that a repair is for.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base import git
from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.trees import REPOSITORY, hash_tree
from rlk_repro.probes.checkout import probe_checkout, read_checkout
from rlk_repro.probes.installed import AppliedRepair
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
    return copy(pin, origin, folder)


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


def copy(pin: Pin | None, origin: Path, folder: Path) -> Sources:
    """Copy an archive's files, or those of a checkout that git tracks or does not ignore, so no old build is copied.

    An archive names no commit, but its files prove the pin's commit if their hash is that of the pin's tree.
    """
    checkout = read_checkout(origin) if (origin / ".git").exists() else None
    if isinstance(checkout, Unknown):
        raise EnvironmentMissing(Problem(str(origin), f"cannot be copied ({checkout.reason})"))
    if checkout is None:
        shutil.copytree(origin, folder, symlinks=True, ignore=shutil.ignore_patterns(*REPOSITORY))
        tree = hash_tree(folder)
        commit = pin.commit if pin is not None and tree == pin.tree else None
        is_dirty = False
    else:
        _copy(origin, folder, sorted(checkout.names))
        tree = hash_tree(folder)
        commit = checkout.commit
        is_dirty = tree != checkout.tree
    if pin is not None and (commit != pin.commit or is_dirty):
        found = f"{commit or 'no commit'}{' with changed files' if is_dirty else ''}, tree {tree}"
        hint = (
            "check out that commit or unpack its archive; without a pin these sources can be measured: RLK_STACK=host"
        )
        expected = f"{pin.commit} unchanged, tree {pin.tree}"
        raise SpecError(Problem(str(origin), "is not what the stack pins", got=found, expected=expected, hint=hint))
    return Sources(
        folder=folder,
        repository=pin.repository if pin else None,
        commit=commit,
        tree=tree,
        is_dirty=is_dirty,
        diff_sha256=str(probe_checkout(origin)["diff_sha256"]) if is_dirty else "clean",
    )


def _copy(origin: Path, folder: Path, names: Iterable[str]) -> None:
    for name in names:
        source, target = origin / name, folder / name
        if source.is_symlink() or source.is_file():  # git also lists deleted files, and a submodule is a folder
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _require(what: str, got: str, expected: str) -> None:
    if got != expected:
        raise SpecError(Problem(what, "is another one", got=got, expected=expected))


def _git(folder: Path, *arguments: str) -> str:
    return git.require(f"git {arguments[0]}", git.ask_git(folder, *arguments, timeout_s=60.0)).rstrip("\n")


# CUDA 13 brings CCCL 3, which no longer has cub::Max and cub::Sum; these are their replacements
_CUB: Final = "#include <cub/cub.cuh>\n"
_CCCL3: Final = {
    _CUB: f"{_CUB}#include <cuda/functional>\n#include <cuda/std/functional>\n",
    "cub::Max()": "cuda::maximum<>{}",
    "cub::Sum()": "cuda::std::plus<>{}",
}
REPAIRS: Final = (
    AppliedRepair(
        name="cccl3-functionals",
        file="csrc/cuda/fused_logp_sm90.cu",
        before_sha256="c2aa72ce91173d4ee47d2c289cc19f9929d68adb4bc2385cff3f10c27756f27e",
        after_sha256="34eb015e74b22b75e4967905b1e32560920fcdc04527eeef4cf50fbf4e785b21",
    ),
    AppliedRepair(
        name="cccl3-batch-invariant",
        file="csrc/cuda/batch_invariant_logp_kernel_sm90.cu",
        before_sha256="d5384205caa56b0ca14d9e464b188b3f0e38ddb9b9e13291fb41f2531f305633",
        after_sha256="9abb9b7893043770add2d270b8830e594729cbe1b7ea61aaa33357fc64c60841",
    ),
)


def apply_repairs(toolkit: str | None, folder: Path) -> tuple[AppliedRepair, ...]:
    """Apply the repairs that Hopper's kernels need with this CUDA release.

    A commit of RL-Kernel may lack a file, or may have replaced the functions itself.
    """
    if int((toolkit or "0").split(".")[0]) < 13:
        return ()
    applied = []
    for repair in REPAIRS:
        path = folder / repair.file
        text = path.read_text() if path.is_file() else ""
        if "cub::Max()" in text or "cub::Sum()" in text:
            apply_repair(repair, path)
            applied.append(repair)
    return tuple(applied)


def apply_repair(repair: AppliedRepair, path: Path) -> None:
    """Change one file in a copy of RL-Kernel's sources.

    Raises:
        SpecError: the file is not the one for which the repair was written.
    """
    found = sha256_bytes(path.read_bytes())
    if found != repair.before_sha256:
        where = f"repair {repair.name}: {repair.file}"
        raise SpecError(Problem(where, "differs from the file of the repair", got=found, expected=repair.before_sha256))
    text = path.read_text()
    for old, new in _CCCL3.items():
        text = text.replace(old, new)
    data = text.encode()
    assert sha256_bytes(data) == repair.after_sha256, "the repaired file differs from the expected one"
    path.write_bytes(data)
