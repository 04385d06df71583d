"""Collect the facts of section ``gpu`` for GPUs of every vendor, and find the processes that use the GPUs now.

A GPU without a driver is still on the PCI bus; the section then says that the driver is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rlk_repro.probes import gpu_amd, gpu_nvidia
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.sources import list_names, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

SECTION: Final = "gpu"
PCI: Final = "/sys/bus/pci/devices"
VENDOR_IDS: Final = {"0x10de": gpu_nvidia.VENDOR, "0x1002": gpu_amd.VENDOR}
# PCI classes of display controllers and accelerators (MI300X).  NVSwitches and audio functions have other classes.
GPU_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
NO_VENDOR: Final = "none"


def probe(root: Path = Path("/")) -> dict[str, Fact]:
    """Return the facts of all GPUs; on a machine without a GPU, the vendor is ``none`` and the count 0."""
    nvidia = gpu_nvidia.probe(root)
    if not isinstance(nvidia, Unknown):
        return nvidia
    amd = gpu_amd.probe(root)
    if not isinstance(amd, Unknown):
        return amd
    vendors = find_on_bus(root)
    if not vendors:
        reason = Unknown(f"no GPU on the PCI bus; {nvidia.reason}; {amd.reason}")
        return {"vendor": NO_VENDOR, "count": 0, "devices": [], "driver": reason}
    refusal = nvidia.reason if vendors[0] == gpu_nvidia.VENDOR else amd.reason
    missing = Unknown(f"GPUs on the PCI bus: {len(vendors)}, but {refusal}")
    return {"vendor": vendors[0], "count": missing, "devices": missing, "driver": missing}


def count_gpus(root: Path = Path("/")) -> int:
    """Return how many GPUs the machine has, also those that ``CUDA_VISIBLE_DEVICES`` leaves out where that is known."""
    found = probe(root)["count"]
    return max(len(find_on_bus(root)), found if isinstance(found, int) else 0)


def busy_gpus(root: Path = Path("/")) -> list[GpuUse] | Unknown:
    """Return the busy GPUs: a process uses the GPU, or more memory is in use than an idle driver needs."""
    nvidia = gpu_nvidia.read_use()
    for use in (nvidia, gpu_amd.read_use(root)):
        if not isinstance(use, Unknown):
            return [gpu for gpu in use if gpu.is_busy]
    return nvidia if find_on_bus(root) else []


def find_on_bus(root: Path = Path("/")) -> list[str]:
    """Return the vendor of every GPU on the PCI bus, with or without a driver."""
    functions = [f"{PCI}/{name}" for name in list_names(root, PCI)]
    ids = (
        read_text(root, f"{folder}/vendor")
        for folder in functions
        if str(read_text(root, f"{folder}/class")).startswith(GPU_CLASSES)
    )
    return sorted(VENDOR_IDS[vendor] for vendor in ids if isinstance(vendor, str) and vendor in VENDOR_IDS)
