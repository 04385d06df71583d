"""What a check of preflight may look at: the facts of one node, or of all nodes of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Plan
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.rundir.manifest import Fact, Manifest, Unknown
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Hardware, Layout, Preflight


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of one node; ``nodes`` holds the manifests of all nodes if the leader compares them.

    ``transports`` holds what NCCL told each rank of the first trial.
    ``staged`` is the plan with its run directory, and None where there is no run (``doctor``, ``profile check``).  A
    check makes no finding from an unknown fact, because the manifest already says why the fact is unknown.
    """

    manifest: Manifest
    hardware: Hardware
    layout: Layout
    limits: Preflight
    staged: tuple[Plan, RunDir] | None = None
    busy: Sequence[GpuUse] | Unknown = ()
    nodes: Sequence[Manifest] = ()
    transports: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        assert self.staged is not None
        return self.staged[0]

    @property
    def run_dir(self) -> RunDir:
        assert self.staged is not None
        return self.staged[1]

    def fact(self, section: str, name: str) -> Fact:
        return self.manifest.sections.get(section, {}).get(name, Unknown("not recorded"))

    def mapping(self, section: str, name: str) -> dict[str, Any]:
        value = self.fact(section, name)
        return value if isinstance(value, dict) else {}

    @property
    def devices(self) -> list[dict[str, Any]]:
        devices = self.fact("gpu", "devices")
        return devices if isinstance(devices, list) else []


def wrong(where: str, expected: object, found: object) -> Finding:
    """Return a blocking finding; the policy of its check may make it a warning."""
    return Finding(Level.BLOCKING, where, str(expected), str(found))
