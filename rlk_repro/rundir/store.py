"""Find run directories, and tell which ones this user submitted.

A run directory may come from another person's bundle and hold that person's job id or site. A file in the user's state
folder therefore records each submission.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.disk import writing
from rlk_repro.base.errors import BundleUnreadable, Problem, SpecError
from rlk_repro.base.files import MAX_PLAN_BYTES, load_json, sha256_file, write_json, write_text
from rlk_repro.base.resources import suggest, user_state_dir
from rlk_repro.rundir.paths import FIND_BUNDLE, RUNS_VARIABLE, RunDir, runs_root

SCHEMA: Final = 1


def remember(run_dir: RunDir, submission: Mapping[str, Any] | None = None) -> None:
    """Record that this user staged a run directory; ``submission`` describes the job after the cluster accepts it.

    The run directory gets a random token, which is never packed: anyone may copy a plan from a published bundle.
    """
    path = _state_file(run_dir)
    if not run_dir.token.is_file():
        write_text(run_dir.token, secrets.token_hex(32))
    with writing(path.parent, hint="export XDG_STATE_HOME=/a/folder/with/room"):
        write_json(path, {"schema": SCHEMA, "submission": submission, "token": sha256_file(run_dir.token)})


def recall(run_dir: RunDir) -> dict[str, Any] | None:
    """Return what ``remember`` recorded for a run directory, or None if this user did not stage it.

    Records of earlier versions hold no token's hash, so there the plan alone decides.
    """
    if not has_submitted(run_dir):
        return None
    value: dict[str, Any] = load_json(_state_file(run_dir), schema=SCHEMA)
    token = value.get("token")
    is_own = token is None or (run_dir.token.is_file() and sha256_file(run_dir.token) == token)
    return value if is_own else None


def has_submitted(run_dir: RunDir) -> bool:
    """Tell whether this user submitted the plan of a run directory, which may be another person's copy."""
    return run_dir.plan.is_file() and _state_file(run_dir).is_file()


def _state_file(run_dir: RunDir) -> Path:
    return user_state_dir() / "submissions" / f"{sha256_file(run_dir.plan)}.json"


def require_own_place(folder: Path, setting: str) -> None:
    """Raise SpecError for a folder inside another person's run: what lies there would be taken as this user's own.

    ``setting`` names how the user chooses another folder.
    """
    for parent in (folder.absolute(), *folder.resolve().parents):
        run_dir = RunDir(parent)
        if (run_dir.plan.exists() or run_dir.checksums.exists()) and recall(run_dir) is None:
            raise SpecError(Problem(str(folder), "lies in a run that you did not submit", got=str(parent),
                                    expected="a folder of your own", hint=setting))  # fmt: skip


def list_run_dirs() -> list[RunDir]:
    """List every run directory, oldest first; raise SpecError for a folder that cannot be read."""
    base = runs_root()
    try:
        folders = (folder for run in _list_folders(base) for folder in _list_folders(run))
        found = [run_dir for run_dir in map(RunDir, folders) if run_dir.plan.is_file()]
        return sorted(found, key=lambda run_dir: (run_dir.plan.stat().st_mtime_ns, run_dir.run_id))
    except OSError as error:
        where = str(error.filename or base)
        what = f"cannot be read ({error.strerror})"
        raise SpecError(Problem(where, what, expected="a folder of run directories")) from error


def _list_folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def find_run_dir(name: str | None) -> RunDir:
    """Find a run directory by its path, its id or the id's beginning; find the newest one if ``name`` is None.

    Raises:
        SpecError: no directory matches, several directories match, or a folder cannot be read.
        BundleUnreadable: the directory holds a link, through which a write would reach another place.
    """
    run_dir = _find(name)
    # a running job may remove folders meanwhile, which ``os.walk`` leaves out
    found = (Path(folder, name) for folder, *names in os.walk(run_dir.root) for name in itertools.chain(*names))
    links = sorted(path for path in found if path.is_symlink())
    if links:
        raise BundleUnreadable(
            Problem(str(links[0]), "is a link that may lead to your own files; a run directory holds no links",
                    expected="files and folders only", hint="remove the link, if you know who made it")
        )  # fmt: skip
    return run_dir


def _find(name: str | None) -> RunDir:
    if name is not None and _is_run_dir(Path(name)):
        return RunDir(Path(name))
    known = list_run_dirs()
    where = str(runs_root())
    if not known:
        hint = f"call this in the folder in which you submitted, or set {RUNS_VARIABLE}"
        if name is None:
            hint += "; rlk-repro submit smoke makes a first run"
        raise SpecError(Problem(where, "holds no run directory", got=name, hint=hint))
    if name is None:
        return known[-1]
    matches = [run_dir for run_dir in known if run_dir.run_id == name]
    matches = matches or [run_dir for run_dir in known if run_dir.run_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    what, hint = f"{len(matches)} runs have an id that starts like this", "give more of the id"
    if not matches:
        ids = [run_dir.run_id for run_dir in known]
        what = "no run directory has this id"
        hint = suggest(name, ids) or "rlk-repro runs list --submitted"
    newest = ", ".join(run_dir.run_id for run_dir in reversed((matches or known)[-5:]))
    expected = f"an id such as {newest} (newest first)"
    raise SpecError(Problem(where, what, got=name, expected=expected, hint=hint))


def read_plan(path: Path) -> Any:
    """Read a ``plan.json`` without checking it; raise BundleUnreadable if it is broken or absent."""
    if not path.exists():
        raise BundleUnreadable(Problem(str(path), "missing", expected="a file", hint=FIND_BUNDLE))
    return load_json(path, max_bytes=MAX_PLAN_BYTES)


def _is_run_dir(path: Path) -> bool:
    try:
        return RunDir(path).plan.is_file()
    except OSError as error:  # the user lacks a permission, or the name is too long
        raise SpecError(Problem(str(path), f"cannot be read ({error.strerror})", expected="an id or a path")) from error
