"""Plans for Kubernetes that tests and the examples in ``k8s/examples`` render."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rlk_repro.base.resources import data_dir, profile_folders
from rlk_repro.plan import Plan, make_plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import KubernetesSettings, Profile
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack, parse_overrides

EXAMPLES = data_dir("k8s") / "examples"
HARDWARE = ("a100", "h200", "gb200", "mi300x")
RUN_ID = "20261120T120000Z-0123abcd-4567"
SECRET: dict[str, Any] = {
    "env": {"HF_TOKEN": {"from_env": "HF_TOKEN"}},
    "secrets": {"HF_TOKEN": {"secret": "huggingface", "key": "token"}},
    "claims": [{"claim": "models", "path": "/models"}],
}
SITES: dict[str, dict[str, Any]] = {
    "restricted": {"run_as": {"user": 1000, "group": 1000}},
    "queued": {"queue": "benchmarks", "priority_class": "low", "image_pull_secrets": ["registry"], "max_time_min": 600},
    "rdma": {"rdma": {"resource": "rdma/hca_shared_devices_a", "count": 8, "networks": "roce-a, roce-b"}},
    "secret": SECRET,
    "no-restarts": {"restarts": 0, "network_policy": False},
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
    """Each hardware with one and four nodes, vime on one of them, and what sites add."""
    for hardware in HARDWARE:
        yield f"smoke.{hardware}.job", plan_for("smoke", hardware)
        yield f"smoke.{hardware}.job.four-nodes", plan_for("smoke", hardware, settings=num_nodes(hardware, 4))
    yield "qwen3-30b-a3b.h200.job", plan_for("qwen3-30b-a3b", "h200")
    for name, values in SITES.items():
        yield f"smoke.h200.job.{name}", with_site(plan_for(), **values)
