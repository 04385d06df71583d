"""Find out whether this machine can run rlk-repro, and name one next step per problem.

The doctor changes nothing and submits nothing.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import rlk_repro
from rlk_repro.agent.preflight.base import Check, Situation
from rlk_repro.agent.preflight.checks import CHECKS
from rlk_repro.base.answer import Answer
from rlk_repro.base.disk import can_make, find_existing
from rlk_repro.base.units import GIB, format_bytes
from rlk_repro.probes.gpu import NO_VENDOR, busy_gpus
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.spec import Hardware, Layout, Preflight

ENGINES: Final = ("docker", "podman", "enroot", "apptainer", "singularity")
TOOLS: Final = ("git", *ENGINES)
MODULES: Final = ("torch",)


ADVICE: Final[Mapping[str, str]] = {
    "governor": "to make step times vary less: sudo cpupower frequency-set -g performance",
    "numa_balancing": "sudo sysctl kernel.numa_balancing=0",
    "other_runs": "wait until the other run has ended, or give each run its own GPUs (docs/preflight.md)",
    "shared_memory": "start the container with --ipc=host",
    "open_files": "Ray and vLLM open many sockets: raise the hard limit, ulimit -Hn 65536",
    "clock_source": "boot with clocksource=tsc: the current clock source makes every reading of the time slow",
    "gpu_errors": "drain the node and reset the GPU before measuring on it",
    "gpu_memory_repair": "drain the node and reset the GPU; replace the GPU if its memory repair failed",
    "gpu_ecc_mode": "switch ECC on (nvidia-smi -e 1), or switch ECC off on every node",
    "gpu_partition": "use whole GPUs: switch MIG off (nvidia-smi -mig 0), or set the modes SPX and NPS1",
    "gpu_slowdown": "check cooling and power of the node: its step times are not usable now",
    "gpu_fabric": "restart nvidia-fabricmanager or nvidia-imex on the node",
}
"""The doctor's advice if a preflight check fails, by the name of the check."""


class Health(StrEnum):
    """A check's status.  ``fail``: a run would stop here.  ``warn``: not all runs work, or results are less exact."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Answer):
    """One result about this machine; ``advice`` is the next step, and is empty if ``status`` is ok."""

    name: str
    status: Health
    found: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnoses(Answer):
    checks: tuple[Diagnosis, ...]
    manifest: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    disk_free_bytes: int
    can_make_runs: bool
    tools: frozenset[str]
    clients: Mapping[str, bool]
    modules: frozenset[str]
    busy: list[GpuUse] | Unknown
    now_s: float
    installed_s: float


Judge: TypeAlias = Callable[[Situation, Surroundings], Diagnosis]


def look_around(runs_root: Path, clients: Sequence[str]) -> Surroundings:
    """Collect the facts that no manifest holds; ``clients`` are programs that submit jobs, such as ``sbatch``."""
    return Surroundings(
        disk_free_bytes=shutil.disk_usage(find_existing(runs_root)).free,
        can_make_runs=can_make(runs_root),
        tools=frozenset(tool for tool in TOOLS if shutil.which(tool)),
        clients={name: shutil.which(name) is not None for name in clients},
        modules=frozenset(name for name in MODULES if importlib.util.find_spec(name)),
        busy=busy_gpus(),
        now_s=time.time(),
        installed_s=Path(rlk_repro.__file__).stat().st_mtime,
    )


def diagnose(manifest: Manifest, around: Surroundings, hardware: Hardware) -> list[Diagnosis]:
    """Return the results about this machine, then a summary of the preflight checks, then each failed check."""
    devices = manifest.sections.get("gpu", {}).get("devices")
    layout = Layout(gpus_per_node=len(devices) if isinstance(devices, list) else 0)
    node = Situation(manifest=manifest, hardware=hardware, layout=layout, limits=Preflight())
    found = [_complain(check, node) for check in CHECKS]
    complaints = [item for item in found if item is not None]
    summary = _ok("preflight", f"{len(found) - len(complaints)} of {len(found)} checks passed")
    return [*(judge(node, around) for judge in JUDGES), summary, *complaints]


def _complain(check: Check, situation: Situation) -> Diagnosis | None:
    complaints = list(check.judge(situation))
    if not complaints:
        return None
    found = "; ".join(f"{item.where} {item.found}, expected {item.expected}" for item in complaints)
    tell = _fail if check.policy == "fail" else _warn
    return tell(check.name, found, ADVICE.get(check.name, "docs/preflight.md explains this check"))


def _ok(name: str, found: object) -> Diagnosis:
    return Diagnosis(name=name, status=Health.OK, found=_words(found))


def _warn(name: str, found: object, advice: str) -> Diagnosis:
    return Diagnosis(name=name, status=Health.WARN, found=_words(found), advice=advice)


def _fail(name: str, found: object, advice: str) -> Diagnosis:
    return Diagnosis(name=name, status=Health.FAIL, found=_words(found), advice=advice)


def _words(found: object) -> str:
    return found.reason if isinstance(found, Unknown) else str(found)


def _python(node: Situation, _: Surroundings) -> Diagnosis:
    return _ok("python", node.fact("code", "python"))


def _torch(node: Situation, around: Surroundings) -> Diagnosis:
    if "torch" in around.modules:
        return _ok("torch", _package(node, "torch"))
    return _warn("torch", "not installed", "the reference trainer needs torch: pip install 'rlk-repro[local]'")


def _git(_: Situation, around: Surroundings) -> Diagnosis:
    if "git" in around.tools:
        return _ok("git", "on PATH")
    return _warn("git", "not found on PATH", "install git, so that bundles name the commits of the code that ran")


def _rl_kernel(node: Situation, _: Surroundings) -> Diagnosis:
    rl_kernel = node.mapping("code", "rl_kernel")
    compiled = rl_kernel.get("is_compiled", node.fact("code", "rl_kernel"))
    if isinstance(compiled, Unknown):
        advice = "install RL-Kernel for the enabled variant, or measure noise with --variants baseline"
        return _warn("rl-kernel", compiled, advice)
    symbols = rl_kernel.get("extension_symbols")
    if compiled:
        return _ok("rl-kernel", f"compiled functions: {', '.join(symbols) if isinstance(symbols, list) else symbols}")
    if node.fact("gpu", "vendor") == "nvidia":
        advice = "build RL-Kernel where a GPU is visible: without the extension, RL-Kernel computes logp in PyTorch"
        return _warn("rl-kernel", "installed without its compiled extension", advice)
    return _ok("rl-kernel", "installed without a compiled extension (pure Python)")


def _disk(_: Situation, around: Surroundings) -> Diagnosis:
    found = f"{format_bytes(around.disk_free_bytes)} free for runs"
    advice = "free some space, or point RLK_REPRO_RUNS to a larger file system"
    if not around.can_make_runs:
        return _fail("disk", "cannot create a run directory here", "point RLK_REPRO_RUNS to a folder you may write to")
    if around.disk_free_bytes < GIB:
        return _fail("disk", found, advice)
    return _warn("disk", found, advice) if around.disk_free_bytes < 20 * GIB else _ok("disk", found)


def _memory(node: Situation, _: Surroundings) -> Diagnosis:
    available, limit = node.fact("host", "memory_available_gib"), node.fact("host", "cgroup_memory_max_gib")
    sizes = [float(size) for size in (available, limit) if isinstance(size, int | float)]
    if not sizes:
        return _warn("memory", available, "check the free memory by hand before a large run")
    found = f"{min(sizes):g} GiB usable"
    if min(sizes) < 2:
        return _fail("memory", found, "stop other processes, or raise the memory limit of this container or job")
    return _ok("memory", found)


def _processors(node: Situation, _: Surroundings) -> Diagnosis:
    usable, limit = node.fact("host", "num_cpus_usable"), node.fact("host", "cgroup_cpu_max")
    counts = [float(count) for count in (usable, limit) if isinstance(count, int | float)]
    found = f"usable CPUs: {min(counts, default=0):g}, in the machine: {node.fact('host', 'num_cpus')}"
    if min(counts, default=0) < 2:
        return _warn("processors", found, "give the job at least 2 CPUs: one for training, one for generation")
    return _ok("processors", found)


def _clock(node: Situation, around: Surroundings) -> Diagnosis:
    if around.now_s < around.installed_s:
        return _fail(
            "clock", "the clock shows a time before rlk-repro's installation", "set the clock: timedatectl set-ntp true"
        )
    return _ok("clock", f"source {node.fact('host', 'clock_source')}")


def _gpus(node: Situation, _: Surroundings) -> Diagnosis:
    vendor, count = node.fact("gpu", "vendor"), node.fact("gpu", "count")
    if vendor == NO_VENDOR:
        return _warn("gpus", "none", "only --hardware cpu runs here: rlk-repro submit --cluster local --run smoke")
    if isinstance(count, Unknown):
        return _fail("gpus", f"{vendor}: {count.reason}", "install the driver, or pass the GPUs into the container")
    names = sorted({str(device.get("name")) for device in node.devices})
    return _ok("gpus", f"{count} × {', '.join(names)}, driver {node.fact('gpu', 'driver')}")


def _gpu_use(_: Situation, around: Surroundings) -> Diagnosis:
    if isinstance(around.busy, Unknown):
        return _warn("gpu use", around.busy, "check by hand that no other process uses the GPUs")
    if around.busy:
        return _warn("gpu use", "; ".join(map(str, around.busy)), "wait for these processes, or ask for whole nodes")
    return _ok("gpu use", "idle")


def _scheduler(_: Situation, around: Surroundings) -> Diagnosis:
    present = [name for name, is_there in around.clients.items() if is_there]
    if present:
        return _ok("scheduler", ", ".join(present))
    return _warn(
        "scheduler",
        f"none of {', '.join(around.clients)} found on PATH",
        "use --cluster local, or log in to the cluster",
    )


def _engine(_: Situation, around: Surroundings) -> Diagnosis:
    present = [tool for tool in ENGINES if tool in around.tools]
    if present:
        return _ok("containers", ", ".join(present))
    return _warn(
        "containers", "no container runtime found", "use a stack without images, or install a container runtime"
    )


def _package(node: Situation, name: str) -> object:
    packages = node.fact("code", "packages")
    return packages.get(name, "installed") if isinstance(packages, dict) else packages


JUDGES: Final[tuple[Judge, ...]] = (
    *(_python, _torch, _git, _rl_kernel),
    *(_disk, _memory, _processors, _clock),
    *(_gpus, _gpu_use, _scheduler, _engine),
)
