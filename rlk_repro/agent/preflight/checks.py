"""List the preflight checks that have a policy (docs/preflight.md)."""

from typing import Final

from rlk_repro.agent.preflight import gpu, host, network
from rlk_repro.agent.preflight.base import OTHER_POLICIES, Check
from rlk_repro.spec import CheckName, Policy

CHECKS: Final[tuple[Check, ...]] = (*gpu.CHECKS, *host.CHECKS, *network.CHECKS)


def default_policies() -> dict[CheckName, Policy]:
    return {**OTHER_POLICIES, **{check.name: check.policy for check in CHECKS}}
