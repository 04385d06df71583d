"""The trainers that a run can measure.  To add one, write a module, a line here and a test file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlk_repro.workloads import module, operators, reference, vime
from rlk_repro.workloads.api import Words

if TYPE_CHECKING:
    from rlk_repro.workloads.api import Workload

WORKLOADS: dict[str, Workload] = {"reference": reference, "module": module, "operators": operators, "vime": vime}


def get_workload(kind: str) -> Workload:
    """Find the workload by the run's kind."""
    return WORKLOADS[kind]


def find_words(kind: str) -> Words:
    """Find how a report speaks of a workload; a bundle may come from a version that knows others."""
    return WORKLOADS[kind].WORDS if kind in WORKLOADS else Words(step=kind)
