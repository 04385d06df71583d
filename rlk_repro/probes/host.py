"""Find facts of the machine apart from GPUs and network: kernel, processor, memory, limits, control group."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shlex
import struct
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.secrets import scrub
from rlk_repro.base.units import GIB
from rlk_repro.probes.sources import agreed, derive, list_names, locate, parse_int, read_int, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

SECTION: Final = "host"
CPU: Final = "/sys/devices/system/cpu"
UNLIMITED: Final = "unlimited"
# Without a limit, cgroup v1 writes the largest 63-bit number that is a multiple of the page size.
NO_LIMIT_BYTES: Final = 1 << 60

# On Arm, /proc/cpuinfo holds no model name.  These are implementer and part numbers of cores in GPU servers.
ARM_CORES: Final = {
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
}
# These kernel parameters affect speed.  Other parameters can identify the machine and its disks.
TUNING: Final = re.compile(
    r"mitigations|nosmt|mce|iommu(?:\.\w+)?|(?:intel|amd)_iommu|swiotlb|isolcpus|nohz(?:_full)?|rcu_nocbs|irqaffinity|"
    r"numa_balancing|(?:default_)?hugepagesz?|transparent_hugepage|(?:intel|amd)_pstate|idle|processor\.\w+|"
    r"intel_idle\.\w+|cpuidle\.\w+|cpufreq\.\w+|clocksource|tsc|preempt|skew_tick|nmi_watchdog|nowatchdog|psi|"
    r"cgroup_\w+|systemd\.unified_cgroup_hierarchy|pci|pcie_\w+|spectre_v2|nospectre_v[12]|kpti|nopti|mds|retbleed"
)
LIMITS: Final = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
}
# These are the names of the processes of Ray and of the rollout engines, as the kernel stores them.
TRAINERS: Final = re.compile(r"raylet|gcs_server|ray::.*|VLLM::.*|vllm.*|sglang.*")
MOUNT_POINTS: Final = ("/", "/tmp", "/dev/shm")  # noqa: S108  (looked up in the mount table, never written to)
NETWORK_FILESYSTEMS: Final = {
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse.wekafs",
    "wekafs",
    "cifs",
    "fuse.s3fs",
}
# struct timex on 64-bit Linux begins: modes, padding, offset, freq, maxerror, esterror, status
TIMEX: Final = struct.Struct("@i4xqqqqi")
TIMEX_BYTES: Final = 256
UNSYNCHRONISED: Final = 0x40  # STA_UNSYNC
_OOM_KILL: Final = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


def probe(root: Path = Path("/")) -> dict[str, Fact]:
    return {**_system(root), **_processor(root), **_memory(root), **_control_group(root), **_moment(root)}


def _system(root: Path) -> dict[str, Fact]:
    return {
        "hostname": read_text(root, "/proc/sys/kernel/hostname"),
        "kernel": read_text(root, "/proc/sys/kernel/osrelease"),
        "cmdline": derive(read_text(root, "/proc/cmdline"), comparable_cmdline),
        "os": derive(read_text(root, "/etc/os-release"), parse_os_release),
        "machine": os.uname().machine,
        "glibc": _glibc(),
        "page_size_bytes": os.sysconf("SC_PAGE_SIZE"),
        "limits": {name: _limit(number) for name, number in LIMITS.items()},
        "clock_source": read_text(root, "/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "is_userns_restricted": derive(
            read_int(root, "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"), lambda value: value != 0
        ),
        "mounts": derive(read_text(root, "/proc/mounts"), parse_mounts),
    }


def _processor(root: Path) -> dict[str, Fact]:
    cpus = [name for name in list_names(root, CPU) if re.fullmatch(r"cpu\d+", name)]
    packages = [read_int(root, f"{CPU}/{cpu}/topology/physical_package_id") for cpu in cpus]
    governors = (read_text(root, f"{CPU}/{cpu}/cpufreq/scaling_governor") for cpu in cpus or ["cpu0"])
    return {
        "cpu_model": derive(read_text(root, "/proc/cpuinfo"), parse_cpu_model),
        "num_cpus": len(cpus) or Unknown(f"{CPU} absent"),
        "num_cpus_usable": len(os.sched_getaffinity(0)),
        "num_sockets": len({number for number in packages if isinstance(number, int)})
        or Unknown(f"{CPU}/cpu0/topology absent"),
        "num_numa_nodes": derive(read_text(root, "/sys/devices/system/node/online"), count_cpu_list),
        "is_smt_active": derive(read_int(root, f"{CPU}/smt/active"), bool),
        "governor": agreed(governors),
        "numa_balancing": read_int(root, "/proc/sys/kernel/numa_balancing"),
        "transparent_hugepages": derive(
            read_text(root, "/sys/kernel/mm/transparent_hugepage/enabled"), parse_bracketed
        ),
    }


def _memory(root: Path) -> dict[str, Fact]:
    sizes = derive(read_text(root, "/proc/meminfo"), parse_meminfo)
    return {
        "memory_total_gib": derive(sizes, lambda found: _gib(found.get("MemTotal"), 0)),
        "memory_available_gib": derive(sizes, lambda found: _gib(found.get("MemAvailable"), 1)),
        "swap_total_gib": derive(sizes, lambda found: _gib(found.get("SwapTotal"), 0)),
        "dev_shm_gib": _disk_gib(root, "/dev/shm", "f_blocks", 2),  # noqa: S108
    }


def _moment(root: Path) -> dict[str, Fact]:
    """Return the facts that change within minutes or at a reboot; comparisons of manifests ignore them."""
    return {
        "boot_id": read_text(root, "/proc/sys/kernel/random/boot_id"),
        "load_average": derive(read_text(root, "/proc/loadavg"), lambda text: _floats(text, 3)),
        "uptime_s": derive(
            derive(read_text(root, "/proc/uptime"), lambda text: _floats(text, 1)), lambda found: found[0]
        ),
        "trainer_processes": find_trainers(root),
        "other_runs": find_other_runs(root, os.getpid()),
        "tmp_free_gib": _disk_gib(root, "/tmp", "f_bavail", 1),  # noqa: S108
        **probe_clock(),
    }


def _control_group(root: Path) -> dict[str, Fact]:
    """Return the CPU and memory limits of this process: the lowest that its control group or a group above sets."""
    if locate(root, "/sys/fs/cgroup/cgroup.controllers").exists():
        folders = _ancestors(root, "/sys/fs/cgroup", "")
        cpu = [parse_cpu_max(text) for text in _present(root, folders, "cpu.max")]
        memory = [_bytes_or_unlimited(text) for text in _present(root, folders, "memory.max")]
        version: Fact = 2
    elif locate(root, "/sys/fs/cgroup/memory").exists():
        cpu = [
            _divide(read_int(root, f"{folder}/cpu.cfs_quota_us"), read_int(root, f"{folder}/cpu.cfs_period_us"))
            for folder in _ancestors(root, "/sys/fs/cgroup/cpu", "cpu")
        ]
        folders = _ancestors(root, "/sys/fs/cgroup/memory", "memory")
        memory = [_bytes_or_unlimited(text) for text in _present(root, folders, "memory.limit_in_bytes")]
        version = 1
    else:
        version = Unknown("/sys/fs/cgroup absent")
        return {"cgroup_version": version, "cgroup_cpu_max": version, "cgroup_memory_max_gib": version}
    limit = min(memory, default=float("inf"))
    return {
        "cgroup_version": version,
        "cgroup_cpu_max": _finite(min(cpu, default=float("inf"))),
        "cgroup_memory_max_gib": _finite(round(limit / GIB, 2)),
    }


def find_trainers(root: Path) -> list[Any]:
    pids = [name for name in list_names(root, "/proc") if name.isdigit()]
    names = {read_text(root, f"/proc/{pid}/comm") for pid in pids}
    return sorted(name for name in names if isinstance(name, str) and TRAINERS.fullmatch(name))


def find_other_runs(root: Path, own_pid: int) -> list[Any]:
    """List the runs whose agents work on this machine, each by its run id.

    Agents of this process's own run are not listed, because they may share a machine.
    """
    commands = {
        int(pid): text.split("\0") for pid in list_names(root, "/proc") if pid.isdigit()
        if isinstance(text := read_text(root, f"/proc/{pid}/cmdline"), str)
    }  # fmt: skip
    runs = {pid: run for pid, argv in commands.items() if (run := _find_run(argv)) is not None}
    own = runs.pop(own_pid, None)
    return sorted({Path(run).name for run in runs.values() if run != own})


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
    pairs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    name = pairs.get("PRETTY_NAME") or " ".join(filter(None, (pairs.get("ID"), pairs.get("VERSION_ID"))))
    try:
        return " ".join(shlex.split(name)) or Unknown("/etc/os-release names no system")
    except ValueError:
        return name


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


def count_cpu_list(text: str) -> int | Unknown:
    """Count the numbers in a list that the kernel writes: ``0-3,8`` has 5 numbers."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return Unknown(f"{text[:40]!r} is not a list of numbers")
    bounds = [[int(number) for number in part.split("-")] for part in text.split(",")]
    return sum(bound[-1] - bound[0] + 1 for bound in bounds)


def parse_bracketed(text: str) -> str | Unknown:
    """Return the value in brackets: ``always [madvise] never`` becomes ``madvise``."""
    match = re.search(r"\[(.+?)\]", text)
    return match[1] if match else Unknown(f"{text[:40]!r} has no value in brackets")


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the sizes in /proc/meminfo, in bytes, by name."""
    matches = re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {match[1]: int(match[2]) * 1024 for match in matches}


def parse_mounts(text: str) -> dict[str, str]:
    """Return the file system types of the listed mount points, and the network file systems of the machine."""
    types = {fields[1]: fields[2] for fields in map(str.split, text.splitlines()) if len(fields) > 2}
    network = sorted({kind for kind in types.values() if kind in NETWORK_FILESYSTEMS})
    found: dict[str, str] = {point: types[point] for point in MOUNT_POINTS if point in types}
    return found | {"network": ",".join(network) or "none"}


def parse_cpu_max(text: str) -> float:
    """Return how many processors ``cpu.max`` allows: ``200000 100000`` allows 2, and ``max`` allows infinitely many."""
    quota, _, period = text.partition(" ")
    return _divide(parse_int(quota, "cpu.max"), parse_int(period or "100000", "cpu.max"))


def _divide(quota: int | Unknown, period: int | Unknown) -> float:
    if isinstance(quota, Unknown) or isinstance(period, Unknown) or quota <= 0 or period <= 0:
        return float("inf")
    return round(quota / period, 3)


def _ancestors(root: Path, mount: str, controller: str) -> list[str]:
    path = ""
    text = read_text(root, "/proc/self/cgroup")
    for line in [] if isinstance(text, Unknown) else text.splitlines():
        _, names, group = (*line.split(":", 2), "", "")[:3]
        if controller in names.split(","):
            path = group.strip("/")
    parts = [part for part in path.split("/") if part]
    return [mount + "".join(f"/{part}" for part in parts[:depth]) for depth in range(len(parts), -1, -1)]


def _present(root: Path, folders: list[str], name: str) -> list[str]:
    answers = (read_text(root, f"{folder}/{name}") for folder in folders)
    return [answer for answer in answers if isinstance(answer, str)]


def _bytes_or_unlimited(text: str) -> float:
    return float(text) if text.isdigit() and int(text) < NO_LIMIT_BYTES else float("inf")


def _finite(value: float) -> float | str:
    return UNLIMITED if value == float("inf") else value


def _limit(number: int) -> dict[str, Fact]:
    soft, hard = resource.getrlimit(number)
    return {
        name: UNLIMITED if value == resource.RLIM_INFINITY else value
        for name, value in (("soft", soft), ("hard", hard))
    }


def _glibc() -> str | Unknown:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or Unknown("the C library names no version")
    except (ValueError, OSError):
        return Unknown("not the GNU C library")


def _gib(size_bytes: int | None, digits: int) -> float | Unknown:
    if size_bytes is None:
        return Unknown("not in /proc/meminfo")
    return round(size_bytes / GIB, digits) if digits else round(size_bytes / GIB)


def _disk_gib(root: Path, folder: str, blocks: str, digits: int) -> float | Unknown:
    try:
        found = os.statvfs(locate(root, folder))
    except OSError:
        return Unknown(f"{folder} absent")
    num_blocks: int = getattr(found, blocks)
    return round(num_blocks * found.f_frsize / GIB, digits)


def _floats(text: str, count: int) -> list[float] | Unknown:
    try:
        return (
            [float(word) for word in text.split()[:count]] if len(text.split()) >= count else Unknown("too few numbers")
        )
    except ValueError:
        return Unknown(f"{text[:40]!r} holds words that are not numbers")


def probe_clock() -> dict[str, Fact]:
    """Read whether the kernel's clock is synchronized to UTC, and how large its error may be.

    The call ``adjtimex`` without a mode only reads, and works in containers, which have no time daemon to ask.
    """
    buffer = ctypes.create_string_buffer(TIMEX_BYTES)
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return _unknown_clock("this C library has no adjtimex")
    if answer < 0:
        return _unknown_clock(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    return read_timex(buffer.raw)


def read_timex(data: bytes) -> dict[str, Fact]:
    _, _, _, max_error_us, _, status = TIMEX.unpack_from(data)
    is_synchronized = not status & UNSYNCHRONISED
    error: Fact = round(max_error_us / 1e6, 3) if is_synchronized else Unknown("this clock is not synchronized")
    return {"clock_is_synchronized": is_synchronized, "clock_max_error_s": error}


def _unknown_clock(reason: str) -> dict[str, Fact]:
    return {"clock_is_synchronized": Unknown(reason), "clock_max_error_s": Unknown(reason)}


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
