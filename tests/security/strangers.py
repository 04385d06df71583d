"""Make bundles as a stranger would send them: sealed, verified by the tool, and meant to run something here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlk_repro.base.files import write_json, write_text
from rlk_repro.plan import Plan, make_record
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Profile, VimeWorkload
from tests.support.make_run import Recipe, finish_run, make_plan_for, make_run

CPU = Recipe(
    hardware="cpu", is_routed=False, settings=("measure.pairs=1", "measure.scored_steps=2", "measure.warmup_steps=1")
)


def pack_stranger(
    root: Path,
    *,
    profile: dict[str, Any] | None = None,
    change: Callable[[RunDir], None] | None = None,
) -> Path:
    """Return a bundle of the smoke run on this machine, with the stranger's profile where one is given."""

    def alter(run_dir: RunDir) -> None:
        if profile is not None:
            site = Profile.model_validate_json(json.dumps({"profile": "theirs", **profile}))
            put_plan(run_dir, dataclasses.replace(make_plan_for(CPU), profile=site))
            write_text(run_dir.profile_yaml, yaml.safe_dump({"profile": "theirs", **profile}))
        if change is not None:
            change(run_dir)

    return finish_run(make_run(root, CPU, alter))


def put_plan(run_dir: RunDir, plan: Plan) -> None:
    write_json(run_dir.plan, make_record(plan, run_dir.run_id))


def write_program(folder: Path, name: str = "program") -> tuple[Path, Path]:
    """Return a program, and the file that exists once the program has run."""
    mark = folder / f"{name} ran"
    path = folder / name
    path.write_text(f'#!/bin/sh\ntouch "{mark}"\ncat\n')
    path.chmod(0o755)
    return path, mark


def with_workload(plan: Plan, **parts: Any) -> Plan:
    """Return a plan of vime with other settings, by the name of the part; a part of several settings keeps the rest."""
    workload = plan.run.workload
    assert isinstance(workload, VimeWorkload)
    changed = {
        name: getattr(workload, name).model_copy(update=value) if name in {"data", "model"} else value
        for name, value in parts.items()
    }
    return dataclasses.replace(plan, run=plan.run.model_copy(update={"workload": workload.model_copy(update=changed)}))
