"""Do the tasks of every node's agent, leader or follower: manifest, preflight record, telemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import rlk_repro
from rlk_repro.agent.gpu_sensors import open_sensors
from rlk_repro.agent.parts import NodePlace, Parts
from rlk_repro.agent.preflight.checks import judge
from rlk_repro.agent.preflight.facts import Facts
from rlk_repro.agent.preflight.gpu import wait_until_idle
from rlk_repro.agent.resume import set_node_aside
from rlk_repro.agent.stop import Stop
from rlk_repro.agent.telemetry import Current, Sampler
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, write_bytes, write_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.secrets import Scrubber
from rlk_repro.base.units import name_some
from rlk_repro.images.build import CONTEXT
from rlk_repro.plan import Plan
from rlk_repro.probes import folder
from rlk_repro.probes.checkout import make_patch
from rlk_repro.probes.code import SECTION
from rlk_repro.rundir.manifest import (
    OWN_PATCH,
    PATCH_IS_SCRUBBED,
    PATCH_IS_WHOLE,
    Fact,
    Manifest,
    Unknown,
    diff_manifests,
)
from rlk_repro.rundir.paths import NodeDir, RunDir
from rlk_repro.sources import OURSELVES
from rlk_repro.workloads.checkouts import trainer_path
from rlk_repro.workloads.environment import profile_env

SCHEMA: Final = 1
POLL_S = 0.5
MAX_PATCH_BYTES: Final = 1 << 20
_BINARY: Final = b"\nGIT binary patch\n"


def describe_node(
    plan: Plan, run_dir: RunDir, place: NodePlace, parts: Parts, stop: Stop, known: Iterable[Finding] = ()
) -> list[Finding]:
    """Write this node's manifest and preflight record; return the findings: first those in ``known``, then new ones.

    The files of an earlier agent move to ``earlier/<n>/``; facts that changed since then become findings.
    """
    node = run_dir.node(place.node)
    earlier = set_node_aside(node)
    with trainer_path(plan):
        probed = parts.probe_node(place.node)
    sections = {**probed.sections, folder.SECTION: folder.probe_folder(run_dir.root)}
    manifest = replace(probed, sections=sections)
    if place.is_leader:
        manifest = with_own_patch(manifest, run_dir, Scrubber.from_environment(named=profile_env(plan)[1].values()))
    write_json(node.manifest, manifest.to_json())
    busy = wait_until_idle(parts.busy_gpus, stop.wait, parts.deadlines.idle_s) if plan.num_gpus else []
    facts = replace(make_facts(plan, manifest), staged=(plan, run_dir), busy=busy)
    changes = [] if earlier is None else find_changes(earlier, manifest)
    findings = [*known, *judge(facts), *changes]
    write_preflight(run_dir, place, findings)
    return findings


def find_changes(earlier: NodeDir, manifest: Manifest) -> list[Finding]:
    before = load_manifest(earlier.manifest)
    return [item for item in diff_manifests(before, manifest) if item.level is not Level.INFO] if before else []


def find_unlike_nodes(plan: Plan, run_dir: RunDir, place: NodePlace) -> list[Finding]:
    found = [load_manifest(run_dir.node(node).manifest) for node in place.nodes]
    manifests = [manifest for manifest in found if manifest is not None]
    if not manifests:
        return []
    return judge(replace(make_facts(plan, manifests[0]), nodes=manifests))


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
    return [Finding(item.level, f"nodes.{node}.{item.where}", item.expected, item.found) for item in found]


def make_sampler(plan: Plan, run_dir: RunDir, place: NodePlace, current: Callable[[], Current]) -> Sampler:
    sensors = open_sensors() if plan.num_gpus else None
    return Sampler(run_dir.node(place.node).telemetry, plan.profile.telemetry_interval_s, current, sensors)


def wait_for(is_there: Callable[[], bool], stop: Stop, deadline_s: float) -> bool:
    """Poll every 0.5 s until ``is_there`` returns true, the deadline passes or a signal asks the agent to stop."""
    until = time.monotonic() + deadline_s
    while not is_there():
        if time.monotonic() >= until or stop.wait(POLL_S):
            return False
    return True


def with_own_patch(manifest: Manifest, run_dir: RunDir, scrubber: Scrubber) -> Manifest:
    """Write the checkout's changes as a patch, without secrets; the manifest says whether the patch is complete.

    The commit alone does not identify the code that ran.
    """
    own = manifest.sections.get(SECTION, {}).get(OURSELVES.section)
    if not isinstance(own, dict) or own.get("is_dirty") is not True:
        return manifest
    facts = {**own, OWN_PATCH: _write_patch(run_dir, scrubber)}
    code = {**manifest.sections[SECTION], OURSELVES.section: facts}
    return replace(manifest, sections={**manifest.sections, SECTION: code})


def _write_patch(run_dir: RunDir, scrubber: Scrubber) -> Fact:
    made = make_patch(Path(rlk_repro.__file__).parent, CONTEXT)
    if isinstance(made, Unknown):
        return made
    patch, untracked = made
    lacking = f", which lacks files outside the commit: {name_some(untracked)}" if untracked else ""
    if not patch:
        return Unknown(f"no patch{lacking or ', because no changed file belongs to the package'}")
    if len(patch) > MAX_PATCH_BYTES:
        return Unknown(f"the patch is larger than {MAX_PATCH_BYTES >> 20} MiB")
    if _BINARY in patch:
        return Unknown("the changes include binary files, which may hide secrets")
    clean = scrubber.bytes(patch)
    write_bytes(run_dir.own_patch, clean)
    return (PATCH_IS_WHOLE if clean == patch else PATCH_IS_SCRUBBED) + lacking
