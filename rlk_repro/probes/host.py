"""Find facts of the machine apart from GPUs and network: kernel, processor, memory, limits, control group."""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.secrets import scrub
from rlk_repro.base.units import GIB
from rlk_repro.probes.gpu_use import VISIBLE
from rlk_repro.probes.sources import agreed, derive, known_or, list_names, locate, read_int, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

SECTION: Final = "host"
CPU: Final = "/sys/devices/system/cpu"
NODES: Final = "/sys/devices/system/node"
CGROUP: Final = "/sys/fs/cgroup"
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  (only looked up)
UNLIMITED: Final = "unlimited"

# On Arm, /proc/cpuinfo holds no model name.  This is the implementer and the part number of Grace's cores.
ARM_CORES: Final = {("0x41", "0xd4f"): "Neoverse-V2"}
# These kernel parameters affect speed.  Other parameters can identify the machine and its disks.
TUNING: Final = re.compile(
    r"mitigations|nosmt|mce|iommu(?:\.\w+)?|(?:intel|amd)_iommu|swiotlb|isolcpus|nohz(?:_full)?|rcu_nocbs|irqaffinity|"
    r"numa_balancing|(?:default_)?hugepagesz?|transparent_hugepage|(?:intel|amd)_pstate|idle|processor\.\w+|"
    r"intel_idle\.\w+|cpuidle\.\w+|cpufreq\.\w+|clocksource|tsc|preempt|skew_tick|nmi_watchdog|nowatchdog|psi|"
    r"cgroup_\w+|systemd\.unified_cgroup_hierarchy|pci|pcie_\w+|spectre_v2|nospectre_v[12]|kpti|nopti|mds|retbleed"
)
LIMITS: Final = ("nofile", "memlock", "nproc", "stack")
_OOM_KILL: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


def probe(root: Path = Path("/")) -> dict[str, Fact]:
    memory = derive(read_text(root, "/proc/meminfo"), parse_meminfo)
    return {
        **_system(root),
        **_processor(root),
        "memory_total_gib": derive(memory, lambda sizes: round(sizes["MemTotal"] / GIB)),
        "dev_shm_gib": _shared_memory_gib(root),
        **_control_group(root),
        **_moment(root),
    }


def _system(root: Path) -> dict[str, Fact]:
    return {
        "hostname": read_text(root, "/proc/sys/kernel/hostname"),
        "kernel": read_text(root, "/proc/sys/kernel/osrelease"),
        "cmdline": derive(read_text(root, "/proc/cmdline"), comparable_cmdline),
        "os": derive(read_text(root, "/etc/os-release"), parse_os_release),
        "machine": os.uname().machine,
        "page_size_bytes": os.sysconf("SC_PAGE_SIZE"),
        "limits": {name: _limit(name) for name in LIMITS},
        "clock_source": read_text(root, "/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    }


def _processor(root: Path) -> dict[str, Fact]:
    cpus = [name for name in list_names(root, CPU) if re.fullmatch(r"cpu\d+", name)]
    numa_nodes = [name for name in list_names(root, NODES) if re.fullmatch(r"node\d+", name)]
    governors = (read_text(root, f"{CPU}/{cpu}/cpufreq/scaling_governor") for cpu in cpus or ["cpu0"])
    return {
        "cpu_model": derive(read_text(root, "/proc/cpuinfo"), parse_cpu_model),
        "num_cpus": len(cpus) or Unknown(f"{CPU} absent"),
        "num_cpus_usable": len(os.sched_getaffinity(0)),
        "num_numa_nodes": len(numa_nodes) or Unknown(f"{NODES} absent"),
        "is_smt_active": derive(read_int(root, f"{CPU}/smt/active"), bool),
        "governor": agreed(governors),
        "numa_balancing": read_int(root, "/proc/sys/kernel/numa_balancing"),
        "transparent_hugepages": derive(
            read_text(root, "/sys/kernel/mm/transparent_hugepage/enabled"), parse_bracketed
        ),
    }


def _moment(root: Path) -> dict[str, Fact]:
    """Return the facts that change within minutes or at a reboot; comparisons of manifests ignore them."""
    other, beside = find_runs(root, os.getpid())
    return {
        "boot_id": read_text(root, "/proc/sys/kernel/random/boot_id"),
        "load_average": derive(read_text(root, "/proc/loadavg"), lambda text: [*map(float, text.split()[:3])]),
        "other_runs": other,
        "runs_beside": beside,
    }


def _control_group(root: Path) -> dict[str, Fact]:
    """Return the CPU and memory limits of this process: the lowest that its cgroup or a group above sets."""
    if not locate(root, f"{CGROUP}/cgroup.controllers").exists():
        reason = Unknown(f"{CGROUP} is not of cgroup version 2")
        return {"cgroup_cpu_max": reason, "cgroup_memory_max_gib": reason}
    group = Path(known_or(read_text(root, "/proc/self/cgroup"), "").rpartition("::/")[2])
    folders = [f"{CGROUP}/{folder}" for folder in (group, *group.parents)]
    cpu = [parse_cpu_max(text) for text in _present(root, folders, "cpu.max")]
    memory = [float(text) / GIB for text in _present(root, folders, "memory.max") if text.isdigit()]
    return {
        "cgroup_cpu_max": _finite(min(cpu, default=math.inf)),
        "cgroup_memory_max_gib": _finite(round(min(memory, default=math.inf), 2)),
    }


def find_runs(root: Path, own_pid: int) -> tuple[list[Any], list[Any]]:
    """List the runs that may use this process's GPUs, and the runs on other GPUs of this machine, by their run ids.

    Agents of this process's own run are left out, because they may share a machine.
    """
    agents: dict[int, str] = {}
    for pid in filter(str.isdigit, list_names(root, "/proc")):
        command = known_or(read_text(root, f"/proc/{pid}/cmdline"), "")
        run = _find_run(command.split("\0"))
        if run is not None:
            agents[int(pid)] = run
    own, own_gpus = agents.pop(own_pid, None), _find_visible(root, own_pid)
    others, sharing = set(), set()
    for number, run in agents.items():
        if run == own:
            continue
        others.add(Path(run).name)
        gpus = _find_visible(root, number)
        if not own_gpus or not gpus or gpus & own_gpus:
            sharing.add(Path(run).name)
    return sorted(sharing), sorted(others - sharing)


def _find_visible(root: Path, pid: int) -> set[str]:
    """Return the numbers of the GPUs that a process sees; empty if it may see all, or names them otherwise."""
    for item in known_or(read_text(root, f"/proc/{pid}/environ"), "").split("\0"):
        name, _, value = item.partition("=")
        if name == VISIBLE:
            numbers = set(value.split(","))
            return numbers if all(number.isdecimal() for number in numbers) else set()
    return set()


def divide_cores(num_shares: int, root: Path = Path("/")) -> dict[int, tuple[int, ...]]:
    """Divide the usable processors into equal shares of whole cores; without a core for each, there are no shares."""
    cores: dict[str, list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        siblings = read_text(root, f"{CPU}/cpu{number}/topology/thread_siblings_list")
        cores.setdefault(known_or(siblings, str(number)), []).append(number)
    if not num_shares or len(cores) < num_shares:
        return {}
    size, threads = len(cores) // num_shares, list(cores.values())
    shares = {}
    for share in range(num_shares):
        own = threads[share * size : (share + 1) * size]
        shares[share] = tuple(number for core in own for number in core)
    return shares


def _find_run(argv: list[str]) -> str | None:
    for option, module, *rest in zip(argv, argv[1:], argv[2:] or [""], strict=False):
        if option == "-m" and module == "rlk_repro.job":
            return rest[0]
    return None


def comparable_cmdline(text: str) -> str:
    """Keep only the kernel parameters that matter for speed, in the order of the kernel's command line."""
    kernel_part = f" {text} ".split(" -- ", 1)[0]
    return scrub(" ".join(token for token in kernel_part.split() if TUNING.fullmatch(token.split("=", 1)[0])))


def parse_os_release(text: str) -> str | Unknown:
    found = re.search(r"""^PRETTY_NAME=(["']?)(.+)\1$""", text, re.MULTILINE)
    return found[2] if found else Unknown("/etc/os-release names no system")


def parse_cpu_model(text: str) -> str | Unknown:
    """Return the processor's ``model name``; for an Arm core, return the name for its implementer and part number."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    if fields.get("model name"):
        return fields["model name"]
    core = (fields.get("cpu implementer", ""), fields.get("cpu part", ""))
    if all(core):
        return ARM_CORES.get(core, f"Arm implementer {core[0]} part {core[1]}")
    return Unknown("/proc/cpuinfo names no model")


def parse_bracketed(text: str) -> str | Unknown:
    """Return the value in brackets: ``always [madvise] never`` becomes ``madvise``."""
    match = re.search(r"\[(.+?)\]", text)
    return match[1] if match else Unknown(f"{text[:40]!r} has no value in brackets")


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the sizes in /proc/meminfo, in bytes, by name."""
    matches = re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {match[1]: int(match[2]) * 1024 for match in matches}


def parse_cpu_max(text: str) -> float:
    """Return how many processors ``cpu.max`` allows: ``200000 100000`` allows 2, and ``max`` allows infinitely many."""
    found = re.fullmatch("([0-9]+) ([1-9][0-9]*)", text)
    return round(int(found[1]) / int(found[2]), 3) if found else math.inf


def _present(root: Path, folders: list[str], name: str) -> list[str]:
    answers = (read_text(root, f"{folder}/{name}") for folder in folders)
    return [answer for answer in answers if isinstance(answer, str)]


def _finite(value: float) -> float | str:
    return UNLIMITED if value == math.inf else value


def _limit(name: str) -> dict[str, Fact]:
    import resource  # Windows has no such module

    soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
    return {
        name: UNLIMITED if value == resource.RLIM_INFINITY else value
        for name, value in (("soft", soft), ("hard", hard))
    }


def _shared_memory_gib(root: Path) -> float | Unknown:
    try:
        return round(shutil.disk_usage(locate(root, SHARED_MEMORY)).total / GIB, 2)
    except OSError:
        return Unknown(f"{SHARED_MEMORY} absent")


def read_free_memory(path: Path = Path("/proc/meminfo")) -> int | None:
    """Return how many bytes of memory the kernel can give without swapping."""
    try:
        return parse_meminfo(path.read_text()).get("MemAvailable")
    except OSError:
        return None


def count_oom_kills() -> int | None:
    """Return the kernel's count of out-of-memory kills in this control group, or on this machine; None if unknown."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        try:
            found = _OOM_KILL.search(path.read_bytes())
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return None
