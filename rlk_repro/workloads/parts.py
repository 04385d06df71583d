"""List the folders that a plan needs before its first trial."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.plan import Plan
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads import get_workload


def list_run_folders(plan: Plan, run_dir: RunDir) -> dict[str, Path]:
    """Return a plan's folders by kind, from its profile; none where the workload makes everything itself."""
    prepared = PreparedDir.of(plan.profile, run_dir)
    return get_workload(plan.run.workload.kind).list_folders(plan.run, plan.stack, prepared)
