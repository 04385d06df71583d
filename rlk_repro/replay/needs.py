"""List what this machine lacks to run a recorded experiment again, with a command for each item."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import Problem
from rlk_repro.base.findings import Level
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.clusters.registry import BACKENDS, get_backend
from rlk_repro.replay.steps import PreparedReplay

NUM_GPUS: Final = "gpu.count"


def find_needs(prepared: PreparedReplay, bundle: Path) -> Iterator[Problem]:
    """Yield what this machine lacks: the scheduler's client, GPUs or prepared files; modules are not checked."""
    plan = prepared.launch.plan
    reason = get_backend(plan.cluster).available()
    if reason is not None:
        yield Problem(plan.cluster, reason, expected="a machine that reaches the cluster",
                      hint=f"rlk-repro replay {shlex.quote(str(bundle))} --cluster local")  # fmt: skip
    yield from _find_gpus(prepared, bundle)
    absent = [item for item in prepared.parts if item.level is Level.BLOCKING and item.found == "none"]
    for item in absent:
        yield Problem(item.where, "missing", expected=item.expected, hint=_name_prepare(prepared, bundle))


def _find_gpus(prepared: PreparedReplay, bundle: Path) -> Iterator[Problem]:
    plan = prepared.launch.plan
    found = next((item.found for item in prepared.drift or () if item.where == NUM_GPUS), None)
    needed = plan.layout.gpus_per_node
    if found is None or (found.isdecimal() and int(found) >= needed):
        return
    clients = (name for name, backend in BACKENDS.items() if backend.CLIENT and shutil.which(backend.CLIENT))
    cluster = next(clients, "slurm")
    yield Problem("GPU", "too few on this machine", got=found, expected=f"{needed} for {plan.hardware.hardware}",
                  hint=f"rlk-repro profile init --cluster {cluster} -o site.yaml && "
                       f"rlk-repro replay {shlex.quote(str(bundle))} --profile site.yaml")  # fmt: skip


def _name_prepare(prepared: PreparedReplay, bundle: Path) -> str:
    plan = prepared.launch.plan
    name, first = plan.run.run, ""
    if name not in list_names(run_folders()):
        name = shlex.quote(str(bundle / "run.yaml")) if bundle.is_dir() else "run.yaml"
        first = "" if bundle.is_dir() else f"tar xzf {shlex.quote(str(bundle))} run.yaml && "
    return f"{first}rlk-repro prepare {name} --hardware {plan.hardware.hardware} --stack {plan.stack.stack}"
