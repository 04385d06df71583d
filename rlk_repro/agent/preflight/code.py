"""Check the code that a run needs: the trainer's modules, RL-Kernel, pinned sources and the image."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.pins import find_pinned, load_record, match_pins
from rlk_repro.images.running import ROOT, check_running
from rlk_repro.plan import Plan
from rlk_repro.probes.extension import serves
from rlk_repro.rundir.manifest import Manifest
from rlk_repro.sources import RL_KERNEL
from rlk_repro.switches import COMMITS
from rlk_repro.workloads.checkouts import find_missing_commits, is_found
from rlk_repro.workloads.environment import profile_env
from rlk_repro.workloads.imports import find_absent, try_imports


def check_modules(facts: Facts) -> Iterator[Finding]:
    workload = facts.plan.run.workload
    absent = list(find_absent(workload.modules, _trainer_path(facts.plan)))
    yield from absent or try_imports(facts.plan)
    for name in workload.programs:
        if shutil.which(name) is None:
            yield wrong(f"program {name}", "on PATH", "missing")


def check_rl_kernel(facts: Facts) -> Iterator[Finding]:
    """Check that the enabled variant's trainer will find RL-Kernel; this check does not import RL-Kernel."""
    plan = facts.plan
    if not plan.needs_rl_kernel:
        return
    if plan.run.rl_kernel.commits is not None:
        for commit in find_missing_commits(plan):
            yield wrong(f"{COMMITS}/{commit}", f"a folder with {RL_KERNEL.module}/", "missing")
        return
    if is_found(RL_KERNEL.module, _trainer_path(plan)):
        return
    where = f"python module {RL_KERNEL.module}"
    if plan.run.rl_kernel.mode == "require":
        yield wrong(where, "installed (rl_kernel.mode is require)", "missing")
    else:
        yield Finding(Level.INFO, where, "installed", "missing: the enabled variant uses the trainer's own functions")


def _trainer_path(plan: Plan) -> str:
    return profile_env(plan)[0].get("PYTHONPATH", "")


def check_pins(facts: Facts) -> Iterator[Finding]:
    plan = facts.plan
    return match_pins(find_pinned(plan), facts.manifest, load_record(), plan.run.workload.patched_pins)


def check_image(facts: Facts) -> list[Finding]:
    return match_image(facts.plan, facts.manifest)


def match_image(plan: Plan, manifest: Manifest, root: Path = ROOT) -> list[Finding]:
    """Check that this node's agent runs in the stack's image, and that the image is complete and unchanged.

    A run without GPUs may use any image or environment.
    """
    platform = plan.hardware.image_platform
    is_container = manifest.sections.get("container", {}).get("is_container") is True
    is_meant = platform in plan.stack.locks or (is_container and platform in plan.stack.images)
    is_required = is_meant and platform != "cpu"
    return check_running(manifest.sections.get("code", {}), plan.stack, platform, root=root, is_required=is_required)


def check_architecture(facts: Facts) -> Iterator[Finding]:
    """Check that RL-Kernel's extension has code for these GPUs; otherwise calls fail or use no compiled kernel."""
    built = facts.mapping("code", "rl_kernel").get("extension_architectures")
    is_unused = facts.staged is not None and not facts.plan.needs_rl_kernel
    if is_unused or not isinstance(built, list):
        return
    for capability in sorted({str(device.get("compute_capability")) for device in facts.devices}):
        if re.fullmatch(r"\d+\.\d", capability) and not any(serves(name, capability) for name in built):
            expected = f"code for compute capability {capability}"
            yield wrong("code.rl_kernel.extension_architectures", expected, ", ".join(map(str, built)))
