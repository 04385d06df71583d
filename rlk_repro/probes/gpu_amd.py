"""Collect the facts of section ``gpu`` on AMD from the kernel's files: KFD's topology and the devices in sysfs.

Every container that may use the GPUs has these files, and reading them cannot hang.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base.units import MIB
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.sources import derive, known_or, link_name, list_names, locate, parse_int, read_int, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

VENDOR: Final = "amd"
KFD: Final = "/sys/class/kfd/kfd"
NODES: Final = f"{KFD}/topology/nodes"
ROCM_VERSION: Final = "/opt/rocm/.info/version"
LINK_TYPES: Final = {2: "PCIE", 11: "XGMI"}  # the kernel's values of HSA_IOLINKTYPE
DEVICES: Final = {"0x74a1": "AMD Instinct MI300X", "0x74b5": "AMD Instinct MI300X VF"}


@dataclass(frozen=True, kw_only=True)
class KfdGpu:
    """One GPU as ROCm counts GPUs: a device in a partitioned mode counts as several GPUs."""

    node: int
    gpu_id: int | Unknown
    properties: dict[str, int]

    @property
    def device(self) -> str:
        return f"/sys/class/drm/renderD{self.properties.get('drm_render_minor', 0)}/device"


def probe(root: Path = Path("/")) -> dict[str, Fact] | Unknown:
    gpus = find_gpus(root)
    if not gpus:
        return _no_gpu(root)
    devices = [{"index": index, **_device(root, gpu)} for index, gpu in enumerate(gpus)]
    return {
        "vendor": VENDOR,
        "count": len(gpus),
        "source": "sysfs",
        "driver": read_text(root, "/sys/module/amdgpu/version"),
        "rocm_version": read_text(root, ROCM_VERSION),
        "devices": devices,
        "topology_links": {"gpu_gpu": _links(root, gpus)},
    }


def read_use(root: Path = Path("/")) -> list[GpuUse] | Unknown:
    """Return memory and processes of every AMD GPU; the process ids are those of the host."""
    gpus = find_gpus(root)
    pids = [name for name in list_names(root, f"{KFD}/proc") if name.isdigit()]
    found = []
    for index, gpu in enumerate(gpus):
        used_mib = _mib(root, f"{gpu.device}/mem_info_vram_used")
        users = tuple(int(pid) for pid in pids if _is_used_by(root, gpu, pid))
        found.append(GpuUse(index=index, memory_used_mib=used_mib, pids=users))
    return found or _no_gpu(root)


def find_gpus(root: Path) -> list[KfdGpu]:
    """Return the KFD nodes that have compute units and whose render device is in this process's /dev/dri."""
    numbers = sorted(int(name) for name in list_names(root, NODES) if name.isdigit())
    nodes = [
        KfdGpu(
            node=number,
            gpu_id=read_int(root, f"{NODES}/{number}/gpu_id"),
            properties=_properties(root, f"{NODES}/{number}/properties"),
        )
        for number in numbers
    ]
    given = {name for name in list_names(root, "/dev/dri") if name.startswith("renderD")}
    return [
        gpu
        for gpu in nodes
        if gpu.properties.get("simd_count", 0) > 0 and f"renderD{gpu.properties.get('drm_render_minor')}" in given
    ]


def parse_levels(text: str) -> dict[str, int]:
    """Return the present and the highest clock in MHz from a ``pp_dpm`` file with lines like ``1: 2100Mhz *``.

    Level ``S`` is deep sleep; a file may mark no level.
    """
    facts: dict[str, int] = {}
    for match in re.finditer(r"^\s*\w+:\s*(\d+)\s*Mhz(\s*\*)?", text, re.M | re.I):
        facts["max"] = max(int(match[1]), facts.get("max", 0))
        if match[2]:
            facts["current"] = int(match[1])
    return facts


def parse_bad_pages(text: str) -> dict[str, Fact]:
    """Count the broken memory pages in ``gpu_vram_bad_pages``: lines end in R (retired), P (waiting) or F (failed)."""
    marks = Counter(re.findall(r"^0x[0-9a-f]+ : 0x[0-9a-f]+ : ([RPF])$", text, re.M | re.I))
    return {"retired": marks["R"], "is_pending": marks["P"] > 0, "is_failed": marks["F"] > 0}


def _no_gpu(root: Path) -> Unknown:
    if not locate(root, NODES).exists():
        return Unknown(f"{KFD} absent")
    return Unknown(f"{NODES} shows no GPU whose render device is in /dev/dri")


def _device(root: Path, gpu: KfdGpu) -> dict[str, Fact]:
    folder = gpu.device
    return {
        "name": _find_name(root, folder),
        "pci_bus_id": link_name(root, folder),
        "vbios": read_text(root, f"{folder}/vbios_version"),
        "memory_total_mib": _mib(root, f"{folder}/mem_info_vram_total"),
        "compute_partition": read_text(root, f"{folder}/current_compute_partition"),
        "memory_partition": read_text(root, f"{folder}/current_memory_partition"),
        **_clocks(root, folder),
        "power_limit_w": _watts(root, folder, "power1_cap"),
        **_errors(root, folder),
        "retired_pages": derive(read_text(root, f"{folder}/ras/gpu_vram_bad_pages"), parse_bad_pages),
        "pcie_width": read_int(root, f"{folder}/current_link_width"),
    }


def _find_name(root: Path, folder: str) -> str | Unknown:
    """Return the board's name; a virtual function has none, so its device id names it."""
    name, device_id = read_text(root, f"{folder}/product_name"), read_text(root, f"{folder}/device")
    if isinstance(name, str) and name:
        return name
    return DEVICES.get(str(device_id), Unknown(f"the board has no product name, and its id is {device_id}"))


def _clocks(root: Path, folder: str) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    for name, file in (("sm", "pp_dpm_sclk"), ("memory", "pp_dpm_mclk")):
        levels = parse_levels(known_or(read_text(root, f"{folder}/{file}"), ""))
        missing = Unknown(f"{folder}/{file} lists no clock speed")
        for kind in ("current", "max"):
            facts[f"clocks_{kind}_{name}_mhz"] = levels.get(kind, missing)
    return facts


def _errors(root: Path, folder: str) -> dict[str, Fact]:
    text = read_text(root, f"{folder}/ras/umc_err_count")
    if isinstance(text, Unknown):
        return {"ecc_mode": text, "ecc_uncorrected": text}
    _, _, count = text.partition("ue: ")
    return {"ecc_mode": "enabled", "ecc_uncorrected": parse_int(count.partition("\n")[0], "umc_err_count")}


def _watts(root: Path, folder: str, name: str) -> float | Unknown:
    sensors = list_names(root, f"{folder}/hwmon")
    if not sensors:
        return Unknown(f"{folder}/hwmon absent")
    return derive(read_int(root, f"{folder}/hwmon/{sensors[0]}/{name}"), lambda microwatts: microwatts / 1e6)


def _mib(root: Path, path: str) -> int | Unknown:
    return derive(read_int(root, path), lambda size_bytes: size_bytes // MIB)


def _is_used_by(root: Path, gpu: KfdGpu, pid: str) -> bool:
    return not isinstance(read_int(root, f"{KFD}/proc/{pid}/vram_{gpu.gpu_id}"), Unknown)


def _links(root: Path, gpus: list[KfdGpu]) -> dict[str, int]:
    ours = {gpu.node for gpu in gpus}
    counts: Counter[str] = Counter()
    for gpu in gpus:
        folder = f"{NODES}/{gpu.node}/io_links"
        for name in list_names(root, folder):
            link = _properties(root, f"{folder}/{name}/properties")
            if link.get("node_to") in ours and gpu.node < link["node_to"]:
                counts[LINK_TYPES.get(link.get("type", 0), f"type {link.get('type', 0)}")] += 1
    return dict(sorted(counts.items()))


def _properties(root: Path, path: str) -> dict[str, int]:
    lines = [line.split() for line in known_or(read_text(root, path), "").splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
