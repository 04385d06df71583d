"""Read NVIDIA GPUs from NVML with the optional package nvidia-ml-py (module ``pynvml``)."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from rlk_repro.base.units import MIB
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.visible import select_given
from rlk_repro.rundir.manifest import Fact, Unknown

SWITCH: Final = ("disabled", "enabled")
FABRIC_STATES: Final = ("N/A", "Not Started", "In Progress", "Completed")
COMPUTE_MODES: Final = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
THROTTLE_REASONS: Final = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)

Question: TypeAlias = Callable[[Any, Any], Any]


def _ask(nvml: Any, question: Question, gpu: Any) -> Any:
    try:
        return question(nvml, gpu)
    except nvml.NVMLError as error:
        return Unknown(f"NVML: {error}")
    except AttributeError as error:
        return Unknown(f"nvidia-ml-py has no {error.name}")


def throttle_reasons(mask: int) -> list[str]:
    """Return the reasons why the GPU's clock is lowered, by name, from NVML's bits; an idle GPU has ``gpu_idle``."""
    return [name for bit, name in THROTTLE_REASONS if mask & bit]


def _remapped_rows(nvml: Any, gpu: Any) -> dict[str, Fact]:
    correctable, uncorrectable, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
    return {
        "correctable": correctable,
        "uncorrectable": uncorrectable,
        "is_pending": bool(pending),
        "is_failed": bool(failed),
    }


def _memory(nvml: Any, gpu: Any) -> Any:
    # Version 2 of NVML's call does not count the driver's reserve as used.
    return nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2)


def _ecc_errors(nvml: Any, gpu: Any, kind: int) -> int:
    return int(nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC))


def _nvlinks_up(nvml: Any, gpu: Any) -> int | Unknown:
    """For a link that this GPU does not have, NVML returns an error."""
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    states: list[int | Unknown] = [
        _ask(nvml, lambda module, link: module.nvmlDeviceGetNvLinkState(gpu, link), link) for link in links
    ]
    known = [state for state in states if not isinstance(state, Unknown)]
    return sum(known) if known else states[0]


def _fabric(nvml: Any, gpu: Any) -> dict[str, Fact]:
    """Only in state Completed are cluster UUID and clique id set; they are equal for all GPUs of one NVLink domain."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    state = FABRIC_STATES[info.state] if info.state < len(FABRIC_STATES) else str(info.state)
    if state != "Completed":
        reason = Unknown(f"fabric state is {state}")
        return {"state": state, "status": reason, "cluster_uuid": reason, "clique_id": reason}
    return {
        "state": state,
        "status": _text(nvml.nvmlErrorString(info.status)),
        "cluster_uuid": str(uuid.UUID(bytes=bytes(info.clusterUuid))),
        "clique_id": int(info.cliqueId),
    }


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


QUESTIONS: Final[dict[str, Question]] = {
    "name": lambda nvml, gpu: _text(nvml.nvmlDeviceGetName(gpu)),
    "uuid": lambda nvml, gpu: _text(nvml.nvmlDeviceGetUUID(gpu)),
    "pci_bus_id": lambda nvml, gpu: _text(nvml.nvmlDeviceGetPciInfo(gpu).busId),
    "vbios": lambda nvml, gpu: _text(nvml.nvmlDeviceGetVbiosVersion(gpu)),
    "compute_capability": lambda nvml, gpu: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(gpu)),
    "memory_total_mib": lambda nvml, gpu: _memory(nvml, gpu).total // MIB,
    "memory_used_mib": lambda nvml, gpu: _memory(nvml, gpu).used // MIB,
    "ecc_mode": lambda nvml, gpu: SWITCH[nvml.nvmlDeviceGetEccMode(gpu)[0]],
    "ecc_corrected": lambda nvml, gpu: _ecc_errors(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "ecc_uncorrected": lambda nvml, gpu: _ecc_errors(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    "remapped_rows": _remapped_rows,
    "clocks_current_sm_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "clocks_current_memory_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "clocks_max_sm_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "clocks_max_memory_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "clocks_applications_sm_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetApplicationsClock(gpu, nvml.NVML_CLOCK_SM),
    "clocks_applications_memory_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetApplicationsClock(gpu, nvml.NVML_CLOCK_MEM),
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "power_limit_default_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000,
    "mig_mode": lambda nvml, gpu: SWITCH[nvml.nvmlDeviceGetMigMode(gpu)[0]],
    "persistence_mode": lambda nvml, gpu: SWITCH[nvml.nvmlDeviceGetPersistenceMode(gpu)],
    "compute_mode": lambda nvml, gpu: COMPUTE_MODES[nvml.nvmlDeviceGetComputeMode(gpu)],
    "throttle_reasons": lambda nvml, gpu: throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
    "pcie_gen": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
    "pcie_gen_max": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    "pcie_width": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "nvlinks_up": _nvlinks_up,
    "fabric": _fabric,
}


@contextmanager
def session(nvml: Any) -> Iterator[Unknown | None]:
    """Open NVML during the block; yield None, or the reason why NVML cannot be opened."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield Unknown(f"NVML: {error}")
        return
    try:
        yield None
    finally:
        nvml.nvmlShutdown()


def load_pynvml() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def read_system(nvml: Any) -> dict[str, Fact]:
    version = _ask(nvml, lambda module, _: module.nvmlSystemGetCudaDriverVersion_v2(), None)
    return {
        "driver": _ask(nvml, lambda module, _: _text(module.nvmlSystemGetDriverVersion()), None),
        "cuda_driver_version": f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) else version,
    }


def read_devices(nvml: Any) -> list[dict[str, Fact]]:
    return [
        {"index": index, **{name: _ask(nvml, question, gpu) for name, question in QUESTIONS.items()}}
        for index, gpu in given_handles(nvml)
    ]


def read_use(nvml: Any) -> list[GpuUse]:
    return [
        GpuUse(
            index=index,
            memory_used_mib=_ask(nvml, QUESTIONS["memory_used_mib"], gpu),
            pids=tuple(_pids(nvml, gpu)),
        )
        for index, gpu in given_handles(nvml)
    ]


def given_handles(nvml: Any) -> list[tuple[int, Any]]:
    """Return the number and the handle of each GPU of this job; a GPU that fell off the bus is missing."""
    count = _ask(nvml, lambda module, _: module.nvmlDeviceGetCount(), None)
    handles = []
    for index in range(0 if isinstance(count, Unknown) else count):
        gpu = _ask(nvml, lambda module, number: module.nvmlDeviceGetHandleByIndex(number), index)
        if not isinstance(gpu, Unknown):
            handles.append((index, gpu))
    return select_given(handles, lambda handle: (handle[0], _ask(nvml, QUESTIONS["uuid"], handle[1])))


def _pids(nvml: Any, gpu: Any) -> list[int]:
    found = _ask(nvml, lambda module, handle: module.nvmlDeviceGetComputeRunningProcesses(handle), gpu)
    return [] if isinstance(found, Unknown) else [process.pid for process in found]
