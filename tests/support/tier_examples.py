"""Plans of the module and operator tiers, from the shipped run files."""

from __future__ import annotations

from rlk_repro.plan import Plan, make_plan
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_bytes, load_hardware, load_run, load_stack, parse_overrides
from tests.support.job_examples import PROFILE


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
