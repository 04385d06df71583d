"""Read NVIDIA GPUs from nvidia-smi's CSV output, with the fact names of module ``nvml``.

The query names only fields that every driver knows: a driver refuses the whole query for one unknown field.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Final

from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.sources import ask, derive, parse_int
from rlk_repro.probes.visible import select_given
from rlk_repro.rundir.manifest import Fact, Unknown

TOOL: Final = "nvidia-smi"
NOT_A_VALUE: Final = re.compile(r"\[.*\]|N/A|Not Supported|Unknown Error|", re.IGNORECASE)

Convert = Callable[[str], Fact]


def _number(text: str) -> Fact:
    return parse_int(text, TOOL)


def _watts(text: str) -> Fact:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else Unknown(f"{TOOL}: {text!r} is not a number of watts")


FIELDS: Final[dict[str, tuple[str, Convert]]] = {
    "index": ("index", _number),
    "name": ("name", str),
    "uuid": ("uuid", str),
    "pci_bus_id": ("pci.bus_id", str),
    "vbios": ("vbios_version", str),
    "compute_capability": ("compute_cap", str),
    "memory_total_mib": ("memory.total", _number),
    "memory_used_mib": ("memory.used", _number),
    "ecc_mode": ("ecc.mode.current", str.lower),
    "ecc_corrected": ("ecc.errors.corrected.volatile.total", _number),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total", _number),
    "clocks_current_sm_mhz": ("clocks.current.sm", _number),
    "clocks_current_memory_mhz": ("clocks.current.memory", _number),
    "clocks_max_sm_mhz": ("clocks.max.sm", _number),
    "clocks_max_memory_mhz": ("clocks.max.memory", _number),
    "clocks_applications_sm_mhz": ("clocks.applications.graphics", _number),
    "clocks_applications_memory_mhz": ("clocks.applications.memory", _number),
    "power_limit_w": ("enforced.power.limit", _watts),
    "power_limit_default_w": ("power.default_limit", _watts),
    "mig_mode": ("mig.mode.current", str.lower),
    "persistence_mode": ("persistence_mode", str.lower),
    "compute_mode": ("compute_mode", str),
    "pcie_gen": ("pcie.link.gen.current", _number),
    "pcie_gen_max": ("pcie.link.gen.max", _number),
    "pcie_width": ("pcie.link.width.current", _number),
    "temperature_c": ("temperature.gpu", _number),
}
NVML_ONLY: Final = ("throttle_reasons", "remapped_rows", "fabric", "nvlinks_up")


def read_system() -> dict[str, Fact]:
    version = derive(ask([TOOL, "--version"]), _find_cuda)
    return {"driver": derive(_query("driver_version"), lambda rows: rows[0][0]), "cuda_driver_version": version}


def read_devices() -> list[dict[str, Fact]] | Unknown:
    """Return every fact of every GPU that this job was given, or Unknown if nvidia-smi lists no GPU."""
    rows = _query(*(field for field, _ in FIELDS.values()))
    if isinstance(rows, Unknown):
        return rows
    missing = dict.fromkeys(NVML_ONLY, Unknown(f"{TOOL} does not report this fact; install nvidia-ml-py"))
    devices = [dict(zip(FIELDS, map(_fact, FIELDS.values(), row), strict=True)) | missing for row in rows]
    return select_given(devices, lambda device: (device["index"], device["uuid"]))


def read_use() -> list[GpuUse] | Unknown:
    rows = _query("index", "uuid", "memory.used")
    apps = _table(ask([TOOL, "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits"]))
    processes = [row for row in ([] if isinstance(apps, Unknown) else apps) if len(row) == 2 and row[1].isdigit()]
    if isinstance(rows, Unknown):
        return rows
    return [
        GpuUse(
            index=int(index),
            memory_used_mib=parse_int(used, TOOL),
            pids=tuple(int(pid) for owner, pid in processes if owner == uuid),
        )
        for index, uuid, used in select_given(rows, lambda row: (parse_int(row[0], TOOL), row[1]))
        if index.isdigit()
    ]


def read_topology() -> dict[str, Fact]:
    """Return the text of ``nvidia-smi topo -m``, and the number of device pairs for each kind of link."""
    text = ask([TOOL, "topo", "-m"])
    return {
        "topology_text": derive(text, _without_colour),
        "topology_links": derive(text, lambda matrix: parse_topology(_without_colour(matrix))),
    }


def parse_topology(text: str) -> dict[str, Fact]:
    """Count the device pairs in nvidia-smi's matrix by link: ``{"gpu_gpu": {"NV18": 28}, "gpu_nic": {"PIX": 8}}``."""
    lines = [line.split() for line in text.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words[:2]), [])
    columns = [name for name in header if re.fullmatch(r"(GPU|NIC)\d+|mlx\S+", name)]
    rows = {words[0]: words[1:] for words in lines if words and words[0] in columns and words != header}
    gpus: Counter[str] = Counter()
    nics: Counter[str] = Counter()
    for row, links in rows.items():
        for column, link in zip(columns, links, strict=False):
            if row.startswith("GPU") and not column.startswith("GPU"):
                nics[link] += 1
            elif row.startswith("GPU") and columns.index(row) < columns.index(column):
                gpus[link] += 1
    return {"gpu_gpu": dict(sorted(gpus.items())), "gpu_nic": dict(sorted(nics.items()))}


def _query(*fields: str) -> list[list[str]] | Unknown:
    rows = _table(ask([TOOL, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]))
    if isinstance(rows, Unknown):
        return rows
    whole = [row for row in rows if len(row) == len(fields)]
    return whole or Unknown(f"{TOOL} lists no GPU")


def _table(text: str | Unknown) -> list[list[str]] | Unknown:
    return derive(
        text,
        lambda lines: [[cell.strip() for cell in line.split(",")] for line in lines.splitlines() if line.strip()],
    )


def _fact(field: tuple[str, Convert], cell: str) -> Fact:
    return Unknown(f"{TOOL} reports {cell or 'nothing'}") if NOT_A_VALUE.fullmatch(cell) else field[1](cell)


def _find_cuda(text: str) -> str | Unknown:
    match = re.search(r"CUDA Version\s*:\s*([\d.]+)", text)
    return match[1] if match else Unknown(f"{TOOL} reports no CUDA version")


def _without_colour(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text).strip()
