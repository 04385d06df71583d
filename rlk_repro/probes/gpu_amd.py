"""Collect the facts of section ``gpu`` on AMD from the kernel's files: KFD's topology and the devices in sysfs.

Every container that may use the GPUs has these files, and reading them cannot hang.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.units import MIB
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.sources import ask, derive, link_name, list_names, locate, parse_int, read_int, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

VENDOR: Final = "amd"
KFD: Final = "/sys/class/kfd/kfd"
NODES: Final = f"{KFD}/topology/nodes"
ROCM_VERSION: Final = "/opt/rocm/.info/version"
LINK_TYPES: Final = {2: "PCIE", 11: "XGMI"}  # the kernel's values of HSA_IOLINKTYPE
AMD_SMI: Final = ("amd-smi", "static", "--asic", "--bus", "--json")


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
        "devices": _named(devices),
        "topology_links": {"gpu_gpu": _links(root, gpus)},
    }


def read_use(root: Path = Path("/")) -> list[GpuUse] | Unknown:
    """Return memory and processes of every AMD GPU; the process ids are those of the host."""
    gpus = find_gpus(root)
    pids = [name for name in list_names(root, f"{KFD}/proc") if name.isdigit()]
    return [
        GpuUse(
            index=index,
            memory_used_mib=_mib(root, f"{gpu.device}/mem_info_vram_used"),
            pids=tuple(int(pid) for pid in pids if _is_used_by(root, gpu, pid)),
        )
        for index, gpu in enumerate(gpus)
    ] or _no_gpu(root)


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


def gfx_name(version: int) -> str:
    """Return the compiler's name of a ``gfx_target_version``: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def parse_levels(text: str) -> dict[str, int]:
    """Return the present and the highest clock in MHz from a ``pp_dpm`` file with lines like ``1: 2100Mhz *``."""
    levels = [(int(match[1]), bool(match[2])) for match in re.finditer(r"^\d+: (\d+)Mhz( \*)?", text, re.M | re.I)]
    current = [clock for clock, is_current in levels if is_current]
    return {"max": max(clock for clock, _ in levels), "current": current[0] if current else 0} if levels else {}


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
        "name": derive(
            read_text(root, f"{folder}/product_name"), lambda name: name or Unknown("the GPU stores no product name")
        ),
        "pci_bus_id": link_name(root, folder),
        "device_id": read_text(root, f"{folder}/device"),
        "gfx": gfx_name(gpu.properties.get("gfx_target_version", 0)),
        "vbios": read_text(root, f"{folder}/vbios_version"),
        "memory_total_mib": _mib(root, f"{folder}/mem_info_vram_total"),
        "memory_used_mib": _mib(root, f"{folder}/mem_info_vram_used"),
        "compute_partition": read_text(root, f"{folder}/current_compute_partition"),
        "memory_partition": read_text(root, f"{folder}/current_memory_partition"),
        **_clocks(root, folder),
        "power_limit_w": _watts(root, folder, "power1_cap"),
        "power_limit_default_w": _watts(root, folder, "power1_cap_default"),
        **_errors(root, folder),
        "retired_pages": derive(read_text(root, f"{folder}/ras/gpu_vram_bad_pages"), parse_bad_pages),
        "pcie_speed": read_text(root, f"{folder}/current_link_speed"),
        "pcie_width": read_int(root, f"{folder}/current_link_width"),
    }


def _clocks(root: Path, folder: str) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    for name, file in (("sm", "pp_dpm_sclk"), ("memory", "pp_dpm_mclk")):
        text = read_text(root, f"{folder}/{file}")
        levels = {} if isinstance(text, Unknown) else parse_levels(text)
        missing = text if isinstance(text, Unknown) else Unknown(f"{folder}/{file} lists no clock speed")
        for kind in ("current", "max"):
            facts[f"clocks_{kind}_{name}_mhz"] = levels.get(kind, missing)
    return facts


def _errors(root: Path, folder: str) -> dict[str, Fact]:
    text = read_text(root, f"{folder}/ras/umc_err_count")
    if isinstance(text, Unknown):
        return {"ecc_mode": text, "ecc_corrected": text, "ecc_uncorrected": text}
    counts = dict(re.findall(r"^(ue|ce): (\d+)$", text, re.MULTILINE))
    return {
        "ecc_mode": "enabled",
        "ecc_corrected": parse_int(counts.get("ce", ""), "umc_err_count"),
        "ecc_uncorrected": parse_int(counts.get("ue", ""), "umc_err_count"),
    }


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
    text = read_text(root, path)
    lines = [] if isinstance(text, Unknown) else [line.split() for line in text.splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


def _named(devices: list[dict[str, Any]]) -> list[dict[str, Fact]]:
    unnamed = [device for device in devices if isinstance(device["name"], Unknown)]
    names = derive(ask(AMD_SMI), parse_product_names) if unnamed else {}
    missing = Unknown("the board and amd-smi give no product name")
    for device in unnamed:
        device["name"] = missing if isinstance(names, Unknown) else names.get(str(device["pci_bus_id"]), missing)
    return devices


def parse_product_names(text: str) -> dict[str, str]:
    """Return product names by PCI address from amd-smi's JSON list; ROCm 7 puts this list under ``gpu_data``."""
    starts = [position for position in (text.find("{"), text.find("[")) if position >= 0]
    try:
        value = json.loads(text[min(starts, default=0) :])  # amd-smi may print warnings before the JSON
    except (ValueError, RecursionError):
        return {}
    rows = value.get("gpu_data") if isinstance(value, dict) else value
    names = {}
    for row in rows if isinstance(rows, list) else ():
        try:
            address, name = row["bus"]["bdf"], row["asic"]["market_name"]
        except (KeyError, TypeError):
            continue
        if isinstance(address, str) and isinstance(name, str) and name not in {"", "N/A"}:
            names[address.lower()] = name
    return names
