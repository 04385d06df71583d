"""Store the train-only lane's rollouts once before the trials, record their hashes, and check the hashes before use."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rlk_repro.agent.trial import Outcome, record_command
from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.files import load_record, sha256_file, write_json
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RolloutDir, RunDir
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.schedule import make_schedule
from rlk_repro.workloads.api import Command

SCHEMA: Final = 1
ROLLOUTS: Final = "rollouts"


def store_rollouts(
    plan: Plan, run_dir: RunDir, seed: int, command: Command, run: Callable[[Command, Path], Outcome]
) -> None:
    """Store the rollouts of a seed and record their hashes, unless the recorded files exist unchanged.

    Raises:
        CheckFailed: the command failed or did not write all files, or recorded files changed.
    """
    folder = run_dir.rollouts_of(seed)
    prepared = load_record(run_dir.prepared, schema=SCHEMA)
    stored = prepared.get(ROLLOUTS, {})
    if str(seed) in stored:
        _require_same(folder, stored[str(seed)]["files"])
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    outcome = run(command, folder.stdout)
    if outcome.status is TrialStatus.INTERRUPTED:
        return
    if outcome.status is not TrialStatus.OK:
        raise CheckFailed(Problem(str(folder.stdout), f"rollouts were not stored ({outcome.reason})"))
    files = {path.name: sha256_file(path) for path in _list_files(plan, folder)}
    record = {"command": record_command(command, run_dir)["argv"], "files": files}
    write_json(run_dir.prepared, {**prepared, "schema": SCHEMA, ROLLOUTS: {**stored, str(seed): record}})


def count_stored(run_dir: RunDir) -> int:
    return len(load_record(run_dir.prepared, schema=SCHEMA).get(ROLLOUTS, {}))


@contextmanager
def lay_out_rollouts(plan: Plan, trial: Trial, stored: RolloutDir, folder: RolloutDir) -> Iterator[list[str]]:
    """Make a folder with one stored rollout for each rollout of a session; yield the names of these stored rollouts.

    For a rollout outside all blocks, the trainer gets one of the largest files, because the warm-up must run the
    largest tensor shapes in both variants.

    Raises:
        CheckFailed: a stored rollout is missing.
    """
    files = _list_files(plan, stored)
    rollouts = make_schedule(plan.run.measure, trial.seed).rollouts
    largest = sorted(files, key=lambda path: -path.stat().st_size)
    num_warmed = math.ceil(plan.run.measure.warmup_steps / 2)
    # If the warm-up ended with the first block's rollout, only one variant of this block would train on a new one.
    warmed = sorted(largest[:num_warmed], key=lambda path: path != files[0])
    others = (path for path in itertools.cycle([*warmed, *largest[num_warmed:]]) for _ in range(2))
    chosen = [next(others) if rollout.stored is None else files[rollout.stored] for rollout in rollouts]
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.path.mkdir()
    placed: dict[Path, Path] = {}
    for number, path in enumerate(chosen):
        _place(placed.get(path, path), folder.file(number))
        placed.setdefault(path, folder.file(number))
    try:
        yield [path.name for path in chosen]
    finally:
        shutil.rmtree(folder.path)


def _place(source: Path, target: Path) -> None:
    # This is a hard link, because a run directory must not hold symbolic links.
    try:
        os.link(source, target)
    except OSError:  # hard links to other file systems or other users' files may fail
        shutil.copyfile(source, target)


def _list_files(plan: Plan, folder: RolloutDir) -> list[Path]:
    paths = [folder.file(number) for number in range(plan.run.measure.num_stored)]
    if absent := [path.name for path in paths if not path.is_file()]:
        what = f"{len(absent)} of {len(paths)} rollouts are missing, the first is {absent[0]}"
        raise CheckFailed(Problem(str(folder.path), what))
    return paths


def _require_same(folder: RolloutDir, recorded: dict[str, str]) -> None:
    paths = {name: folder.path / name for name in recorded}
    changed = [name for name, path in paths.items() if not path.is_file() or sha256_file(path) != recorded[name]]
    if changed:
        what = "stored rollouts changed since they were made"
        raise CheckFailed(Problem(str(folder.path), what, got=changed[0], hint="submit a new run"))
