"""Sample the state of GPUs at low cost: by NVML on NVIDIA, by sysfs files on AMD.

A value that a device does not report is None.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rlk_repro.probes import gpu_amd, nvml
from rlk_repro.probes.sources import list_names, read_int
from rlk_repro.rundir.manifest import Unknown


def open_sensors(root: Path = Path("/")) -> NvidiaSensors | AmdSensors | None:
    """Open the sensors; return None if this process sees no GPU or has no library that reads the GPUs' sensors."""
    pynvml = nvml.load_pynvml()
    if pynvml is not None:
        sensors = NvidiaSensors(pynvml)
        if sensors.gpus:
            return sensors
    on_amd = gpu_amd.find_gpus(root)
    return AmdSensors(root, [gpu.device for gpu in on_amd], load_amdsmi()) if on_amd else None


NVIDIA_QUESTIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "memory_used_bytes": lambda lib, gpu: lib.nvmlDeviceGetMemoryInfo(gpu, version=lib.nvmlMemory_v2).used,
    "utilization_percent": lambda lib, gpu: lib.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "power_w": lambda lib, gpu: lib.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_c": lambda lib, gpu: lib.nvmlDeviceGetTemperature(gpu, lib.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda lib, gpu: lib.nvmlDeviceGetClockInfo(gpu, lib.NVML_CLOCK_SM),
    "throttle_reasons": lambda lib, gpu: nvml.throttle_reasons(lib.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
}


class NvidiaSensors:
    def __init__(self, pynvml: Any) -> None:
        self._lib = pynvml
        self.gpus: list[tuple[int, Any]] = []
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self.gpus = nvml.given_handles(pynvml)

    def read(self) -> list[dict[str, Any]]:
        return [
            {"index": index, **{name: self._ask(question, gpu) for name, question in NVIDIA_QUESTIONS.items()}}
            for index, gpu in self.gpus
        ]

    def close(self) -> None:
        self._lib.nvmlShutdown()

    def _ask(self, question: Callable[[Any, Any], Any], gpu: Any) -> Any:
        try:
            return question(self._lib, gpu)
        except (self._lib.NVMLError, AttributeError):
            return None


class AmdSensors:
    """Read the GPUs from sysfs; each call reads the throttling of one GPU only, because amdsmi needs 0.1 s per GPU."""

    def __init__(self, root: Path, devices: list[str], amdsmi: Any | None) -> None:
        self._root = root
        self._devices = devices
        self._lib = amdsmi
        self._handles = [] if amdsmi is None else amdsmi.amdsmi_get_processor_handles()
        self._turn = 0

    def read(self) -> list[dict[str, Any]]:
        samples = [{"index": index, **self._read_device(folder)} for index, folder in enumerate(self._devices)]
        if self._handles:
            self._turn = (self._turn + 1) % min(len(self._handles), len(samples))
            samples[self._turn]["throttle_reasons"] = self._read_throttling(self._handles[self._turn])
        return samples

    def close(self) -> None:
        if self._lib is not None:
            self._lib.amdsmi_shut_down()

    def _read_device(self, folder: str) -> dict[str, Any]:
        sensors = next(iter(list_names(self._root, f"{folder}/hwmon")), "")
        hwmon = f"{folder}/hwmon/{sensors}"
        power = self._read(f"{hwmon}/power1_input", 1e-6)
        return {
            "memory_used_bytes": self._read(f"{folder}/mem_info_vram_used"),
            "utilization_percent": self._read(f"{folder}/gpu_busy_percent"),
            "power_w": self._read(f"{hwmon}/power1_average", 1e-6) if power is None else power,
            "temperature_c": self._read(f"{hwmon}/temp2_input", 1e-3),
            "sm_clock_mhz": self._read(f"{hwmon}/freq1_input", 1e-6),
            "throttle_reasons": None,
        }

    def _read(self, path: str, scale: float = 1) -> float | None:
        value = read_int(self._root, path)
        return None if isinstance(value, Unknown) else value * scale

    def _read_throttling(self, handle: Any) -> list[str] | None:
        try:
            status = self._lib.amdsmi_get_violation_status(handle)  # type: ignore[union-attr]
        except (self._lib.AmdSmiException, AttributeError):  # type: ignore[union-attr]
            return None
        active = {name.removeprefix("active_"): value for name, value in status.items() if name.startswith("active_")}
        known = {name: value for name, value in active.items() if isinstance(value, int)}
        return sorted(name for name, value in known.items() if value) if known else None


def load_amdsmi() -> Any | None:
    try:
        import amdsmi
    except (ImportError, OSError, KeyError):  # importing amdsmi loads one of the driver's libraries
        return None
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        return None
    return amdsmi
