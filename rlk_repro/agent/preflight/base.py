"""A preflight check is a pure function: it reads a node's facts and returns complaints.

A check ignores an unknown fact; the manifest says why the fact is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeAlias

from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.manifest import Fact, Manifest, Unknown
from rlk_repro.spec import CheckName, Hardware, Layout, Policy, Preflight

LEVELS: Final[dict[Policy, Level]] = {"pass": Level.INFO, "warn": Level.WARNING, "fail": Level.BLOCKING}
# default policies of the checks that need more than the manifest of one node
OTHER_POLICIES: Final[dict[CheckName, Policy]] = {
    "gpu_idle": "fail",
    "imex": "fail",
    "clock_skew": "warn",
    "nodes_alike": "fail",
    "nvlink_domain": "warn",
    "all_reduce": "fail",
}


class Complaint(NamedTuple):
    """One problem that a check found; the check's policy decides the level of the finding."""

    where: str
    expected: str
    found: str


class Scope(Enum):
    """The runs that a check applies to: all runs, runs with GPUs, or runs on several nodes."""

    ANY = auto()
    GPUS = auto()
    NODES = auto()


@dataclass(frozen=True, kw_only=True)
class Situation:
    manifest: Manifest
    hardware: Hardware
    layout: Layout
    limits: Preflight
    has_enabled: bool = False
    gpus_per_engine: int = 0

    def fact(self, section: str, name: str) -> Fact:
        return self.manifest.sections.get(section, {}).get(name, Unknown("not recorded"))

    def mapping(self, section: str, name: str) -> dict[str, Any]:
        value = self.fact(section, name)
        return value if isinstance(value, dict) else {}

    @property
    def devices(self) -> list[dict[str, Any]]:
        devices = self.fact("gpu", "devices")
        return devices if isinstance(devices, list) else []

    def has(self, scope: Scope) -> bool:
        if scope is Scope.GPUS:
            return self.layout.gpus_per_node > 0
        return scope is Scope.ANY or self.layout.num_nodes > 1


Judge: TypeAlias = Callable[[Situation], Iterable[Complaint]]


@dataclass(frozen=True, kw_only=True)
class Check:
    name: CheckName
    scope: Scope
    policy: Policy
    judge: Judge


def judge_node(checks: Iterable[Check], situation: Situation) -> Iterator[Finding]:
    """Yield a finding for each complaint of the checks that apply to this plan."""
    for check in checks:
        if situation.has(check.scope):
            level = LEVELS[situation.limits.policy.get(check.name, check.policy)]
            for complaint in check.judge(situation):
                yield Finding(level, *complaint)


def find_level(name: CheckName, limits: Preflight) -> Level:
    """Return the level that the findings of a check get: from the profile's policy, or else from ``OTHER_POLICIES``."""
    return LEVELS[limits.policy.get(name, OTHER_POLICIES[name])]


def name_gpus(devices: Iterable[dict[str, Any]], is_bad: Callable[[dict[str, Any]], bool]) -> str:
    """Name the GPUs for which ``is_bad`` is true, such as ``GPU 0, 3``; return an empty text if no GPU matches."""
    numbers = [str(device.get("index")) for device in devices if is_bad(device)]
    return f"GPU {', '.join(numbers)}" if numbers else ""
