"""The kinds of trainer that a run can measure.  docs/structure.md says how to add one."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.plan import Plan
from rlk_repro.prepare.contents import ROLLOUTS, copy_rollouts, find_parts, load_parts, write_parts
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads.api import Words, Workload
from rlk_repro.workloads.bench import Module, Operators
from rlk_repro.workloads.reference import Reference
from rlk_repro.workloads.vime import Vime

WORKLOADS: dict[str, Workload] = {
    "reference": Reference(),
    "module": Module(),
    "operators": Operators(),
    "vime": Vime(),
}


def find_words(kind: str) -> Words:
    """Return a workload's phrases for reports; a bundle of a newer rlk-repro may name a kind that is unknown here."""
    return WORKLOADS[kind].WORDS if kind in WORKLOADS else Words(step=kind)


def list_run_folders(plan: Plan, run_dir: RunDir) -> dict[str, Path]:
    prepared = PreparedDir.of(plan.profile, run_dir)
    return WORKLOADS[plan.run.workload.kind].list_folders(plan.run, plan.stack, prepared)


def record_prepared(plan: Plan, run_dir: RunDir) -> None:
    """Write ``prepared.json``, unless ``submit`` has written it, and copy the rollouts that the bundle will hold."""
    folders = list_run_folders(plan, run_dir)
    if folders and not load_parts(run_dir.prepared):
        write_parts(run_dir.prepared, find_parts(folders))
    packed = plan.run.workload.packed_rollouts
    if packed is not None and ROLLOUTS in folders:
        copy_rollouts(folders[ROLLOUTS], run_dir.rollouts / packed)
