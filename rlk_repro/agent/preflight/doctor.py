"""Can this machine run rlk-repro, and what would make it better?  Judgements over a manifest, each with one next step.

``look_around`` gathers what no manifest holds; ``diagnose`` only judges.  Nothing is changed, nothing is submitted.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import rlk_repro
from rlk_repro.base.units import format_bytes
from rlk_repro.probes.gpu import NO_VENDOR, busy_gpus
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.rundir.manifest import Fact, Manifest, Unknown

GIB: Final = 1 << 30
MIN_PYTHON: Final = (3, 11)
ENGINES: Final = ("docker", "podman", "enroot", "apptainer", "singularity")
TOOLS: Final = ("git", *ENGINES)
MODULES: Final = ("torch",)
# reading these from user space costs a system call or a slow bus access each time
SLOW_CLOCKS: Final = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
HARDWARE_SLOWDOWN: Final = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")


class Status(StrEnum):
    """``fail`` stops a run on this machine, ``warn`` limits it or makes its numbers worse."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One judgement; ``advice`` is the one next step, empty where all is well."""

    name: str
    status: Status
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status.value, "found": self.found, "advice": self.advice}


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What this process sees beside the manifest."""

    disk_free_bytes: int
    can_make_runs: bool
    tools: frozenset[str]
    clients: Mapping[str, bool]
    modules: frozenset[str]
    busy: list[GpuUse] | Unknown
    now_s: float
    installed_s: float


Section: TypeAlias = Mapping[str, Fact]
Judge: TypeAlias = Callable[[Manifest, Surroundings], Check]


def look_around(runs_root: Path, clients: Sequence[str]) -> Surroundings:
    """Gather what the judgements need: disk, tools and the clusters' ``clients`` on PATH, modules (found, never
    imported), GPU use, the clock.
    """
    existing = _find_existing(runs_root.absolute())
    return Surroundings(
        disk_free_bytes=shutil.disk_usage(existing).free,
        can_make_runs=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        tools=frozenset(tool for tool in TOOLS if shutil.which(tool)),
        clients={name: shutil.which(name) is not None for name in clients},
        modules=frozenset(name for name in MODULES if importlib.util.find_spec(name)),
        busy=busy_gpus(),
        now_s=time.time(),
        installed_s=Path(rlk_repro.__file__).stat().st_mtime,
    )


def _find_existing(path: Path) -> Path:
    """The path, or the nearest one above that is there and can be looked at."""
    return next((place for place in (path, *path.parents) if os.path.exists(place)), Path("/"))  # noqa: PTH110


def diagnose(manifest: Manifest, around: Surroundings) -> list[Check]:
    """Every judgement, in the order in which they are worth reading."""
    return [judge(manifest, around) for judge in JUDGES]


def worst(checks: list[Check]) -> Status:
    order = list(Status)
    return max((check.status for check in checks), key=order.index, default=Status.OK)


def _ok(name: str, found: object) -> Check:
    return Check(name=name, status=Status.OK, found=_words(found))


def _warn(name: str, found: object, advice: str) -> Check:
    return Check(name=name, status=Status.WARN, found=_words(found), advice=advice)


def _fail(name: str, found: object, advice: str) -> Check:
    return Check(name=name, status=Status.FAIL, found=_words(found), advice=advice)


def _words(found: object) -> str:
    return found.reason if isinstance(found, Unknown) else str(found)


def _fact(manifest: Manifest, section: str, name: str) -> Fact:
    return manifest.sections.get(section, {}).get(name, Unknown("not recorded"))


def _devices(manifest: Manifest) -> list[dict[str, Any]]:
    devices = _fact(manifest, "gpu", "devices")
    return devices if isinstance(devices, list) else []


def _where(devices: list[dict[str, Any]], is_bad: Callable[[dict[str, Any]], bool]) -> str:
    """The indices of the GPUs that something is wrong with: ``GPU 0, 3``, or nothing."""
    numbers = [str(device.get("index")) for device in devices if is_bad(device)]
    return f"GPU {', '.join(numbers)}" if numbers else ""


def _python(manifest: Manifest, _: Surroundings) -> Check:
    version = str(_fact(manifest, "code", "python"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers >= MIN_PYTHON:
        return _ok("python", version)
    return _fail("python", version, "install Python 3.11 or newer")


def _torch(manifest: Manifest, around: Surroundings) -> Check:
    if "torch" in around.modules:
        return _ok("torch", _package(manifest, "torch"))
    return _warn("torch", "not installed", "the reference trainer needs it: pip install 'rlk-repro[local]'")


def _git(_: Manifest, around: Surroundings) -> Check:
    if "git" in around.tools:
        return _ok("git", "on PATH")
    return _warn("git", "not on PATH", "install git: without it no bundle can say which commit ran")


def _rl_kernel(manifest: Manifest, _: Surroundings) -> Check:
    facts = _fact(manifest, "code", "rl_kernel")
    rl_kernel = facts if isinstance(facts, dict) else {}
    compiled = rl_kernel.get("is_compiled", facts)
    if isinstance(compiled, Unknown):
        advice = "the enabled variant needs it: install RL-Kernel, or measure noise with --variants baseline"
        return _warn("rl-kernel", compiled, advice)
    symbols = rl_kernel.get("extension_symbols")
    if compiled:
        return _ok("rl-kernel", f"compiled, binds {', '.join(symbols) if isinstance(symbols, list) else symbols}")
    if _fact(manifest, "gpu", "vendor") == "nvidia":
        advice = "build it where a GPU is visible: without the extension logp is plain PyTorch"
        return _warn("rl-kernel", "installed without its compiled extension", advice)
    return _ok("rl-kernel", "installed, pure Python")


def _disk(_: Manifest, around: Surroundings) -> Check:
    found = f"{format_bytes(around.disk_free_bytes)} free for runs"
    advice = "free some space, or point RLK_REPRO_RUNS to a larger file system"
    if not around.can_make_runs:
        return _fail("disk", "no run directory can be made here", "point RLK_REPRO_RUNS to a folder you may write to")
    if around.disk_free_bytes < GIB:
        return _fail("disk", found, advice)
    return _warn("disk", found, advice) if around.disk_free_bytes < 20 * GIB else _ok("disk", found)


def _memory(manifest: Manifest, _: Surroundings) -> Check:
    available, limit = _fact(manifest, "host", "memory_available_gib"), _fact(manifest, "host", "cgroup_memory_max_gib")
    sizes = [float(size) for size in (available, limit) if isinstance(size, int | float)]
    if not sizes:
        return _warn("memory", available, "check the free memory by hand before a large run")
    found = f"{min(sizes):g} GiB usable"
    if min(sizes) < 2:
        return _fail("memory", found, "end other work, or raise the memory limit of this container or job")
    return _ok("memory", found)


def _processors(manifest: Manifest, _: Surroundings) -> Check:
    usable, limit = _fact(manifest, "host", "num_cpus_usable"), _fact(manifest, "host", "cgroup_cpu_max")
    counts = [float(count) for count in (usable, limit) if isinstance(count, int | float)]
    found = f"{min(counts, default=0):g} usable of {_fact(manifest, 'host', 'num_cpus')}"
    if min(counts, default=0) < 2:
        return _warn("processors", found, "give the job at least 2 processors: one trains, one serves")
    return _ok("processors", found)


def _governor(manifest: Manifest, _: Surroundings) -> Check:
    governor = _fact(manifest, "host", "governor")
    if isinstance(governor, Unknown) or governor == "performance":
        return _ok("governor", governor)
    return _warn("governor", governor, "for steadier step times: sudo cpupower frequency-set -g performance")


def _shared_memory(manifest: Manifest, _: Surroundings) -> Check:
    size = _fact(manifest, "host", "dev_shm_gib")
    if isinstance(size, int | float) and size < 1:
        return _warn("shared memory", f"{size:g} GiB", "start the container with --ipc=host")
    return _ok("shared memory", f"{size} GiB")


def _open_files(manifest: Manifest, _: Surroundings) -> Check:
    limits = _fact(manifest, "host", "limits")
    soft = limits.get("nofile", {}).get("soft") if isinstance(limits, dict) else limits
    if isinstance(soft, int) and soft < 8192:
        return _warn("open files", f"limit {soft}", "Ray and vLLM open many sockets: ulimit -n 65536")
    return _ok("open files", f"limit {soft}")


def _clock(manifest: Manifest, around: Surroundings) -> Check:
    source = _fact(manifest, "host", "clock_source")
    if around.now_s < around.installed_s:
        return _fail("clock", "earlier than the installation of rlk-repro", "set the clock: timedatectl set-ntp true")
    if source in SLOW_CLOCKS:
        return _warn("clock", f"source {source}", "boot with clocksource=tsc: this source makes every timer slow")
    return _ok("clock", f"source {source}")


def _gpus(manifest: Manifest, _: Surroundings) -> Check:
    vendor, count = _fact(manifest, "gpu", "vendor"), _fact(manifest, "gpu", "count")
    if vendor == NO_VENDOR:
        return _warn("gpus", "none", "only --hardware cpu runs here: rlk-repro submit --cluster local --run smoke")
    if isinstance(count, Unknown):
        return _fail("gpus", f"{vendor}: {count.reason}", "install the driver, or pass the GPUs into the container")
    names = sorted({str(device.get("name")) for device in _devices(manifest)})
    return _ok("gpus", f"{count} × {', '.join(names)}, driver {_fact(manifest, 'gpu', 'driver')}")


def _gpu_use(_: Manifest, around: Surroundings) -> Check:
    if isinstance(around.busy, Unknown):
        return _warn("gpu use", around.busy, "check by hand that nobody else uses the GPUs")
    if around.busy:
        return _warn("gpu use", "; ".join(map(str, around.busy)), "wait for these processes, or ask for whole nodes")
    return _ok("gpu use", "idle")


def _gpu_errors(manifest: Manifest, _: Surroundings) -> Check:
    devices = _devices(manifest)
    failed = _where(devices, lambda device: _rows(device).get("is_failed") is True)
    if failed:
        return _fail("gpu memory", f"{failed}: row remapping failed", "drain the node and have the GPU replaced")
    uncorrected = _where(devices, lambda device: _count(device.get("ecc_uncorrected")) > 0)
    pending = _where(devices, lambda device: _rows(device).get("is_pending") is True)
    if uncorrected or pending:
        found = f"{uncorrected}: uncorrected errors" if uncorrected else f"{pending}: row remapping pending"
        return _fail("gpu memory", found, "drain the node and reset the GPU before measuring on it")
    off = _where(devices, lambda device: device.get("ecc_mode") == "disabled")
    if off:
        return _warn("gpu memory", f"{off}: ECC is off", "switch it on (nvidia-smi -e 1) or keep it off on every node")
    return _ok("gpu memory", "no errors" if devices else "no GPU")


def _gpu_partition(manifest: Manifest, _: Surroundings) -> Check:
    devices = _devices(manifest)
    mig = _where(devices, lambda device: device.get("mig_mode") == "enabled")
    if mig:
        return _fail("gpu partition", f"{mig}: MIG is on", "ask for whole GPUs, or switch MIG off (nvidia-smi -mig 0)")
    split = _where(devices, lambda device: _modes(device) - {"SPX", "NPS1"} != set())
    if split:
        return _warn("gpu partition", f"{split}: not SPX/NPS1", "ask for nodes in SPX and NPS1 mode")
    return _ok("gpu partition", "whole GPUs" if devices else "no GPU")


def _gpu_slowdown(manifest: Manifest, _: Surroundings) -> Check:
    def is_slow(device: dict[str, Any]) -> bool:
        reasons = device.get("throttle_reasons")
        return isinstance(reasons, list) and any(reason in HARDWARE_SLOWDOWN for reason in reasons)

    slow = _where(_devices(manifest), is_slow)
    if slow:
        return _warn("gpu slowdown", slow, "check cooling and power of the node: its times mean nothing now")
    return _ok("gpu slowdown", "none")


def _fabric(manifest: Manifest, _: Surroundings) -> Check:
    facts = _fact(manifest, "gpu", "fabric")
    fabric = facts if isinstance(facts, dict) else {}
    state, status = fabric.get("state", Unknown("no NVLink fabric")), fabric.get("status")
    if isinstance(state, Unknown) or state == "N/A" or (state == "Completed" and status == "Success"):
        return _ok("gpu fabric", state)
    return _fail("gpu fabric", f"{state}, {status}", "restart nvidia-fabricmanager or nvidia-imex on the node")


def _numa_balancing(manifest: Manifest, _: Surroundings) -> Check:
    value = _fact(manifest, "host", "numa_balancing")
    if value == 1 and _fact(manifest, "gpu", "vendor") == "amd":
        return _warn("numa balancing", "on", "AMD advises against it: sudo sysctl kernel.numa_balancing=0")
    return _ok("numa balancing", value)


def _scheduler(_: Manifest, around: Surroundings) -> Check:
    present = [name for name, is_there in around.clients.items() if is_there]
    if present:
        return _ok("scheduler", ", ".join(present))
    return _warn("scheduler", f"none of {', '.join(around.clients)}", "use --cluster local, or log in to the cluster")


def _engine(_: Manifest, around: Surroundings) -> Check:
    present = [tool for tool in ENGINES if tool in around.tools]
    if present:
        return _ok("containers", ", ".join(present))
    return _warn("containers", "no container runtime", "use a stack without images, or run where one is installed")


def _package(manifest: Manifest, name: str) -> object:
    packages = _fact(manifest, "code", "packages")
    return packages.get(name, "installed") if isinstance(packages, dict) else packages


def _rows(device: dict[str, Any]) -> dict[str, Any]:
    rows = device.get("remapped_rows")
    return rows if isinstance(rows, dict) else {}


def _modes(device: dict[str, Any]) -> set[str]:
    modes = (device.get("compute_partition"), device.get("memory_partition"))
    return {mode for mode in modes if isinstance(mode, str)}


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


JUDGES: Final[tuple[Judge, ...]] = (
    *(_python, _torch, _git, _rl_kernel),
    *(_disk, _memory, _processors, _governor, _shared_memory, _open_files, _clock),
    *(_gpus, _gpu_use, _gpu_errors, _gpu_partition, _gpu_slowdown, _fabric, _numa_balancing),
    *(_scheduler, _engine),
)
