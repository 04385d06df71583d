"""Stored rollouts of the train-only lane: made once before the trials, recorded by hash, checked when used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlk_repro.errors import BundleUnreadable, CheckFailed, Problem
from rlk_repro.files import load_json, sha256_file, write_json
from rlk_repro.job.trial import Outcome, record_command
from rlk_repro.plan import Plan
from rlk_repro.results import TrialStatus
from rlk_repro.rundir import RunDir
from rlk_repro.workloads.api import Command

SCHEMA = 1


def store_rollouts(plan: Plan, run_dir: RunDir, command: Command, run: Callable[[Command], Outcome]) -> None:
    """Make the files of ``run_dir.rollouts`` and record them in ``prepared.json``, unless they are there as recorded.

    Raises:
        CheckFailed: the command did not end well, left files out, or recorded files are no longer what they were.
    """
    known = _load_prepared(run_dir).get("rollouts")
    if known is not None:
        _require_same(run_dir, known["files"])
        return
    run_dir.rollouts.mkdir(exist_ok=True)
    outcome = run(command)
    if outcome.status is TrialStatus.INTERRUPTED:
        return
    if outcome.status is not TrialStatus.OK:
        raise CheckFailed(Problem(str(run_dir.rollouts_log), f"rollouts were not stored ({outcome.reason})"))
    files = {run_dir.rollout_file(number).name: run_dir.rollout_file(number) for number in range(plan.num_steps)}
    absent = [name for name, path in files.items() if not path.is_file()]
    if absent:
        raise CheckFailed(Problem(str(run_dir.rollouts), f"{len(absent)} of {len(files)} missing", got=absent[0]))
    rollouts = {
        "command": record_command(command, run_dir)["argv"],
        "files": {name: sha256_file(path) for name, path in files.items()},
    }
    write_json(run_dir.prepared, {"schema": SCHEMA, **_load_prepared(run_dir), "rollouts": rollouts})


def _load_prepared(run_dir: RunDir) -> dict[str, Any]:
    try:
        value: dict[str, Any] = load_json(run_dir.prepared, schema=SCHEMA)
    except BundleUnreadable:
        return {}
    return value


def _require_same(run_dir: RunDir, recorded: dict[str, str]) -> None:
    changed = [
        name
        for name, digest in recorded.items()
        if not (run_dir.rollouts / name).is_file() or sha256_file(run_dir.rollouts / name) != digest
    ]
    if changed:
        raise CheckFailed(
            Problem(str(run_dir.rollouts), "stored rollouts changed since they were made", got=changed[0],
                    hint="submit a new run")
        )  # fmt: skip
