"""Check GPUs in preflight: driver, memory errors, links, modes and visible devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from rlk_repro.agent.preflight.base import Check, Complaint, Scope, Situation, name_gpus
from rlk_repro.probes import gpu_amd, gpu_nvidia, visible
from rlk_repro.rundir.manifest import Fact, Unknown

# oldest driver branch of each CUDA major version; within a major version, older drivers run newer minor versions
DRIVER_FLOORS: Final = {11: 450, 12: 525, 13: 580}
CUDA_RUNTIME: Final = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")
VISIBILITY: Final = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
HARDWARE_SLOWDOWN: Final = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
REPAIRS: Final = {"remapped_rows": "row remapping", "retired_pages": "page retirement"}
WHOLE: Final = {"compute_partition": "SPX", "memory_partition": "NPS1"}
# settings that are equal on all GPUs of a node unless a user changed one GPU
SHARED: Final = ("name", "memory_total_mib", "vbios", "ecc_mode", "power_limit_w", "clocks_max_sm_mhz", "pcie_width")


def check_driver(situation: Situation) -> Iterator[Complaint]:
    """Check that the driver, or CUDA's forward-compatibility library, supports this environment's toolkit."""
    toolkit = find_toolkit(situation.mapping("code", "packages"), situation.fact("environment", "CUDA_VERSION"))
    driver, compat = situation.fact("gpu", "driver"), situation.fact("gpu", "compat_libcuda")
    if toolkit is None or situation.fact("gpu", "vendor") != gpu_nvidia.VENDOR or not isinstance(driver, str):
        return
    floor = DRIVER_FLOORS.get(int(toolkit.partition(".")[0]), 0)
    newest = max(_branch(driver), _branch(compat) if isinstance(compat, str) else 0)
    if newest < floor:
        yield Complaint("gpu.driver", f"{floor} or newer for CUDA {toolkit}", driver)


def find_toolkit(packages: dict[str, Any], of_image: Fact) -> str | None:
    """Return the CUDA version: of PyTorch's build (``2.9.0+cu130``), else of the CUDA runtime, else of the image."""
    built = re.search(r"\+cu(\d+)(\d)$", str(packages.get("torch", "")))
    if built:
        return f"{built[1]}.{built[2]}"
    versions = [version for name, version in packages.items() if CUDA_RUNTIME.fullmatch(name)]
    known = [re.match(r"\d+\.\d+", version) for version in (*versions, of_image) if isinstance(version, str)]
    return next((match[0] for match in known if match), None)


def check_errors(situation: Situation) -> Iterator[Complaint]:
    bad = name_gpus(situation.devices, lambda device: _count(device.get("ecc_uncorrected")) > 0)
    if bad:
        yield Complaint("gpu.devices.ecc_uncorrected", "0", bad)


def check_enabled(mode: str, situation: Situation) -> Iterator[Complaint]:
    """Check that a mode of the GPUs, such as ``ecc_mode``, is on."""
    off = name_gpus(situation.devices, lambda device: device.get(mode) == "disabled")
    if off:
        yield Complaint(f"gpu.devices.{mode}", "enabled on all GPUs", f"disabled on {off}")


def check_memory_repair(situation: Situation) -> Iterator[Complaint]:
    """Check for broken GPU memory that is still in use, because its repair failed or needs a reset of the GPU."""
    for fact, words in REPAIRS.items():
        for state in ("failed", "pending"):
            bad = name_gpus(situation.devices, partial(_is_marked, fact, f"is_{state}"))
            if bad:
                yield Complaint(f"gpu.devices.{fact}", f"no {words} {state}", bad)


def check_links(situation: Situation) -> Iterator[Complaint]:
    """Check that every link between the GPUs is up; a job with one GPU per node uses no such link."""
    expected, devices = situation.hardware.links_per_gpu, situation.devices
    if expected == 0 or situation.layout.gpus_per_node < 2 or not devices:
        return
    if situation.fact("gpu", "vendor") == gpu_amd.VENDOR:
        yield from _check_xgmi(situation, min(expected, len(devices) - 1))
        return
    for device in devices:
        up = device.get("nvlinks_up")
        if isinstance(up, int) and up != expected:
            yield Complaint(f"gpu.devices.{device.get('index')}.nvlinks_up", str(expected), str(up))


def _check_xgmi(situation: Situation, expected: int) -> Iterator[Complaint]:
    links = situation.mapping("gpu", "topology_links").get("gpu_gpu")
    if not isinstance(links, dict):
        return
    pairs, wanted = _count(links.get("XGMI")), expected * len(situation.devices) // 2
    if pairs < wanted:
        yield Complaint("gpu.topology_links.gpu_gpu.XGMI", f"{wanted} pairs", str(pairs))


def check_fabric(situation: Situation) -> Iterator[Complaint]:
    """Check that the fabric manager has registered each GPU; otherwise collectives fail or use PCIe."""
    fabric = situation.mapping("gpu", "fabric")
    state, status = fabric.get("state"), fabric.get("status")
    if isinstance(state, str) and state not in {"N/A", "Completed"}:
        yield Complaint("gpu.fabric.state", "Completed", state)
    elif isinstance(status, str) and state == "Completed" and status != "Success":
        yield Complaint("gpu.fabric.status", "Success", status)


def check_partition(situation: Situation) -> Iterator[Complaint]:
    mig = name_gpus(situation.devices, lambda device: device.get("mig_mode") == "enabled")
    if mig:
        yield Complaint("gpu.devices.mig_mode", "disabled on all GPUs", f"enabled on {mig}")
    for name, whole in WHOLE.items():
        found = {device[name] for device in situation.devices if isinstance(device.get(name), str)}
        for mode in sorted(found - {whole}):
            yield Complaint(f"gpu.devices.{name}", whole, mode)


def check_compute_mode(situation: Situation) -> Iterator[Complaint]:
    """Check that the compute mode lets two processes use one GPU, as a colocated trainer and rollout engine do."""
    found = {str(device["compute_mode"]) for device in situation.devices if _is_known(device, "compute_mode")}
    for mode in sorted(found - {"Default"}):
        yield Complaint("gpu.devices.compute_mode", "Default", mode)


def check_slowdown(situation: Situation) -> Iterator[Complaint]:
    for device in situation.devices:
        reasons = device.get("throttle_reasons")
        slow = [reason for reason in reasons if reason in HARDWARE_SLOWDOWN] if isinstance(reasons, list) else []
        if slow:
            yield Complaint(f"gpu.devices.{device.get('index')}.throttle_reasons", "no slowdown", ", ".join(slow))


def check_power_limit(situation: Situation) -> Iterator[Complaint]:
    for device in situation.devices:
        limit, default = device.get("power_limit_w"), device.get("power_limit_default_w")
        if isinstance(limit, int | float) and isinstance(default, int | float) and limit < default:
            yield Complaint(f"gpu.devices.{device.get('index')}.power_limit_w", f"{default:g} W", f"{limit:g} W")


def check_alike(situation: Situation) -> Iterator[Complaint]:
    """Check that the GPUs have equal settings, because all GPUs of a node wait for the slowest."""
    for name in SHARED:
        found = {str(device[name]) for device in situation.devices if _is_known(device, name)}
        if len(found) > 1:
            yield Complaint(f"gpu.devices.{name}", "one value on all GPUs", ", ".join(sorted(found)))


def check_visibility(situation: Situation) -> Iterator[Complaint]:
    """Check the lists of visible devices: on AMD, Ray does not start where those of HIP, ROCr and CUDA disagree.

    On NVIDIA, a trainer with inference servers reads ``CUDA_VISIBLE_DEVICES`` as numbers, and gives each server
    consecutive GPU numbers, starting at its first GPU.  If the job's numbers have a gap, the trainer would use a GPU
    that the job does not own.
    """
    if situation.fact("gpu", "vendor") == gpu_amd.VENDOR:
        lists = {name: situation.fact("environment", name) for name in VISIBILITY}
        given = {name: value for name, value in lists.items() if isinstance(value, str)}
        if len(set(given.values())) > 1:
            found = ", ".join(f"{name}={value}" for name, value in given.items())
            yield Complaint("environment.HIP_VISIBLE_DEVICES", "the same list of devices in all these variables", found)
        return
    listed, size = situation.fact("environment", visible.NAME), situation.gpus_per_engine
    if size and isinstance(listed, str) and not _are_in_rows(listed, size):
        expected = "numbers" if size == 1 else f"{size} consecutive GPU numbers for each inference server"
        yield Complaint(f"environment.{visible.NAME}", expected, listed)


def _are_in_rows(listed: str, size: int) -> bool:
    entries = [entry.strip() for entry in listed.split(",")]
    if not all(map(str.isdecimal, entries)):
        return False
    numbers = sorted(map(int, entries))
    return all(number == numbers[place - place % size] + place % size for place, number in enumerate(numbers))


def check_rl_kernel(situation: Situation) -> Iterator[Complaint]:
    """Check that RL-Kernel's extension has code for these GPUs; otherwise calls fail or use no compiled kernel."""
    built = situation.mapping("code", "rl_kernel").get("extension_architectures")
    if not situation.has_enabled or not isinstance(built, list):
        return
    for capability in sorted({str(device.get("compute_capability")) for device in situation.devices}):
        if re.fullmatch(r"\d+\.\d", capability) and not any(serves(name, capability) for name in built):
            expected = f"code for compute capability {capability}"
            yield Complaint("code.rl_kernel.extension_architectures", expected, ", ".join(map(str, built)))


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


def _branch(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _is_marked(fact: str, mark: str, device: dict[str, Any]) -> bool:
    value = device.get(fact)
    return isinstance(value, dict) and value.get(mark) is True


def _is_known(device: dict[str, Any], name: str) -> bool:
    return name in device and not isinstance(device[name], Unknown)


CHECKS: Final = (
    Check(name="driver_toolkit", scope=Scope.GPUS, policy="fail", judge=check_driver),
    Check(name="gpu_errors", scope=Scope.GPUS, policy="fail", judge=check_errors),
    Check(name="gpu_ecc_mode", scope=Scope.GPUS, policy="warn", judge=partial(check_enabled, "ecc_mode")),
    Check(name="gpu_memory_repair", scope=Scope.GPUS, policy="fail", judge=check_memory_repair),
    Check(name="gpu_links", scope=Scope.GPUS, policy="fail", judge=check_links),
    Check(name="gpu_fabric", scope=Scope.GPUS, policy="fail", judge=check_fabric),
    Check(name="gpu_partition", scope=Scope.GPUS, policy="fail", judge=check_partition),
    Check(name="gpu_compute_mode", scope=Scope.GPUS, policy="warn", judge=check_compute_mode),
    Check(name="gpu_slowdown", scope=Scope.GPUS, policy="warn", judge=check_slowdown),
    Check(name="gpu_power_limit", scope=Scope.GPUS, policy="warn", judge=check_power_limit),
    Check(name="gpu_persistence", scope=Scope.GPUS, policy="warn", judge=partial(check_enabled, "persistence_mode")),
    Check(name="gpu_alike", scope=Scope.GPUS, policy="warn", judge=check_alike),
    Check(name="gpu_visibility", scope=Scope.GPUS, policy="fail", judge=check_visibility),
    Check(name="rl_kernel_architecture", scope=Scope.GPUS, policy="fail", judge=check_rl_kernel),
)
