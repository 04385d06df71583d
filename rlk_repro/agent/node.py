"""Do the tasks of every node's agent, leader or follower: manifest, preflight record, telemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rlk_repro.agent.parts import Agent, NodePlace
from rlk_repro.agent.preflight.checks import default_policies, judge
from rlk_repro.agent.preflight.facts import Facts
from rlk_repro.agent.preflight.gpu import find_busy, wait_until_idle
from rlk_repro.agent.resume import set_node_aside
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.own_patch import with_own_patch
from rlk_repro.plan import Plan
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.telemetry import Current, Sampler, open_sensors
from rlk_repro.rundir.manifest import Manifest, Unknown, diff_manifests
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads.checkouts import trainer_path

SCHEMA: Final = 1


def describe_node(agent: Agent) -> list[Finding]:
    """Write this node's manifest and preflight record, and return the findings.

    The files of an earlier agent move to ``earlier/<n>/``; facts that changed since then become findings.
    """
    plan, run_dir = agent.plan, agent.run_dir
    node = run_dir.node(agent.place.node)
    earlier = set_node_aside(node)
    with trainer_path(plan):
        manifest = agent.parts.probe_node(agent.place.node)
    if agent.place.is_leader:
        manifest = with_own_patch(manifest, run_dir.own_patch, agent.make_scrubber())
    write_json(node.manifest, manifest.to_json())
    facts = replace(make_facts(plan, manifest), staged=(plan, run_dir), busy=find_late_users(agent))
    findings = judge(facts)
    before = None if earlier is None else load_manifest(earlier.manifest)
    if before is not None:
        findings += [item for item in diff_manifests(before, manifest) if item.level is not Level.INFO]
    write_preflight(run_dir, agent.place, findings)
    return findings


def find_late_users(agent: Agent) -> list[GpuUse] | Unknown:
    """Return the GPUs of this node that stay in use for ``idle_s``, or ``shared_s`` if runs share them."""
    if agent.plan.num_gpus == 0:
        return []
    policy = default_policies() | agent.plan.profile.preflight.policy
    is_shared = "fail" not in (policy["gpu_idle"], policy["other_runs"])
    limit_s = agent.deadlines.shared_s if is_shared else agent.deadlines.idle_s
    return wait_until_idle(agent.parts.busy_gpus, agent.stop.wait, limit_s)


def find_late_busy(agent: Agent, use: str) -> list[Finding]:
    """Return a warning for each GPU that is in use beside the trial or the stored rollouts named ``use``."""
    return list(find_busy(find_late_users(agent), Level.WARNING, f"{use}: gpu"))


def judge_nodes(agent: Agent, transports: Mapping[str, Any] | None = None) -> list[Finding]:
    """Compare the nodes' manifests, or judge by them what NCCL told each rank that it uses."""
    found = [load_manifest(agent.run_dir.node(node).manifest) for node in agent.place.nodes]
    nodes = [manifest for manifest in found if manifest is not None]
    if not nodes:
        return []
    staged = (agent.plan, agent.run_dir)
    facts = make_facts(agent.plan, nodes[0])
    return judge(replace(facts, staged=staged, nodes=nodes, transports=transports or {}))


def make_facts(plan: Plan, manifest: Manifest) -> Facts:
    return Facts(manifest=manifest, hardware=plan.hardware, layout=plan.layout, limits=plan.profile.preflight)


def load_manifest(path: Path) -> Manifest | None:
    try:
        return Manifest.load(path)
    except BundleUnreadable:
        return None


def write_preflight(run_dir: RunDir, place: NodePlace, findings: Iterable[Finding]) -> None:
    record = {
        "schema": SCHEMA,
        "node": place.node,
        "allocation": place.allocation,
        "findings": [finding.to_json() for finding in findings],
    }
    write_json(run_dir.node(place.node).preflight, record)


def read_preflight(run_dir: RunDir, node: str, allocation: str) -> list[Finding] | None:
    """Read the findings of another node's agent; return None until that agent has written them in this allocation."""
    try:
        record = load_json(run_dir.node(node).preflight, schema=SCHEMA)
        if record["allocation"] != allocation:
            return None
        found = [Finding.from_json(item) for item in record["findings"]]
    except (BundleUnreadable, KeyError, ValueError):
        return None
    return [replace(item, where=f"nodes.{node}.{item.where}") for item in found]


def make_sampler(agent: Agent, current: Callable[[], Current]) -> Sampler:
    sensors = open_sensors() if agent.plan.num_gpus else None
    telemetry = agent.run_dir.node(agent.place.node).telemetry
    return Sampler(telemetry, agent.plan.profile.telemetry_interval_s, current, sensors)
