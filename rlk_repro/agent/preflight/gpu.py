"""Check a node's GPUs: model, driver, memory errors, links, modes, visible devices, and who uses them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from rlk_repro.agent.preflight.facts import Facts, wrong
from rlk_repro.base.findings import Finding, Level
from rlk_repro.probes import gpu_amd, gpu_nvidia, visible
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.rundir.manifest import Fact, Unknown

# oldest driver branch of each CUDA major version; within a major version, older drivers run newer minor versions
DRIVER_FLOORS: Final = {11: 450, 12: 525, 13: 580}
CUDA_RUNTIME: Final = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")
VISIBILITY: Final = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
HARDWARE_SLOWDOWN: Final = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
REPAIRS: Final = {"remapped_rows": "row remapping", "retired_pages": "page retirement"}
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
    count = facts.fact("gpu", "count")
    if not isinstance(count, int) or count < num_gpus:
        yield wrong("gpu.count", f"at least {num_gpus}", count)
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
    """Check that the driver, or CUDA's forward-compatibility library, supports this environment's toolkit."""
    toolkit = find_toolkit(facts.mapping("code", "packages"), facts.fact("environment", "CUDA_VERSION"))
    driver, compat = facts.fact("gpu", "driver"), facts.fact("gpu", "compat_libcuda")
    if toolkit is None or facts.fact("gpu", "vendor") != gpu_nvidia.VENDOR or not isinstance(driver, str):
        return
    floor = DRIVER_FLOORS.get(int(toolkit.partition(".")[0]), 0)
    newest = max(_version(driver), _version(compat) if isinstance(compat, str) else ())
    if newest < (floor,):
        yield wrong("gpu.driver", f"{floor} or newer for CUDA {toolkit}", driver)


def find_toolkit(packages: dict[str, Any], of_image: Fact) -> str | None:
    """Return the CUDA version: of PyTorch's build (``2.9.0+cu130``), else of the CUDA runtime, else of the image."""
    built = re.search(r"\+cu(\d+)(\d)$", str(packages.get("torch", "")))
    if built:
        return f"{built[1]}.{built[2]}"
    versions = [version for name, version in packages.items() if CUDA_RUNTIME.fullmatch(name)]
    known = [re.match(r"\d+\.\d+", version) for version in (*versions, of_image) if isinstance(version, str)]
    return next((match[0] for match in known if match), None)


def _name_gpus(facts: Facts, is_bad: Callable[[dict[str, Any]], bool]) -> str:
    """Name the GPUs for which ``is_bad`` is true, such as ``GPU 0, 3``; an empty text if there is none."""
    numbers = [str(device.get("index")) for device in facts.devices if is_bad(device)]
    return f"GPU {', '.join(numbers)}" if numbers else ""


def check_errors(facts: Facts) -> Iterator[Finding]:
    """Check for memory errors, and for broken memory in use because its repair failed or waits for a reset."""
    if bad := _name_gpus(facts, lambda device: _count(device.get("ecc_uncorrected")) > 0):
        yield wrong("gpu.devices.ecc_uncorrected", "0", bad)
    for fact, words in REPAIRS.items():
        for state in ("failed", "pending"):
            if bad := _name_gpus(facts, partial(_is_marked, fact, f"is_{state}")):
                yield wrong(f"gpu.devices.{fact}", f"no {words} {state}", bad)


def _is_marked(fact: str, mark: str, device: dict[str, Any]) -> bool:
    value = device.get(fact)
    return isinstance(value, dict) and value.get(mark) is True


def check_links(facts: Facts) -> Iterator[Finding]:
    """Check that every link between the GPUs is up; a job with one GPU per node uses no such link."""
    expected, num_gpus = facts.hardware.links_per_gpu, len(facts.devices)
    if expected == 0 or facts.layout.gpus_per_node < 2:
        return
    for device in facts.devices:
        up = device.get("nvlinks_up")
        if isinstance(up, int) and up != expected:
            yield wrong(f"gpu.devices.{device.get('index')}.nvlinks_up", expected, up)
    links = facts.mapping("gpu", "topology_links").get("gpu_gpu")
    if num_gpus and facts.fact("gpu", "vendor") == gpu_amd.VENDOR and isinstance(links, dict):
        pairs, wanted = _count(links.get("XGMI")), min(expected, num_gpus - 1) * num_gpus // 2
        if pairs < wanted:
            yield wrong("gpu.topology_links.gpu_gpu.XGMI", f"{wanted} pairs", pairs)


def check_partition(facts: Facts) -> Iterator[Finding]:
    if mig := _name_gpus(facts, lambda device: device.get("mig_mode") == "enabled"):
        yield wrong("gpu.devices.mig_mode", "disabled on all GPUs", f"enabled on {mig}")
    for name, whole in WHOLE.items():
        found = {device[name] for device in facts.devices if isinstance(device.get(name), str)}
        for mode in sorted(found - {whole}):
            yield wrong(f"gpu.devices.{name}", whole, mode)


def check_slowdown(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        reasons = device.get("throttle_reasons")
        slow = [reason for reason in reasons if reason in HARDWARE_SLOWDOWN] if isinstance(reasons, list) else []
        if slow:
            yield wrong(f"gpu.devices.{device.get('index')}.throttle_reasons", "no slowdown", ", ".join(slow))


def check_visibility(facts: Facts) -> Iterator[Finding]:
    """Check the lists of visible devices: on AMD, Ray does not start where those of HIP, ROCr and CUDA disagree.

    On NVIDIA, a trainer with inference servers reads ``CUDA_VISIBLE_DEVICES`` as numbers, and gives each server
    consecutive GPU numbers, starting at its first GPU.  If the job's numbers have a gap, the trainer would use a GPU
    that the job does not own.
    """
    if facts.fact("gpu", "vendor") == gpu_amd.VENDOR:
        lists = {name: facts.fact("environment", name) for name in VISIBILITY}
        given = {name: value for name, value in lists.items() if isinstance(value, str)}
        if len(set(given.values())) > 1:
            found = ", ".join(f"{name}={value}" for name, value in given.items())
            yield wrong("environment.HIP_VISIBLE_DEVICES", "the same list of devices in all these variables", found)
        return
    listed, size = facts.fact("environment", visible.NAME), find_engine_size(facts)
    if size and isinstance(listed, str) and not _are_in_rows(listed, size):
        expected = "numbers" if size == 1 else f"{size} consecutive GPU numbers for each inference server"
        yield wrong(f"environment.{visible.NAME}", expected, listed)


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
