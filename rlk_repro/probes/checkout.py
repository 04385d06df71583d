"""What git says about a folder: its commit, and whether the files are those of the commit.  Reads only; runs no hook.

An unpacked archive has no commit; its files have git's hash all the same.

Reasons name no path: a manifest goes into bundles, and paths carry user names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from rlk_repro import proc
from rlk_repro.errors import EnvironmentMissing
from rlk_repro.files import sha256_bytes
from rlk_repro.manifest import Fact, Unknown
from rlk_repro.trees import GENERATED, hash_listed, hash_tree

TIMEOUT_S: Final = 20.0
# Our own checkouts are often mounted into containers under another owner; no configured program may run.
GIT: Final = (
    *("git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.quotePath=true"),
    *("-c", "diff.autoRefreshIndex=false"),  # comparing would write the times of files into the index
)
DIFF: Final = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--full-index", "--no-renames")
UNTRACKED: Final = ("ls-files", "--others", "--exclude-standard", "--full-name", "-z", ":/")
LISTED: Final = ("ls-files", "--cached", *UNTRACKED[1:])
PROJECT_FILES: Final = ("pyproject.toml", "setup.py")
"""One of them lies beside the package in a source tree, and in no folder that packages are installed into."""


def probe_checkout(folder: Path) -> dict[str, Fact]:
    """``commit``, ``is_dirty``, ``diff_sha256`` over ``git diff HEAD`` and the names of untracked files, and ``tree``,
    git's hash of the files that it does not ignore.

    ``HEAD:./`` fails for a folder that merely lies inside some repository (site-packages in a checkout's .venv).
    """
    answer = _git(folder, "rev-parse", "HEAD", "HEAD^{tree}", "HEAD:./")
    if isinstance(answer, Unknown):
        return unknown_checkout(answer.reason)
    diff, untracked = _git(folder, *DIFF), _git(folder, *UNTRACKED)
    commit, tree, _ = answer.split()
    if isinstance(diff, Unknown) or isinstance(untracked, Unknown):
        reason = Unknown("git answered neither diff nor ls-files")
        return {"commit": commit, "is_dirty": reason, "diff_sha256": reason, "tree": reason}
    if not diff and not untracked:
        return {"commit": commit, "is_dirty": False, "diff_sha256": "clean", "tree": tree}
    digest = sha256_bytes(f"{diff}\0{untracked}".encode(errors="replace"))
    return {"commit": commit, "is_dirty": True, "diff_sha256": digest, "tree": _hash_changed(folder)}


def probe_archive(folder: Path) -> Fact:
    """``tree`` of sources that git does not know: what building leaves in them does not count."""
    if not any((folder / name).is_file() for name in PROJECT_FILES):
        return Unknown("its folder holds no source tree")
    try:
        return hash_tree(folder, GENERATED)
    except OSError as error:
        return Unknown(f"its files cannot be read ({error.strerror})")


def unknown_checkout(reason: str) -> dict[str, Fact]:
    return {name: Unknown(reason) for name in ("commit", "is_dirty", "diff_sha256", "tree")}


def _hash_changed(folder: Path) -> Fact:
    top, names = _git(folder, "rev-parse", "--show-toplevel"), _git(folder, *LISTED)
    if isinstance(top, Unknown) or isinstance(names, Unknown):
        return Unknown("git answered neither rev-parse nor ls-files")
    try:
        return hash_listed(Path(top.rstrip("\n")), filter(None, names.split("\0")))
    except OSError as error:
        return Unknown(f"its files cannot be read ({error.strerror})")


def _git(folder: Path, *arguments: str) -> str | Unknown:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = proc.run(
            [*GIT, *arguments],
            cwd=folder,
            env=inherited | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            timeout_s=TIMEOUT_S,
        )
    except EnvironmentMissing:
        return Unknown("git is not on PATH" if folder.is_dir() else "its folder is absent")
    if done.is_timeout:
        return Unknown(f"git did not answer in {TIMEOUT_S:g} s")
    return done.stdout if done.is_ok else Unknown("its folder is not a git checkout")
