"""Finds run directories again: all of them, one by id or path, the newest.  Nothing is created here."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.errors import Problem, SpecError
from rlk_repro.resources import suggest
from rlk_repro.rundir import RunDir, runs_root


def list_run_dirs(root: Path | None = None) -> list[RunDir]:
    """Every run directory below the runs root, oldest first."""
    base = runs_root() if root is None else root
    found = [RunDir(plan.parent) for plan in base.glob("*/*/plan.json")] if base.is_dir() else []
    return sorted(found, key=lambda run_dir: (run_dir.plan.stat().st_mtime_ns, run_dir.run_id))


def find_run_dir(name: str | None) -> RunDir:
    """A run directory by id, unambiguous prefix of an id, or path; the newest when ``name`` is None.

    Raises:
        SpecError: none, or more than one; the message lists the newest ids.
    """
    if name is not None and RunDir(Path(name)).plan.is_file():
        return RunDir(Path(name))
    known = list_run_dirs()
    if name is None:
        if not known:
            raise SpecError(Problem(str(runs_root()), "holds no run directory", hint="rlk-repro submit makes one"))
        return known[-1]
    matches = [run_dir for run_dir in known if run_dir.run_id == name] or [
        run_dir for run_dir in known if run_dir.run_id.startswith(name)
    ]
    if len(matches) == 1:
        return matches[0]
    ids = [run_dir.run_id for run_dir in known]
    what = "more than one run directory starts like this" if matches else "no run directory of this id"
    newest = ", ".join(reversed(ids[-5:])) or "(none)"
    raise SpecError(Problem(str(runs_root()), what, got=name, expected=f"an id, newest first: {newest}",
                            hint=suggest(name, ids)))  # fmt: skip
