"""Check a node's GPUs: model, driver, memory errors, links, modes, visible devices, and who uses them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.base.findings import Finding, Level
from rlk_repro.probes import gpu_amd, gpu_nvidia
from rlk_repro.probes.gpu_use import VISIBLE, GpuUse
from rlk_repro.rundir.manifest import Fact, Unknown

# oldest driver branch of each CUDA major version; within it, older drivers run newer minor versions
DRIVER_FLOORS: Final = {11: 450, 12: 525, 13: 580}
CUDA_RUNTIME: Final = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")
VISIBILITY: Final = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", VISIBLE)
HARDWARE_SLOWDOWN: Final = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "sw_thermal_slowdown",
    "hw_power_brake_slowdown",
)
REPAIRS: Final = {"remapped_rows": "row remapping", "retired_pages": "page retirement"}
# What a driver answers about a broken GPU.  Words of the second kind may also be a gap of the driver.
BROKEN: Final = re.compile(r"requires? reset|reset required|GPU is lost|fallen off the bus|inforom is corrupted", re.I)
STRANGE: Final = re.compile(r"unknown error|ERR!|input/output error|no such device|connection timed out", re.I)
# A100, and a machine with one GPU, have no fabric.
FABRIC_GOOD: Final = {
    "state": {"Completed", "N/A", "Not Supported"},
    "status": {"Success"},
    "health": {"healthy"},
}
# drivers report a few percent less memory than the data sheet; the next smaller GPU has at least 25 % less
MEMORY_TOLERANCE: Final = 0.05
WHOLE: Final = {"compute_partition": "SPX", "memory_partition": "NPS1"}


def check_hardware(facts: Facts) -> Iterator[Finding]:
    hardware, num_gpus = facts.hardware, facts.layout.gpus_per_node
    machine = facts.fact("host", "machine")
    if hardware.machine != "any" and isinstance(machine, str) and machine != hardware.machine:
        yield wrong("host.machine", hardware.machine, machine)
    if num_gpus == 0:
        return
    driver = facts.fact("gpu", "driver")
    if isinstance(driver, str) and _version(driver) < _version(hardware.driver_floor):
        yield wrong("gpu.driver", f"{hardware.driver_floor} or newer", driver)
    devices = facts.fact("gpu", "devices")
    if len(facts.devices) < num_gpus:
        found = devices if isinstance(devices, Unknown) else len(facts.devices)
        yield wrong("gpu.devices", f"at least {num_gpus} GPUs in the manifest", found)
    for name in sorted({str(item.get("name")) for item in facts.devices}):
        is_refused = any(part in name for part in hardware.refused_name_parts)
        if is_refused or hardware.name_part not in name:
            yield wrong("gpu.devices.name", hardware.title, name)
    yield from _check_gpu_memory(hardware.gpu_memory_gib, facts.devices)


def _check_gpu_memory(expected_gib: float, devices: list[dict[str, Any]]) -> Iterator[Finding]:
    """GPUs with one name differ in memory: an A100 has 40 GB or 80 GB."""
    where, expected = "gpu.devices.memory_total_mib", f"{expected_gib:g} GiB ± {MEMORY_TOLERANCE:.0%}"
    sizes = {item.get("memory_total_mib", Unknown("not recorded")) for item in devices}
    for found in sorted(sizes, key=str):
        if isinstance(found, Unknown):
            yield Finding(Level.WARNING, where, expected, str(found))
        elif abs(found / 1024 - expected_gib) > MEMORY_TOLERANCE * expected_gib:
            yield wrong(where, expected, f"{found / 1024:.1f} GiB")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def check_idle(facts: Facts) -> Iterator[Finding]:
    return find_busy(facts.busy, Level.BLOCKING)


def find_busy(busy: Sequence[GpuUse] | Unknown, level: Level, where: str = "gpu") -> Iterator[Finding]:
    if isinstance(busy, Unknown):
        yield Finding(Level.WARNING, where, "idle", str(busy))
        return
    for use in busy:
        yield Finding(level, where, "idle", str(use))


def wait_until_idle(
    busy_gpus: Callable[[], list[GpuUse] | Unknown], wait: Callable[[float], bool], deadline_s: float
) -> list[GpuUse] | Unknown:
    """Return the GPUs that stay busy until the deadline: a driver may free a killed process's memory late.

    ``wait`` sleeps for some seconds, and returns True to end the wait.
    """
    until = time.monotonic() + deadline_s
    pause_s = 0.1
    busy = busy_gpus()
    while isinstance(busy, list) and busy and time.monotonic() < until and not wait(pause_s):
        pause_s = min(pause_s * 2, 2.0)
        busy = busy_gpus()
    return busy


def check_driver(facts: Facts) -> Iterator[Finding]:
    """Check that the driver, or CUDA's forward-compatibility library, supports the toolkit."""
    of_image = facts.fact("environment", "CUDA_VERSION")
    toolkit = find_toolkit(facts.mapping("code", "packages"), of_image)
    driver, compat = facts.fact("gpu", "driver"), facts.fact("gpu", "compat_libcuda")
    is_nvidia = facts.fact("gpu", "vendor") == gpu_nvidia.VENDOR
    if toolkit is None or not is_nvidia or not isinstance(driver, str):
        return
    floor = DRIVER_FLOORS.get(int(toolkit.partition(".")[0]), 0)
    found = [_version(text) for text in (driver, compat) if isinstance(text, str)]
    if max(found) < (floor,):
        yield wrong("gpu.driver", f"{floor} or newer for CUDA {toolkit}", driver)


def find_toolkit(packages: dict[str, Any], of_image: Fact) -> str | None:
    """Return the CUDA version of PyTorch's build (``+cu130``), of the runtime, or of the image."""
    built = re.search(r"\+cu(\d+)(\d)$", str(packages.get("torch", "")))
    if built:
        return f"{built[1]}.{built[2]}"
    versions = [packages[name] for name in packages if CUDA_RUNTIME.fullmatch(name)]
    for version in (*versions, of_image):
        known = re.match(r"\d+\.\d+", version) if isinstance(version, str) else None
        if known:
            return known[0]
    return None


def _name_gpus(devices: Iterable[dict[str, Any]]) -> str:
    """Name GPUs, such as ``GPU 0, 3``; an empty text if there is none."""
    numbers = [str(device.get("index")) for device in devices]
    return f"GPU {', '.join(numbers)}" if numbers else ""


def _find_broken(facts: Facts) -> Iterator[Finding]:
    """Name the GPUs that answer with a fault, or fail a question that all other GPUs answer."""
    lost = facts.fact("gpu", "lost")
    for words in lost if isinstance(lost, list) else ():  # it may be another job's
        yield Finding(Level.WARNING, "gpu.lost", "no GPU", str(words))
    for device in facts.devices:
        refusals = {name: str(fact) for name, fact in device.items() if isinstance(fact, Unknown)}
        own = {name for name in refusals if _is_only_gap(facts, name)}
        broken = [name for name, words in refusals.items() if BROKEN.search(words)]
        strange = [name for name, words in refusals.items() if STRANGE.search(words)]
        if told := broken or strange or sorted(own):
            is_fault = bool(broken) or (bool(strange) and told[0] in own)
            level = Level.BLOCKING if is_fault else Level.WARNING
            found = f"GPU {device.get('index')}: {refusals[told[0]]}"
            yield Finding(level, f"gpu.devices.{told[0]}", "an answer", found)


def _is_only_gap(facts: Facts, name: str) -> bool:
    answers = [device.get(name, Unknown("not recorded")) for device in facts.devices]
    return sum(isinstance(answer, Unknown) for answer in answers) == 1 < len(answers)


def check_errors(facts: Facts) -> Iterator[Finding]:
    """Check for GPUs in a fault state, memory errors, and memory whose repair failed or waits for a reset."""
    yield from _find_broken(facts)
    if bad := _name_gpus(device for device in facts.devices if _count(device.get("ecc_uncorrected")) > 0):
        yield wrong("gpu.devices.ecc_uncorrected", "0", bad)
    for fact, words in REPAIRS.items():
        known = [device for device in facts.devices if isinstance(device.get(fact), dict)]
        for state in ("failed", "pending"):
            if bad := _name_gpus(device for device in known if device[fact].get(f"is_{state}") is True):
                yield wrong(f"gpu.devices.{fact}", f"no {words} {state}", bad)


def check_links(facts: Facts) -> Iterator[Finding]:
    """Check that every link between the GPUs is up; a job with one GPU per node uses no such link."""
    expected, num_gpus = facts.hardware.links_per_gpu, len(facts.devices)
    if expected == 0 or facts.layout.gpus_per_node < 2:
        return
    are_counted = any(isinstance(device.get("nvlinks_up"), int) for device in facts.devices)
    for device in facts.devices:
        up = device.get("nvlinks_up")
        if (isinstance(up, int) or (are_counted and isinstance(up, Unknown))) and up != expected:
            yield wrong(f"gpu.devices.{device.get('index')}.nvlinks_up", expected, up)
    yield from _check_matrix(facts)
    yield from _check_fabric(facts)
    links = facts.mapping("gpu", "topology_links").get("gpu_gpu")
    if num_gpus and facts.fact("gpu", "vendor") == gpu_amd.VENDOR and isinstance(links, dict):
        pairs, wanted = _count(links.get("XGMI")), min(expected, num_gpus - 1) * num_gpus // 2
        if pairs < wanted:
            yield wrong("gpu.topology_links.gpu_gpu.XGMI", f"{wanted} pairs", pairs)


def _check_matrix(facts: Facts) -> Iterator[Finding]:
    """Name the pairs that nvidia-smi's matrix joins by fewer NVLinks than the others."""
    given = {f"GPU{device.get('index')}" for device in facts.devices}
    text = facts.fact("gpu", "topology_text")
    widths: dict[str, int] = {}
    for row, column, link in gpu_nvidia.list_pairs(text) if isinstance(text, str) else ():
        if {row, column} <= given:
            width = re.fullmatch(r"NV(\d+)", link)
            widths[f"{row}-{column} {link}"] = int(width[1]) if width else 0
    most = max(widths.values(), default=0)
    bad = [pair for pair, width in widths.items() if width < max(most, 1)]
    if bad:
        wanted = f"NV{most}" if most else "NVLink"
        yield wrong("gpu.topology_text", f"{wanted} between all GPUs", ", ".join(bad))


def _check_fabric(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        fabric = device.get("fabric")
        for name, good in FABRIC_GOOD.items():
            found = fabric.get(name) if isinstance(fabric, dict) else None
            if isinstance(found, str) and found not in good:
                where = f"gpu.devices.{device.get('index')}.fabric.{name}"
                yield wrong(where, " or ".join(sorted(good)), found)


def check_partition(facts: Facts) -> Iterator[Finding]:
    if mig := _name_gpus(device for device in facts.devices if device.get("mig_mode") == "enabled"):
        yield wrong("gpu.devices.mig_mode", "disabled on all GPUs", f"enabled on {mig}")
    for name, whole in WHOLE.items():
        found = {device[name] for device in facts.devices if isinstance(device.get(name), str)}
        for mode in sorted(found - {whole}):
            yield wrong(f"gpu.devices.{name}", whole, mode)


def check_slowdown(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        reasons = device.get("throttle_reasons")
        known = reasons if isinstance(reasons, list) else []
        slow = [reason for reason in known if reason in HARDWARE_SLOWDOWN]
        if slow:
            where = f"gpu.devices.{device.get('index')}.throttle_reasons"
            yield wrong(where, "no slowdown", ", ".join(slow))


def check_visibility(facts: Facts) -> Iterator[Finding]:
    """Check the lists of visible devices: on AMD, Ray does not start where those lists disagree.

    On NVIDIA, a trainer with inference servers reads the list as numbers, and gives each server
    consecutive GPU numbers, starting at the server's first GPU.  If the job's numbers have a gap,
    the trainer would use a GPU that the job does not own.
    """
    if facts.fact("gpu", "vendor") == gpu_amd.VENDOR:
        lists = {name: facts.fact("environment", name) for name in VISIBILITY}
        given = {name: value for name, value in lists.items() if isinstance(value, str)}
        if len(set(given.values())) > 1:
            found = ", ".join(f"{name}={value}" for name, value in given.items())
            expected = "the same list of devices in all these variables"
            yield wrong(f"environment.{VISIBILITY[0]}", expected, found)
        return
    listed, size = facts.fact("environment", VISIBLE), find_engine_size(facts)
    if size and isinstance(listed, str) and not _are_in_rows(listed, size):
        expected = f"{size} consecutive GPU numbers for each inference server"
        yield wrong(f"environment.{VISIBLE}", "numbers" if size == 1 else expected, listed)


def find_engine_size(facts: Facts) -> int:
    """Return how many GPUs an inference server of this run has; 0 without such a server or without a run."""
    if facts.staged is None:
        return 0
    return facts.plan.run.workload.gpus_per_engine(facts.plan.hardware.hardware)


def _are_in_rows(listed: str, size: int) -> bool:
    entries = [entry.strip() for entry in listed.split(",")]
    if not all(map(str.isdecimal, entries)):
        return False
    numbers = sorted(map(int, entries))
    return all(number == numbers[place - place % size] + place % size for place, number in enumerate(numbers))


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
