"""Fetch with git: over https only, without credentials, and without running any program that a repository names.

If a site's mirror does not use https, the site sets ``GIT_ALLOW_PROTOCOL``.
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
    """Run git in a folder; of git's environment variables, pass on only ``GIT_ALLOW_PROTOCOL``."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name == PROTOCOLS}
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "LC_ALL": "C"}
    return proc.run(
        ["git", *OPTIONS, *arguments], cwd=folder, env={PROTOCOLS: "https"} | environ | quiet, timeout_s=timeout_s
    )


def fetch(folder: Path, repository: str, ref: str, *, timeout_s: float) -> proc.Completed:
    """Fetch one commit without its history; ``--`` keeps ``repository`` and ``ref`` from acting as options."""
    options = ("--quiet", "--depth=1", "--no-tags")
    return ask_git(folder, "fetch", *options, "--", repository, ref, timeout_s=timeout_s)


def explain(done: proc.Completed) -> str:
    complaints = (line for line in done.stderr.splitlines() if line.startswith(("fatal:", "error:")))
    return done.last_words if done.is_timeout else next(complaints, done.last_words)


def require(what: str, done: proc.Completed, hint: str | None = None) -> str:
    """Return the output of a git command; raise EnvironmentMissing with git's message if the command failed."""
    if not done.is_ok:
        raise EnvironmentMissing(Problem(what, f"refused ({explain(done)})", hint=hint))
    return done.stdout
