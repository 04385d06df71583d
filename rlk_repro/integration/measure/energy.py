"""Read the energy that this process's GPU uses, by NVML's counter (the package nvidia-ml-py)."""

from __future__ import annotations

from typing import Any, Self

import torch

from rlk_repro.operators import Platform


class EnergyCounter:
    """An open energy counter of NVML, which covers all processes on the device."""

    def __init__(self, nvml: Any, device: Any) -> None:
        self._nvml, self._device = nvml, device
        self._last = self._read()

    @classmethod
    def open(cls, uuid: str) -> Self | None:
        """Open a device's counter by UUID, as device numbers vary with visible devices; return None if NVML fails."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        except pynvml.NVMLError:
            return None

    def read_j(self) -> float | None:
        """Return the joules used since the last reading, or since the counter was opened; None if a reading failed."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None or self._last < before:
            return None
        return (self._last - before) / 1e3

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _read(self) -> int | None:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device))
        except (self._nvml.NVMLError, AttributeError):
            return None


def open_energy(platform: str) -> EnergyCounter | None:
    if platform != Platform.CUDA:
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else EnergyCounter.open(f"GPU-{uuid}")
