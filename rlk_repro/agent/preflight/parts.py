"""Record the prepared files that a run needs, and check them on every node before the first trial."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import Finding
from rlk_repro.plan import Plan
from rlk_repro.prepare.contents import (
    Contents,
    check_contents,
    diff_contents,
    find_parts,
    load_parts,
    write_parts,
)
from rlk_repro.rundir.paths import RolloutDir, RunDir
from rlk_repro.workloads import list_run_folders

ROLLOUTS = "rollouts"


def check_prepared(facts: Facts) -> Iterator[Finding]:
    """Check that this node can read the prepared files that ``submit`` recorded, and that each rollout has its file."""
    plan, run_dir = facts.plan, facts.run_dir
    folders = list_run_folders(plan, run_dir)
    try:
        recorded, found = load_parts(run_dir.prepared), find_parts(folders)
    except BundleUnreadable as error:
        yield wrong("prepared", "readable records", str(error.problems[0]))
        return
    for kind in folders.keys() - found.keys():
        expected = "what `rlk-repro prepare` makes with the run and the options of this run's `submit`"
        yield wrong(f"prepared.{kind}", expected, f"no complete folder {folders[kind].name}")
    yield from diff_contents({kind: recorded[kind] for kind in recorded.keys() & found.keys()},
                             {kind: found[kind] for kind in recorded.keys() & found.keys()})  # fmt: skip
    for kind, contents in sorted(found.items()):
        yield from check_contents(folders[kind], contents)
    yield from _check_number(plan, found)


def _check_number(plan: Plan, found: Mapping[str, Contents]) -> Iterator[Finding]:
    """Check that each rollout has its file, because a trainer silently takes rollout 0 in place of a missing one."""
    stored = found.get(ROLLOUTS)
    if stored is None:
        return
    wanted = [RolloutDir(Path()).file(number).name for number in range(plan.run.measure.num_stored)]
    absent = [name for name in wanted if name not in stored.files]
    if absent:
        expected = f"{len(wanted)} files, one per rollout of a trial"
        yield wrong(f"prepared.{ROLLOUTS}", expected, f"{len(absent)} missing, such as {absent[0]}")


def record_prepared(plan: Plan, run_dir: RunDir) -> None:
    """Write ``prepared.json``, unless ``submit`` has written it, and copy the rollouts that the bundle will hold."""
    folders = list_run_folders(plan, run_dir)
    if not folders:
        return
    if not load_parts(run_dir.prepared):
        write_parts(run_dir.prepared, find_parts(folders))
    packed = plan.run.workload.packed_rollouts
    if packed is not None and ROLLOUTS in folders:
        _copy(folders[ROLLOUTS], run_dir.rollouts / packed)


def _copy(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.pt")):
        if not (target / path.name).is_file():
            partial = target / f".partial-{path.name}"
            shutil.copyfile(path, partial)
            partial.replace(target / path.name)
