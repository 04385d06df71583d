"""Objects for every shipped run on every GPU of its layouts, as each kind of job; a few are in ``k8s/examples``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rlk_repro.base.resources import data_dir, list_names, profile_folders, run_folders
from rlk_repro.clusters.k8s.objects import dump_objects, render_objects
from rlk_repro.plan import Plan, make_plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import KubernetesSettings, Profile
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack, parse_overrides

EXAMPLES = data_dir("k8s") / "examples"
HARDWARE = ("a100", "h200", "gb200", "mi300x")
KINDS = ("rayjob", "job")
RUN_ID = "20261120T120000Z-0123abcd-4567"
RESTRICTED: dict[str, Any] = {"run_as": {"user": 1000, "group": 1000}}
RDMA: dict[str, Any] = {"rdma": {"resource": "rdma/hca_shared_devices_a", "count": 8, "networks": "roce-a, roce-b"}}
QUEUED: dict[str, Any] = {
    "queue": "benchmarks",
    "priority_class": "low",
    "image_pull_secrets": ["registry"],
    "max_time_min": 600.0,
}


@cache
def plan_for(
    run: str = "smoke", hardware: str = "h200", *, stack: str = "example", settings: tuple[str, ...] = ()
) -> Plan:
    """A run on one hardware with the site profile that is shipped for it."""
    overrides = parse_overrides(settings)
    return make_plan(
        run=load_run(run, overrides),
        stack=load_stack(stack),
        hardware=load_hardware(hardware),
        profile=load_profile(f"generic-{hardware}", profile_folders("k8s")),
        overrides=overrides,
    )


def with_site(plan: Plan, env: dict[str, Any] | None = None, **values: Any) -> Plan:
    """The same plan with other values in its profile."""
    profile = plan.profile.model_dump(mode="json", by_alias=True)
    profile["kubernetes"] = {**KubernetesSettings().model_dump(mode="json"), **profile["kubernetes"], **values}
    if env is not None:
        profile["env"] = env
    return dataclasses.replace(plan, profile=Profile.model_validate_json(json.dumps(profile)))


def run_dir_of(plan: Plan) -> RunDir:
    return RunDir(Path("/home/me/runs") / plan.run.run / RUN_ID)


def num_nodes(hardware: str, count: int) -> tuple[str, ...]:
    gpus = 4 if hardware == "gb200" else 8
    return (f"layouts.{hardware}={{num_nodes: {count}, gpus_per_node: {gpus}}}",)


def list_plans() -> Iterator[tuple[str, Plan]]:
    """File name and plan of every example."""
    for run in list_names(run_folders()):
        layouts = load_run(run).model.layouts
        for hardware in HARDWARE:
            if hardware not in layouts:
                continue
            plan = plan_for(run, hardware)
            for kind in KINDS:
                yield f"{run}.{hardware}.{kind}", with_site(plan, kind=kind)
    for hardware in HARDWARE:
        for kind in KINDS:
            plan = plan_for("smoke", hardware, settings=num_nodes(hardware, 4))
            yield f"smoke.{hardware}.{kind}.four-nodes", with_site(plan, kind=kind)
    for kind in KINDS:
        plan = with_site(plan_for("smoke", "h200"), kind=kind)
        yield f"smoke.h200.{kind}.restricted", with_site(plan, **RESTRICTED)
        yield f"smoke.h200.{kind}.queued", with_site(plan, **QUEUED)
    yield "smoke.h200.rayjob.rdma", with_site(plan_for("smoke", "h200", settings=num_nodes("h200", 2)), **RDMA)
    secret = {"HF_TOKEN": {"from_env": "HF_TOKEN"}}
    place = {"HF_TOKEN": {"secret": "huggingface", "key": "token"}}
    claims = [{"claim": "models", "path": "/models"}]
    plan = with_site(plan_for("smoke", "h200"), env=secret, secrets=place, claims=claims)
    yield "smoke.h200.rayjob.secret-and-models", plan
    yield "smoke.h200.job.no-claim", with_site(plan_for("smoke", "h200"), kind="job", results={"path": "/results"})


def render_examples() -> dict[str, str]:
    return {f"{name}.yaml": dump_objects(render_objects(plan, run_dir_of(plan))) for name, plan in list_plans()}
