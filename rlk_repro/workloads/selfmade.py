"""What a workload answers that makes model, data and rollouts itself: no warnings, and nothing to prepare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlk_repro.base.findings import Finding
from rlk_repro.plan import Plan
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.spec import Run, Stack
from rlk_repro.workloads.api import Brought

if TYPE_CHECKING:
    from rlk_repro.prepare.steps import PrepareRequest, PrepareStep


def find_warnings(plan: Plan) -> list[Finding]:  # noqa: ARG001
    return []


def find_brought(plan: Plan) -> Brought:  # noqa: ARG001
    """Nothing: model, data and code are this package's own."""
    return Brought()


def list_folders(run: Run, stack: Stack, prepared: PreparedDir) -> dict[str, Path]:  # noqa: ARG001
    """None: nothing has to lie on disk before a trial."""
    return {}


def list_steps(request: PrepareRequest) -> list[PrepareStep]:  # noqa: ARG001
    """None: there is nothing to prepare."""
    return []
