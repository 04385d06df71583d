"""Check the code that a run needs: the trainer's modules, RL-Kernel, pinned sources and the image."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.base import proc
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.places import hide_places
from rlk_repro.images.match import is_recorded
from rlk_repro.images.record import ImageRecord
from rlk_repro.images.running import ROOT, check_running, read_record
from rlk_repro.plan import Plan
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.sources import RL_KERNEL, SECTIONS
from rlk_repro.spec import Stack
from rlk_repro.spec.values import PinName
from rlk_repro.switches import COMMITS
from rlk_repro.workloads.checkouts import find_missing_commits, is_found
from rlk_repro.workloads.environment import profile_env

IMPORT_SCRIPT: Final = Path(__file__).with_name("try_import.py")
# importing torch and Megatron-LM from a cold file system takes minutes
IMPORT_TIMEOUT_S: Final = 600.0
IMPORT_MAX_CHARS: Final = 300
# packages whose name differs from that of their module
IMPORT_DISTRIBUTIONS: Final = {"PIL": "pillow", "yaml": "pyyaml", "cv2": "opencv-python", "sklearn": "scikit-learn"}


def check_modules(facts: Facts) -> Iterator[Finding]:
    workload = facts.plan.run.workload
    absent = list(find_absent(workload.modules, _trainer_path(facts.plan)))
    yield from absent or try_imports(facts.plan)
    for name in workload.programs:
        if shutil.which(name) is None:
            yield wrong(f"program {name}", "on PATH", "missing")


def find_absent(names: Iterable[str], trainer_path: str = "") -> Iterator[Finding]:
    for name in names:
        if not is_found(name, trainer_path):
            yield wrong(f"python module {name}", "installed", "missing")


def try_imports(plan: Plan) -> Iterator[Finding]:
    """Import the trainer's modules in a child process; one finding names all missing ones and how to install them."""
    names = plan.run.workload.imports
    if not names:
        return
    where = f"import {', '.join(names)}"
    env = {**os.environ, **profile_env(plan)[0]}
    done = proc.run([sys.executable, str(IMPORT_SCRIPT), *names], env=env, timeout_s=IMPORT_TIMEOUT_S)
    missing = _read_missing(done.stdout)
    if missing:
        wanted = " ".join(IMPORT_DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in missing)
        expected, found = f"all modules installed (by pip install {wanted})", f"not installed: {', '.join(missing)}"
        yield wrong(where, expected, found)
    elif done.is_timeout:
        yield Finding(Level.WARNING, where, f"imported within {IMPORT_TIMEOUT_S:g} s", "not imported yet")
    elif not done.is_ok:
        yield wrong(where, "no error", hide_places(done.last_words)[:IMPORT_MAX_CHARS])


def _read_missing(output: str) -> list[str]:
    try:
        return [str(name) for name in json.loads(output.splitlines()[-1])]
    except (IndexError, ValueError, TypeError):
        return []


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
    return match_pins(find_pinned(plan), facts.manifest, find_record(), plan.run.workload.patched_pins)


def find_pinned(plan: Plan) -> Stack:
    """Return the plan's stack, without RL-Kernel's pin if another implementation or two commits of it run."""
    is_other = bool(plan.routed) and not plan.needs_rl_kernel
    if plan.run.rl_kernel.commits is None and not is_other:
        return plan.stack
    pins = {name: pin for name, pin in plan.stack.pins.items() if name != "rl_kernel"}
    return plan.stack.model_copy(update={"pins": pins})


def match_pins(
    stack: Stack, manifest: Manifest, image: ImageRecord | None = None, patched: Collection[PinName] = ()
) -> Iterator[Finding]:
    """Check that this node has the stack's pinned sources; those named in ``patched`` must also have upstream's patch.

    Sources without a known commit pass if their files have the hash of the pinned commit's files.  Changed sources pass
    if they equal the stack's patched files, or if the record of the node's image lists the same changes.
    """
    code = manifest.sections.get("code", {})
    for name, pin in stack.pins.items():
        where = f"code.{SECTIONS[name]}"
        facts = code.get(SECTIONS[name])
        source: dict[str, Any] = facts if isinstance(facts, dict) else {}
        commit, tree = (source.get(fact, Unknown("not recorded")) for fact in ("commit", "tree"))
        if name in patched and pin.patched_tree and tree == pin.tree:
            told = f"{pin.patched_tree} (with upstream's patch)"
            yield wrong(f"{where}.tree", told, f"{tree} (without this patch)")
            continue
        if isinstance(commit, Unknown) and pin.tree and not isinstance(tree, Unknown):
            is_pinned = pin.holds_tree(tree)
            what, expected, found = "tree", _explain_pin(pin.tree, stack, pin.commit), str(tree)
        else:
            is_pinned = commit == pin.commit
            what, expected, found = "commit", _explain_pin(pin.commit, stack), str(commit)
        if not is_pinned:
            yield wrong(f"{where}.{what}", expected, found)
        elif source.get("is_dirty") is True and not (
            tree == pin.patched_tree or is_recorded(image, SECTIONS[name], source)
        ):
            yield wrong(f"{where}.is_dirty", f"{pin.commit} unchanged", "changed files")


def _explain_pin(expected: str, stack: Stack, commit: str = "") -> str:
    files = f" (the files of {commit[:12]})" if commit else ""
    return f"{expected}{files}, pinned by stack {stack.stack}; --stack host uses what is installed"


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


def find_record(root: Path = ROOT) -> ImageRecord | None:
    """Return the image's record, or None if the record is missing or invalid; ``check_image`` reports why."""
    try:
        record = read_record(root)
    except BundleUnreadable:
        return None
    return record if isinstance(record, ImageRecord) else None


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


def serves(architecture: str, capability: str) -> bool:
    """Whether code for an architecture (``sm_90``) runs on a GPU with a compute capability (``9.0``).

    Machine code (``sm_``) also runs on later minor versions, and PTX (``compute_``) also on later major versions.
    Code for ``sm_90a`` runs on 9.0 only (CUDA programming guide, binary and PTX compatibility).
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if match is None:
        return False
    built, (major, minor) = (int(match[2]), int(match[3])), map(int, capability.split("."))
    if match[4]:
        return built == (major, minor)
    return built <= (major, minor) and (match[1] == "compute" or built[0] == major)
