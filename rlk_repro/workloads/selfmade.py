"""Functions for a workload that makes its model, data and rollouts itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlk_repro.base.findings import Finding
from rlk_repro.plan import Plan
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Run, Stack
from rlk_repro.workloads.api import Brought, Command

if TYPE_CHECKING:
    from rlk_repro.prepare.steps import PrepareRequest, PrepareStep


def find_warnings(plan: Plan) -> list[Finding]:  # noqa: ARG001
    return []


def find_brought(plan: Plan) -> Brought:  # noqa: ARG001
    return Brought()


def list_folders(run: Run, stack: Stack, prepared: PreparedDir) -> dict[str, Path]:  # noqa: ARG001
    return {}


def list_steps(request: PrepareRequest) -> list[PrepareStep]:  # noqa: ARG001
    return []


def rollout_commands(plan: Plan, run_dir: RunDir) -> dict[int, Command]:  # noqa: ARG001
    return {}
