"""Collect the facts of section ``gpu`` on NVIDIA: from NVML if nvidia-ml-py is installed, else from nvidia-smi."""

from __future__ import annotations

import re
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from rlk_repro.probes import nvidia_smi, nvml
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.sources import agreed, ask, derive, list_names, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

VENDOR: Final = "nvidia"
PROC_VERSION: Final = "/proc/driver/nvidia/version"
IMEX_CHANNELS: Final = "/dev/nvidia-caps-imex-channels"
CDI_FOLDERS: Final = ("/etc/cdi", "/var/run/cdi")
COMPAT_FOLDER: Final = "/usr/local/cuda/compat"
FABRIC_FACTS: Final = ("state", "status", "cluster_uuid", "clique_id")


def probe(root: Path = Path("/"), pynvml: Any | None = None) -> dict[str, Fact] | Unknown:
    """Return every fact of NVIDIA GPUs, or Unknown with both reasons if neither NVML nor nvidia-smi shows a GPU."""
    found = _through_nvml(nvml.load_pynvml() if pynvml is None else pynvml)
    if isinstance(found, Unknown):
        devices = nvidia_smi.read_devices()
        if isinstance(devices, Unknown):
            return Unknown(f"{found.reason}; {devices.reason}")
        found = {"source": nvidia_smi.TOOL, **nvidia_smi.read_system(), "devices": devices}
    return _complete(root, found)


def read_use(pynvml: Any | None = None) -> list[GpuUse] | Unknown:
    """Return memory and processes of every NVIDIA GPU that this job was given."""
    module = nvml.load_pynvml() if pynvml is None else pynvml
    if module is not None:
        with nvml.session(module) as refusal:
            if refusal is None:
                return nvml.read_use(module)
    return nvidia_smi.read_use()


def _through_nvml(module: Any | None) -> dict[str, Fact] | Unknown:
    if module is None:
        return Unknown("nvidia-ml-py is not installed")
    with nvml.session(module) as refusal:
        if refusal is not None:
            return refusal
        devices = nvml.read_devices(module)
        return (
            {"source": "nvml", **nvml.read_system(module), "devices": devices} if devices else Unknown("NVML: no GPU")
        )


def _complete(root: Path, found: dict[str, Fact]) -> dict[str, Fact]:
    devices = found["devices"]
    assert isinstance(devices, list)
    fabrics = [device.pop("fabric") for device in devices]
    up = [device["nvlinks_up"] for device in devices if isinstance(device["nvlinks_up"], int)]
    return {
        "vendor": VENDOR,
        "count": len(devices),
        **found,
        "nvlinks_up": sum(up) if up else devices[0]["nvlinks_up"],
        "fabric": {name: agreed(derive(fabric, itemgetter(name)) for fabric in fabrics) for name in FABRIC_FACTS},
        **nvidia_smi.read_topology(),
        "kernel_module": derive(read_text(root, PROC_VERSION), lambda text: text.partition("\n")[0].strip()),
        "imex_channels": len(list_names(root, IMEX_CHANNELS)) or Unknown(f"{IMEX_CHANNELS} has no channel"),
        "compat_libcuda": _compat_libcuda(root),
        "container_toolkit": _container_toolkit(),
        "cdi_versions": _cdi_versions(root),
    }


def _compat_libcuda(root: Path) -> str | Unknown:
    """CUDA's forward-compatibility library may replace the driver's own ``libcuda``."""
    names = [name for name in list_names(root, COMPAT_FOLDER) if re.fullmatch(r"libcuda\.so\.\d+\.\d+.*", name)]
    return names[0].removeprefix("libcuda.so.") if names else Unknown(f"{COMPAT_FOLDER} holds no libcuda.so")


def _container_toolkit() -> str | Unknown:
    answer = ask(["nvidia-ctk", "--version"])
    if isinstance(answer, Unknown):
        answer = ask(["nvidia-container-cli", "--version"])
    return derive(answer, lambda text: (text.strip().splitlines() or [""])[0])


def _cdi_versions(root: Path) -> list[Any] | Unknown:
    versions = set()
    for folder in CDI_FOLDERS:
        for name in list_names(root, folder):
            text = read_text(root, f"{folder}/{name}")
            match = None if isinstance(text, Unknown) else re.search(r"cdiVersion\"?:\s*\"?([\d.]+)", text)
            versions |= {match[1]} if match else set()
    return sorted(versions) or Unknown(f"no CDI description in {' or '.join(CDI_FOLDERS)}")
