"""What git says about a folder: its commit, and whether the files are those of the commit.  Reads only; runs no hook.

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

TIMEOUT_S: Final = 20.0
# Our own checkouts are often mounted into containers under another owner; no configured program may run.
GIT: Final = ("git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.quotePath=true")
DIFF: Final = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--full-index", "--no-renames")
UNTRACKED: Final = ("ls-files", "--others", "--exclude-standard", "--full-name", "-z", ":/")


def probe_checkout(folder: Path) -> dict[str, Fact]:
    """``commit``, ``is_dirty``, and ``diff_sha256`` over ``git diff HEAD`` and the names of untracked files.

    ``HEAD:./`` fails for a folder that merely lies inside some repository (site-packages in a checkout's .venv).
    """
    answer = _git(folder, "rev-parse", "HEAD", "HEAD:./")
    if isinstance(answer, Unknown):
        return unknown_checkout(answer.reason)
    diff, untracked = _git(folder, *DIFF), _git(folder, *UNTRACKED)
    commit = answer.split()[0]
    if isinstance(diff, Unknown) or isinstance(untracked, Unknown):
        reason = Unknown("git answered neither diff nor ls-files")
        return {"commit": commit, "is_dirty": reason, "diff_sha256": reason}
    return {
        "commit": commit,
        "is_dirty": bool(diff or untracked),
        "diff_sha256": sha256_bytes(f"{diff}\0{untracked}".encode(errors="replace")) if diff or untracked else "clean",
    }


def unknown_checkout(reason: str) -> dict[str, Fact]:
    return {name: Unknown(reason) for name in ("commit", "is_dirty", "diff_sha256")}


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
