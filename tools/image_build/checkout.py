"""Move the checkout of vime in the base image to the stack's commit, verify its files, and remove its time stamps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from rlk_repro.base import git
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.probes.checkout import probe_checkout
from tools.image_build.inputs import Inputs
from tools.image_build.package import pip_install

TIMEOUT_S: Final = 900.0
NO_COMMIT: Final = ("not our ref", "couldn't find remote ref")
LOST: Final = "the repository does not have this commit (any more): rlk-repro images pin resolves the pins again"
# git keeps here when and from where it fetched
TRACES: Final = ("FETCH_HEAD", "ORIG_HEAD", "logs", "gc.log")


def install_vime(inputs: Inputs, folder: Path = Path("/root/vime")) -> None:
    """Fetch the commit of vime, check it out, and install it in place.

    Raises:
        EnvironmentMissing: the folder is not a checkout, or the repository no longer has the commit.
        CheckFailed: the files differ from the commit after the checkout.
    """
    commit = inputs.vime_commit
    if not (folder / ".git").exists():
        raise EnvironmentMissing(Problem(str(folder), "is no git checkout", expected="the base's checkout of vime"))
    done = git.fetch(folder, inputs.vime_repository, commit, timeout_s=TIMEOUT_S)
    git.require(f"git fetch in {folder}", done, LOST if any(words in done.stderr for words in NO_COMMIT) else None)
    _git(folder, "checkout", "--quiet", "--force", "--detach", commit, "--")
    # vime is installed in place, so Python imports the checkout
    pip_install("--no-build-isolation", "--editable", str(folder))
    forget_time(folder)
    facts = probe_checkout(folder)
    if facts["commit"] != commit:
        raise CheckFailed(Problem(str(folder), "is at another commit", got=facts["commit"], expected=commit))
    if facts["is_dirty"] is not False:
        raise CheckFailed(Problem(str(folder), "has changed files", got=_git(folder, "status", "--short")[:200]))


def forget_time(folder: Path) -> None:
    """Remove times from the checkout: git's records of fetches, and the times and inode numbers in git's index."""
    for name in TRACES:
        path = folder / ".git" / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (folder / ".git" / "index").unlink()
    _git(folder, "read-tree", "HEAD")


def _git(folder: Path, *arguments: str) -> str:
    done = git.ask_git(folder, *arguments, timeout_s=TIMEOUT_S)
    return git.require(f"git {arguments[0]} in {folder}", done)
