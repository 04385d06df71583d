"""Run the preflight checks of one node; a check returns findings and never raises an error.

This module has the checks that every job needs; module ``checks`` lists those whose level a profile may change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rlk_repro.agent.preflight.base import Situation, find_level, judge_node
from rlk_repro.agent.preflight.checks import CHECKS
from rlk_repro.agent.preflight.parts import check_prepared
from rlk_repro.base import proc
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.places import hide_places
from rlk_repro.base.units import GIB
from rlk_repro.images.match import is_recorded
from rlk_repro.images.record import ImageRecord
from rlk_repro.images.running import ROOT, check_running, read_record
from rlk_repro.plan import Plan
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.host import parse_meminfo
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.rundir.paths import RunDir
from rlk_repro.sources import RL_KERNEL, SECTIONS
from rlk_repro.spec import Hardware, Stack
from rlk_repro.spec.values import PinName
from rlk_repro.switches import COMMITS
from rlk_repro.workloads.checkouts import find_missing_commits, is_found
from rlk_repro.workloads.environment import profile_env

SCHEMA: Final = 1
MAX_DRIFT_S: Final = 2.0
YEARS: Final = (2025, 2100)
# drivers report a few percent less memory than the data sheet; the next smaller GPU has at least 25 % less
MEMORY_TOLERANCE: Final = 0.05
IMPORT_SCRIPT: Final = Path(__file__).with_name("try_import.py")
# importing torch and Megatron-LM from a cold file system takes minutes
IMPORT_TIMEOUT_S: Final = 600.0
IMPORT_MAX_CHARS: Final = 300
# packages whose name differs from that of their module
IMPORT_DISTRIBUTIONS: Final = {"PIL": "pillow", "yaml": "pyyaml", "cv2": "opencv-python", "sklearn": "scikit-learn"}

_MEMINFO: Final = Path("/proc/meminfo")


def check_node(plan: Plan, run_dir: RunDir, manifest: Manifest, busy: list[GpuUse] | Unknown) -> list[Finding]:
    limits = plan.profile.preflight
    situation = Situation(
        manifest=manifest,
        hardware=plan.hardware,
        layout=plan.layout,
        limits=limits,
        has_enabled=plan.needs_rl_kernel,
        gpus_per_engine=plan.run.workload.gpus_per_engine(plan.hardware.hardware),
    )
    absent = [*check_modules(plan.run.workload.modules, _trainer_path(plan))]
    return [
        *check_writable(run_dir),
        *check_prepared(plan, run_dir),
        *check_room("disk", shutil.disk_usage(run_dir.root).free, limits.min_free_disk_gib),
        *check_room("memory", read_free_memory(), limits.min_free_memory_gib),
        *(absent or check_imports(plan)),
        *check_rl_kernel(plan),
        *check_ray_version(plan),
        *check_programs(plan.run.workload.programs),
        *check_hardware(plan.hardware, plan.layout.gpus_per_node, manifest),
        *check_pins(find_pinned(plan), manifest, find_record(), plan.run.workload.patched_pins),
        *check_image(plan, manifest),
        *(check_idle(busy, find_level("gpu_idle", limits)) if plan.layout.gpus_per_node else []),
        *judge_node(CHECKS, situation),
    ]


def find_pinned(plan: Plan) -> Stack:
    """Return the plan's stack, but leave out RL-Kernel's pin if the run compares two RL-Kernel commits."""
    if plan.run.rl_kernel.commits is None:
        return plan.stack
    pins = {name: pin for name, pin in plan.stack.pins.items() if name != "rl_kernel"}
    return plan.stack.model_copy(update={"pins": pins})


def check_writable(run_dir: RunDir) -> Iterator[Finding]:
    try:
        run_dir.trials.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=run_dir.trials, prefix=".partial-") as stream:
            stream.write(b"\0")
            stream.flush()
    except OSError as error:
        yield Finding(Level.BLOCKING, "run directory", "writable", str(error.strerror))


def check_clock(year: int, drift_s: float) -> Iterator[Finding]:
    """Check that UTC is plausible and that it runs as fast as the monotonic clock."""
    if not YEARS[0] <= year <= YEARS[1]:
        yield Finding(Level.WARNING, "clock", f"a year from {YEARS[0]} to {YEARS[1]}", str(year))
    if abs(drift_s) > MAX_DRIFT_S:
        yield Finding(
            Level.WARNING,
            "clock",
            "UTC as fast as the monotonic clock",
            f"UTC moved by {drift_s:+.1f} s against the monotonic clock",
        )


def check_room(what: str, free_bytes: int | None, min_gib: float) -> Iterator[Finding]:
    if free_bytes is None:
        yield Finding(Level.WARNING, what, f"{min_gib:g} GiB free", f"an unknown amount of free {what}")
    elif free_bytes < min_gib * GIB:
        yield Finding(Level.BLOCKING, what, f"{min_gib:g} GiB free", f"{free_bytes / GIB:.1f} GiB")


def read_free_memory(path: Path = _MEMINFO) -> int | None:
    """Return how many bytes of memory the kernel can give without swapping."""
    try:
        return parse_meminfo(path.read_text()).get("MemAvailable")
    except OSError:
        return None


def check_modules(names: Iterable[str], trainer_path: str = "") -> Iterator[Finding]:
    for name in names:
        if not is_found(name, trainer_path):
            yield Finding(Level.BLOCKING, f"python module {name}", "installed", "missing")


def check_programs(names: Iterable[str]) -> Iterator[Finding]:
    for name in names:
        if shutil.which(name) is None:
            yield Finding(Level.BLOCKING, f"program {name}", "on PATH", "missing")


def check_imports(plan: Plan) -> Iterator[Finding]:
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
        yield Finding(Level.BLOCKING, where, expected, found)
    elif done.is_timeout:
        yield Finding(Level.WARNING, where, f"imported within {IMPORT_TIMEOUT_S:g} s", "not imported yet")
    elif not done.is_ok:
        yield Finding(Level.BLOCKING, where, "no error", hide_places(done.last_words)[:IMPORT_MAX_CHARS])


def _read_missing(output: str) -> list[str]:
    try:
        return [str(name) for name in json.loads(output.splitlines()[-1])]
    except (IndexError, ValueError, TypeError):
        return []


def check_rl_kernel(plan: Plan) -> Iterator[Finding]:
    """Check that the enabled variant's trainer will find RL-Kernel; this check does not import RL-Kernel."""
    if not plan.needs_rl_kernel:
        return
    if plan.run.rl_kernel.commits is not None:
        for commit in find_missing_commits(plan):
            yield Finding(Level.BLOCKING, f"{COMMITS}/{commit}", f"a folder with {RL_KERNEL.module}/", "missing")
        return
    if is_found(RL_KERNEL.module, _trainer_path(plan)):
        return
    where = f"python module {RL_KERNEL.module}"
    if plan.run.rl_kernel.mode == "require":
        yield Finding(Level.BLOCKING, where, "installed (rl_kernel.mode is require)", "missing")
    else:
        yield Finding(Level.INFO, where, "installed", "missing: the enabled variant uses the trainer's own functions")


def check_ray_version(plan: Plan) -> Iterator[Finding]:
    """Check that the image has the version of Ray that the profile sets for KubeRay (``ray_version``)."""
    settings = plan.profile.kubernetes
    if settings is None or settings.kind != "rayjob" or settings.ray_version is None:
        return
    try:
        found = metadata.version("ray")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != settings.ray_version:
        told = f"Ray {settings.ray_version}, as the profile sets for KubeRay"
        yield Finding(Level.WARNING, "kubernetes.ray_version", told, f"{found} in the image")


def _trainer_path(plan: Plan) -> str:
    return profile_env(plan)[0].get("PYTHONPATH", "")


def check_hardware(hardware: Hardware, num_gpus: int, manifest: Manifest) -> Iterator[Finding]:
    machine = manifest.sections.get("host", {}).get("machine")
    if hardware.machine != "any" and isinstance(machine, str) and machine != hardware.machine:
        yield Finding(Level.BLOCKING, "host.machine", hardware.machine, machine)
    if num_gpus == 0:
        return
    gpu = manifest.sections.get("gpu", {})
    count = gpu.get("count")
    if not isinstance(count, int) or count < num_gpus:
        yield Finding(Level.BLOCKING, "gpu.count", f"at least {num_gpus}", str(count))
    driver = gpu.get("driver")
    if isinstance(driver, str) and _version(driver) < _version(hardware.driver_floor):
        yield Finding(Level.BLOCKING, "gpu.driver", f"{hardware.driver_floor} or newer", driver)
    devices = gpu.get("devices", Unknown("not recorded"))
    described: list[dict[str, Any]] = devices if isinstance(devices, list) else []
    if len(described) < num_gpus:
        found = str(devices) if isinstance(devices, Unknown) else str(len(described))
        yield Finding(Level.BLOCKING, "gpu.devices", f"at least {num_gpus} GPUs in the manifest", found)
    for name in sorted({str(item.get("name")) for item in described}):
        if hardware.name_part not in name or any(part in name for part in hardware.refused_name_parts):
            yield Finding(Level.BLOCKING, "gpu.devices.name", hardware.title, name)
    yield from _check_gpu_memory(hardware.gpu_memory_gib, described)


def _check_gpu_memory(expected_gib: float, devices: list[dict[str, Any]]) -> Iterator[Finding]:
    """GPUs with one name differ in memory: an A100 has 40 GB or 80 GB."""
    where, expected = "gpu.devices.memory_total_mib", f"{expected_gib:g} GiB ± {MEMORY_TOLERANCE:.0%}"
    for found in sorted({item.get("memory_total_mib", Unknown("not recorded")) for item in devices}, key=str):
        if isinstance(found, Unknown):
            yield Finding(Level.WARNING, where, expected, str(found))
        elif abs(found / 1024 - expected_gib) > MEMORY_TOLERANCE * expected_gib:
            yield Finding(Level.BLOCKING, where, expected, f"{found / 1024:.1f} GiB")


def check_image(plan: Plan, manifest: Manifest, root: Path = ROOT) -> list[Finding]:
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


def check_pins(
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
            yield Finding(Level.BLOCKING, f"{where}.tree", told, f"{tree} (without this patch)")
            continue
        if isinstance(commit, Unknown) and pin.tree and not isinstance(tree, Unknown):
            is_pinned = pin.holds_tree(tree)
            wrong, expected, found = "tree", _explain_pin(pin.tree, stack, pin.commit), str(tree)
        else:
            is_pinned = commit == pin.commit
            wrong, expected, found = "commit", _explain_pin(pin.commit, stack), str(commit)
        if not is_pinned:
            yield Finding(Level.BLOCKING, f"{where}.{wrong}", expected, found)
        elif source.get("is_dirty") is True and not (
            tree == pin.patched_tree or is_recorded(image, SECTIONS[name], source)
        ):
            yield Finding(Level.BLOCKING, f"{where}.is_dirty", f"{pin.commit} unchanged", "changed files")


def _explain_pin(expected: str, stack: Stack, commit: str = "") -> str:
    files = f" (the files of {commit[:12]})" if commit else ""
    return f"{expected}{files}, pinned by stack {stack.stack}; --stack host uses what is installed"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def check_idle(busy: list[GpuUse] | Unknown, level: Level, where: str = "gpu") -> Iterator[Finding]:
    if isinstance(busy, Unknown):
        yield Finding(Level.WARNING, where, "idle", str(busy))
        return
    for gpu in busy:
        yield Finding(level, where, "idle", str(gpu))


def wait_until_idle(
    busy_gpus: Callable[[], list[GpuUse] | Unknown], wait: Callable[[float], bool], deadline_s: float
) -> list[GpuUse] | Unknown:
    """Return the GPUs that stay busy until the deadline: a driver may free a killed process's memory late.

    ``wait`` sleeps for some seconds, and returns True to end the wait.
    """
    until = time.monotonic() + deadline_s
    pause_s = 0.1
    while (busy := busy_gpus()) and isinstance(busy, list) and time.monotonic() < until and not wait(pause_s):
        pause_s = min(pause_s * 2, 2.0)
    return busy


def preflight_record(node: str, allocation: str, findings: Iterable[Finding]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "node": node,
        "allocation": allocation,
        "findings": [finding.to_json() for finding in findings],
    }
