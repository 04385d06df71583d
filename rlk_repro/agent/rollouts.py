"""Store the train-only lane's rollouts once before the trials, record their hashes, and check the hashes before use."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterator
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


def are_stored(run_dir: RunDir, seed: int) -> bool:
    """Whether the rollouts of a seed are recorded.

    Raises:
        CheckFailed: recorded files changed.
    """
    stored = load_record(run_dir.prepared, schema=SCHEMA).get(ROLLOUTS, {})
    if str(seed) not in stored:
        return False
    folder = run_dir.rollouts_of(seed).path
    for name, digest in stored[str(seed)]["files"].items():
        path = folder / name
        if not path.is_file() or sha256_file(path) != digest:
            what = "stored rollouts changed since they were made"
            raise CheckFailed(Problem(str(folder), what, got=name, hint="submit a new run"))
    return True


def record_stored(plan: Plan, run_dir: RunDir, seed: int, command: Command, outcome: Outcome) -> None:
    """Record the hashes of the rollouts that a command has stored.

    Raises:
        CheckFailed: the command failed or did not write all files.
    """
    folder = run_dir.rollouts_of(seed)
    if outcome.status is not TrialStatus.OK:
        raise CheckFailed(Problem(str(folder.stdout), f"rollouts were not stored ({outcome.reason})"))
    prepared = load_record(run_dir.prepared, schema=SCHEMA)
    files = {path.name: sha256_file(path) for path in _list_files(plan, folder)}
    record = {"command": record_command(command, run_dir)["argv"], "files": files}
    stored = {**prepared.get(ROLLOUTS, {}), str(seed): record}
    write_json(run_dir.prepared, {**prepared, "schema": SCHEMA, ROLLOUTS: stored})


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
    folder.path.mkdir(parents=True)
    placed: dict[Path, Path] = {}
    for number, path in enumerate(chosen):
        target = folder.file(number)
        try:
            os.link(placed.get(path, path), target)  # a run directory must not hold symbolic links
        except OSError:  # hard links to other file systems or other users' files may fail
            shutil.copyfile(path, target)
        placed.setdefault(path, target)
    try:
        yield [path.name for path in chosen]
    finally:
        shutil.rmtree(folder.path)


def _list_files(plan: Plan, folder: RolloutDir) -> list[Path]:
    paths = [folder.file(number) for number in range(plan.run.measure.num_stored)]
    if absent := [path.name for path in paths if not path.is_file()]:
        what = f"{len(absent)} of {len(paths)} rollouts are missing, the first is {absent[0]}"
        raise CheckFailed(Problem(str(folder.path), what))
    return paths
