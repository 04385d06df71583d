"""The trainers that a run can measure.  Adding one = a module, a line here, a test file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlk_repro.workloads import module, operators, reference, vime

if TYPE_CHECKING:
    from rlk_repro.workloads.api import Workload

WORKLOADS: dict[str, Workload] = {"reference": reference, "module": module, "operators": operators, "vime": vime}


def get_workload(kind: str) -> Workload:
    """By the kind that the run names; the run's model knows no others."""
    return WORKLOADS[kind]
