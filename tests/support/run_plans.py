"""Every shipped run on every hardware that it has a layout for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from rlk_repro.base.resources import list_names, profile_folders, run_folders
from rlk_repro.plan import Plan, make_plan
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_bytes, load_hardware, load_profile, load_run, load_stack, parse_overrides
from tests.support.job_examples import PROFILE
from tests.support.slurm.examples import plan_for

CPU = "cpu"


@cache
def list_all_plans() -> tuple[tuple[str, Plan], ...]:
    """``run.hardware`` and its plan, in the lane that the run names."""
    return tuple(
        (f"{run}.{hardware}", make_run_plan(run, hardware))
        for run in list_names(run_folders())
        for hardware in layouts(run)
    )


def layouts(run: str) -> Iterator[str]:
    """The hardware of a run, as its file orders them."""
    yield from load_run(run).model.layouts


@cache
def make_run_plan(run: str, hardware: str, *settings: str) -> Plan:
    """On a GPU with its site profile, on a CPU with the local one."""
    if hardware != CPU:
        return plan_for(run, hardware, settings=settings)
    overrides = parse_overrides(settings)
    loaded = load_run(run, overrides)
    return make_plan(
        run=loaded,
        stack=load_stack(loaded.model.stack),
        hardware=load_hardware(hardware),
        profile=load_profile("local", profile_folders("local")),
        overrides=overrides,
    )


# Plans of the module and operator tiers, from the shipped run files.


def make_tier_plan(
    run: str, *settings: str, hardware: str = "cpu", stack: str = "host", profile: bytes = PROFILE
) -> Plan:
    overrides = parse_overrides(settings)
    return make_plan(
        run=load_run(run, overrides),
        stack=load_stack(stack),
        hardware=load_hardware(hardware),
        profile=load_bytes(Profile, "profile.yaml", profile),
        overrides=overrides,
        is_exploratory=True,
    )
