"""Divide a plan's GPUs between training and generation, and list the folders that a run needs on disk."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.spec import Run, Stack, VimeWorkload


def list_folders(run: Run, stack: Stack, prepared: PreparedDir) -> dict[str, Path]:
    """Return the folders that the run's lane needs; raise SpecError if the stack does not pin vime for a conversion."""
    workload = run.workload
    assert isinstance(workload, VimeWorkload)
    folders = {"model": prepared.model(workload.model)}
    if workload.model.checkpoint == "torch_dist":
        vime = stack.pins.get("vime")
        if vime is None:
            raise SpecError(Problem(f"stack {stack.stack}: pins.vime", "missing", expected="a commit of vime"))
        folders["checkpoint"] = prepared.checkpoint(workload.model, vime.commit)
    if (rollouts := prepared.rollouts(run, workload)) is not None:
        folders["rollouts"] = rollouts.path
    if workload.generates(run.lane):
        folders["data"] = prepared.data_folder(workload.data.source)
    return folders
