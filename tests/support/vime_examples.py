"""The shipped runs of vime, on every hardware and in every lane, and what their argument lists are."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from rlk_repro.base import proc
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.plan import Plan
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import VimeModel, VimeWorkload
from rlk_repro.spec.load import load_run
from rlk_repro.spec.values import Lane
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.vime import find_files
from tests.support.slurm.examples import plan_for

VIME = WORKLOADS["vime"]

MAJOR = {"a100": 8, "h100": 9, "h200": 9, "gb200": 10, "mi300x": 9}
"""What a GPU says of its architecture; ROCm gives gfx942 as 9.4."""
COMMIT = "1fc199d9d57eb9d9e66d337cce406c27e7bd916f"


def list_runs() -> dict[str, VimeWorkload]:
    loaded = {name: load_run(name).model.workload for name in list_names(run_folders())}
    return {name: workload for name, workload in loaded.items() if isinstance(workload, VimeWorkload)}


@cache
def list_plans() -> tuple[tuple[str, Plan], ...]:
    """``run.hardware.lane`` and its plan."""
    return tuple(
        (f"{run}.{hardware}.{lane}", plan_for(run, hardware, settings=(f"lane={lane}",)))
        for run, workload in list_runs().items()
        for hardware in workload.placements
        for lane in (("train-only",) if workload.fills_memory else get_args(Lane))
    )


def trial_argv(plan: Plan, run_dir: RunDir, number: int = 0) -> list[str]:
    """What follows ``train.py``."""
    return list(VIME.trainer_command(plan, plan.trials[number], run_dir).argv[3:])


def all_lists(root: Path) -> list[tuple[str, list[str], dict[str, str], int]]:
    """Every command of every plan as ``vime_parser`` reads it, with the files that vime looks for below ``root``."""
    run_dir = RunDir(root / "runs" / "run" / "id")
    lists = []
    for name, plan in list_plans():
        write_model(plan, run_dir)
        commands = {name: VIME.trainer_command(plan, plan.trials[0], run_dir)}
        commands |= {f"{name}.store": command for command in VIME.rollout_commands(plan, run_dir).values()}
        major = MAJOR[plan.hardware.hardware]
        lists += [(each, list(command.argv[3:]), dict(command.env), major) for each, command in commands.items()]
    return lists


def write_model(plan: Plan, run_dir: RunDir) -> None:
    """A model folder that holds what vime compares with the arguments, and an empty checkpoint."""
    workload = plan.run.workload
    assert isinstance(workload, VimeWorkload)
    files = find_files(plan, run_dir)
    assert PreparedDir.of(plan.profile, run_dir).model(workload.model) == files.model
    for folder in (files.model, files.checkpoint):
        folder.mkdir(parents=True, exist_ok=True)
    (files.model / "config.json").write_text(json.dumps(make_config(workload.model)))


def make_config(model: VimeModel) -> dict[str, Any]:
    """The keys of the hub's configuration that vime checks, by the model's own arguments."""
    flags = model.arguments
    names = {
        "hidden_size": "hidden-size",
        "num_attention_heads": "num-attention-heads",
        "num_hidden_layers": "num-layers",
        "intermediate_size": "ffn-hidden-size",
        "moe_intermediate_size": "moe-ffn-hidden-size",
        "rms_norm_eps": "norm-epsilon",
        "rope_theta": "rotary-base",
    }
    config: dict[str, Any] = {key: flags[flag] for key, flag in names.items() if flag in flags}
    config.setdefault("rms_norm_eps", 1e-5)  # Megatron-LM's own default
    config["tie_word_embeddings"] = not flags.get("untie-embeddings-and-output-weights", False)
    config["model_type"] = "qwen3"
    return config


def with_workload(plan: Plan, **changes: Any) -> Plan:
    """The same plan with other settings in its workload, not validated again; of a part, only the named settings."""
    old = {name: getattr(plan.run.workload, name) for name in changes}
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(old[name], BaseModel):
            changes[name] = old[name].model_copy(update=value)
    workload = plan.run.workload.model_copy(update=changes)
    return dataclasses.replace(plan, run=plan.run.model_copy(update={"workload": workload}))


def patch_megatron(folder: Path) -> Path:
    """Megatron-LM with vime's patch, as images have it: some models' arguments are the patch's own."""
    source, patch = (
        Path(os.environ["MEGATRON_SRC"]),
        Path(os.environ["VIME_SRC"]) / "docker/patch/latest/megatron.patch",
    )
    if proc.run(["git", "apply", "--reverse", "--check", str(patch)], cwd=source).is_ok:
        return source
    shutil.copytree(source / "megatron", folder / "megatron")
    applied = proc.run(["git", "apply", str(patch)], cwd=folder)
    assert applied.is_ok, applied.stderr
    return folder
