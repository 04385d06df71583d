"""Check the files that a run needs: prepared files, the trainer's modules, RL-Kernel, pinned sources, the image."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.pins import find_pinned, load_record, match_pins
from rlk_repro.images.running import match_image
from rlk_repro.plan import Plan
from rlk_repro.prepare.contents import check_parts
from rlk_repro.probes.extension import serves
from rlk_repro.rundir.paths import RolloutDir
from rlk_repro.sources import RL_KERNEL
from rlk_repro.switches import COMMITS
from rlk_repro.workloads import list_run_folders
from rlk_repro.workloads.checkouts import find_missing_commits, is_found
from rlk_repro.workloads.environment import profile_env
from rlk_repro.workloads.imports import try_imports


def check_modules(facts: Facts) -> Iterator[Finding]:
    workload = facts.plan.run.workload
    absent = [name for name in workload.modules if not is_found(name, _trainer_path(facts.plan))]
    for name in absent:
        yield wrong(f"python module {name}", "installed", "missing")
    if not absent:
        yield from try_imports(facts.plan)
    for name in workload.programs:
        if shutil.which(name) is None:
            yield wrong(f"program {name}", "on PATH", "missing")


def check_prepared(facts: Facts) -> Iterator[Finding]:
    """Check that this node can read the prepared files that ``submit`` recorded."""
    plan, run_dir = facts.plan, facts.run_dir
    rollouts = [RolloutDir(Path()).file(number).name for number in range(plan.run.measure.num_stored)]
    return check_parts(run_dir.prepared, list_run_folders(plan, run_dir), rollouts)


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
