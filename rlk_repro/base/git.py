"""Fetch with git: over https only, without credentials, and without running any program that a repository names.

A site with mirrors configures git with ``url.<mirror>.insteadOf``, and sets ``GIT_ALLOW_PROTOCOL`` if a mirror does not
use https.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem

PROTOCOLS: Final = "GIT_ALLOW_PROTOCOL"
OPTIONS: Final = (
    *("-c", "safe.directory=*", "-c", "credential.helper=", "-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false", "-c", "core.quotePath=true"),
)


def ask_git(folder: Path, *arguments: str, timeout_s: float) -> proc.Completed:
    """Run git in a folder; of git's environment variables, pass on only ``GIT_ALLOW_PROTOCOL``.

    Raises:
        EnvironmentMissing: git is not installed.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name == PROTOCOLS}
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "LC_ALL": "C"}
    return proc.run(
        ["git", *OPTIONS, *arguments], cwd=folder, env={PROTOCOLS: "https"} | environ | quiet, timeout_s=timeout_s
    )


def fetch(folder: Path, repository: str, ref: str, *, timeout_s: float) -> proc.Completed:
    """Fetch one commit without its history; ``repository`` and ``ref`` cannot act as options of git."""
    options = ("--quiet", "--depth=1", "--no-tags")
    return ask_git(folder, "fetch", *options, "--", repository, ref, timeout_s=timeout_s)


def explain(done: proc.Completed) -> str:
    """Return the first line of git's error message."""
    complaints = (line for line in done.stderr.splitlines() if line.startswith(("fatal:", "error:")))
    return done.last_words if done.is_timeout else next(complaints, done.last_words)


def require(what: str, done: proc.Completed, hint: str | None = None) -> str:
    """Return the output of a git command that succeeded.

    Raises:
        EnvironmentMissing: git failed; the error quotes git's message.
    """
    if not done.is_ok:
        raise EnvironmentMissing(Problem(what, f"refused ({explain(done)})", hint=hint))
    return done.stdout
