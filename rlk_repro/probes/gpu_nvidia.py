"""Collect the facts of section ``gpu`` on NVIDIA: from NVML, by the package nvidia-ml-py (module ``pynvml``).

NVML does not tell how GPUs and network adapters are connected; ``nvidia-smi topo -m`` does.
"""

from __future__ import annotations

import ctypes
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any, Final, TypeAlias

from rlk_repro.base.units import MIB
from rlk_repro.probes import sources
from rlk_repro.probes.gpu_use import GpuUse, select_given
from rlk_repro.probes.sources import agreed, derive, known_or, list_names
from rlk_repro.rundir.manifest import Fact, Unknown

VENDOR: Final = "nvidia"
NOT_INSTALLED: Final = Unknown("nvidia-ml-py is not installed")
# NGC's images keep the libraries in ``lib.real``, and link ``lib`` to it where the driver needs them.
COMPAT_FOLDERS: Final = ("", "/lib", "/lib.real")
SWITCH: Final = ("disabled", "enabled")
FABRIC_FACTS: Final = ("state", "status", "health", "cluster_uuid", "clique_id")
FABRIC_STATES: Final = ("N/A", "Not Started", "In Progress", "Completed")
# bits of NVML's health mask, two for each: 1 means true
FABRIC_TROUBLES: Final = (
    "bandwidth: degraded",
    "route recovery in progress",
    "route unhealthy",
    "access timeout recovery",
)
COMPUTE_MODES: Final = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
THROTTLE_REASONS: Final = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}

Question: TypeAlias = Callable[..., Any]
"""A function of the module ``pynvml``, and often of the handle of a GPU."""


def probe(root: Path = Path("/"), pynvml: Any | None = None) -> dict[str, Fact] | Unknown:
    """Return every fact of NVIDIA GPUs, or Unknown with a reason if NVML shows no GPU."""
    module = pynvml or load_pynvml()
    if module is None:
        return NOT_INSTALLED
    with _session(module) as refusal:
        if refusal is not None:
            return refusal
        devices, system = read_devices(module), _read_system(module)
    if not devices:
        return Unknown(f"NVML: no GPU answers: {system['lost']}" if "lost" in system else "NVML: no GPU")
    fabrics: list[Any] = [device["fabric"] for device in devices]
    fabric = {name: agreed(derive(one, itemgetter(name)) for one in fabrics) for name in FABRIC_FACTS}
    up = [device["nvlinks_up"] for device in devices if isinstance(device["nvlinks_up"], int)]
    return {
        "vendor": VENDOR,
        "count": len(devices),
        "source": "nvml",
        **system,
        "devices": devices,
        "nvlinks_up": sum(up) if up else devices[0]["nvlinks_up"],
        "fabric": fabric,
        **_read_topology(),
        "compat_libcuda": _find_compat_libcuda(root),
    }


def read_use(pynvml: Any | None = None) -> list[GpuUse] | Unknown:
    """Return memory and processes of every NVIDIA GPU that this job was given."""
    module = pynvml or load_pynvml()
    if module is None:
        return NOT_INSTALLED
    with _session(module) as refusal:
        if refusal is not None:
            return refusal
        return [_read_use(module, index, gpu) for index, gpu in given_handles(module)]


def _read_use(nvml: Any, index: int, gpu: Any) -> GpuUse:
    found = ask(nvml, methodcaller("nvmlDeviceGetComputeRunningProcesses", gpu))
    pids = tuple(process.pid for process in known_or(found, ()))
    used_mib = derive(ask(nvml, ask_memory, gpu), lambda memory: memory.used // MIB)
    return GpuUse(index=index, memory_used_mib=used_mib, pids=pids)


def load_pynvml() -> Any | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


@contextmanager
def _session(nvml: Any) -> Iterator[Unknown | None]:
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


def ask(nvml: Any, question: Question, *arguments: Any) -> Any:
    """Return Unknown if the driver refuses an answer, or if nvidia-ml-py is too old to ask."""
    try:
        return question(nvml, *arguments)
    except nvml.NVMLError as error:
        return Unknown(f"NVML: {error}")
    except AttributeError as error:
        return Unknown(f"nvidia-ml-py has no {error.name}")


def given_handles(nvml: Any) -> list[tuple[int, Any]]:
    """Return number and handle of each GPU of this job; a GPU that fell off the bus is missing."""
    handles = [(index, gpu) for index, gpu in _list_handles(nvml) if not isinstance(gpu, Unknown)]
    return select_given(handles, lambda item: (item[0], ask(nvml, QUESTIONS["uuid"], item[1])))


def _list_handles(nvml: Any) -> list[tuple[int, Any]]:
    count = known_or(ask(nvml, methodcaller("nvmlDeviceGetCount")), 0)
    ask_handle = "nvmlDeviceGetHandleByIndex"
    return [(index, ask(nvml, methodcaller(ask_handle, index))) for index in range(count)]


def _read_system(nvml: Any) -> dict[str, Fact]:
    version = ask(nvml, methodcaller("nvmlSystemGetCudaDriverVersion_v2"))
    found: dict[str, Fact] = {
        "driver": ask(nvml, methodcaller("nvmlSystemGetDriverVersion")),
        "cuda_driver_version": derive(version, lambda it: f"{it // 1000}.{it % 1000 // 10}"),
    }
    lost = [f"GPU {index}: {gpu}" for index, gpu in _list_handles(nvml) if isinstance(gpu, Unknown)]
    if lost:
        found["lost"] = lost
    return found


def read_devices(nvml: Any) -> list[dict[str, Fact]]:
    devices: list[dict[str, Fact]] = []
    for index, gpu in given_handles(nvml):
        facts = {name: ask(nvml, question, gpu) for name, question in QUESTIONS.items()}
        devices.append({"index": index, **facts})
    return devices


def _remapped_rows(nvml: Any, gpu: Any) -> dict[str, Fact]:
    correctable, uncorrectable, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
    return {
        "correctable": correctable,
        "uncorrectable": uncorrectable,
        "is_pending": bool(pending),
        "is_failed": bool(failed),
    }


def ask_memory(nvml: Any, gpu: Any) -> Any:
    # Version 2 of NVML's call does not count the driver's reserve as used.
    return nvml.nvmlDeviceGetMemoryInfo(gpu, version=nvml.nvmlMemory_v2)


def _compute_capability(nvml: Any, gpu: Any) -> str:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu)
    return f"{major}.{minor}"


def _nvlinks_up(nvml: Any, gpu: Any) -> int | Unknown:
    """For a link that this GPU does not have, NVML returns an error."""
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    states: list[int | Unknown] = [ask(nvml, methodcaller("nvmlDeviceGetNvLinkState", gpu, link)) for link in links]
    known = [state for state in states if not isinstance(state, Unknown)]
    return sum(known) if known else states[0]


def _fabric(nvml: Any, gpu: Any) -> dict[str, Fact]:
    """Only in state Completed are cluster UUID and clique id set, equal in one NVLink domain."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    state = FABRIC_STATES[info.state] if info.state < len(FABRIC_STATES) else str(info.state)
    if state != "Completed":
        reason = Unknown(f"fabric state is {state}")
        facts = dict.fromkeys(("status", "cluster_uuid", "clique_id"), reason)
        return {"state": state, "health": _fabric_health(info), **facts}
    return {
        "state": state,
        "status": nvml.nvmlErrorString(info.status),
        "health": _fabric_health(info),
        "cluster_uuid": str(uuid.UUID(bytes=bytes(info.clusterUuid))),
        "clique_id": int(info.cliqueId),
    }


def _fabric_health(info: Any) -> str | Unknown:
    """Name what is wrong; the health's parts that this driver or GPU does not report are 0."""
    mask = getattr(info, "healthMask", 0)
    bad = [name for place, name in enumerate(FABRIC_TROUBLES) if mask >> 2 * place & 3 == 1]
    if (mask >> 8 & 15) > 1:
        bad.append("incorrect configuration")
    if getattr(info, "healthSummary", 0) > 1 and not bad:
        bad.append("unhealthy")
    if bad:
        return ", ".join(bad)
    return "healthy" if mask else Unknown("this driver does not report the fabric's health")


def throttle_reasons(nvml: Any, gpu: Any) -> list[str]:
    """Return why the GPU's clock is lowered, from NVML's bits; an idle GPU has ``gpu_idle``."""
    mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    return [name for bit, name in THROTTLE_REASONS.items() if mask & bit]


def _clock(function: str, kind: str) -> Question:
    return lambda nvml, gpu: getattr(nvml, function)(gpu, getattr(nvml, kind))


def _ecc_uncorrected(nvml: Any, gpu: Any) -> int:
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return int(nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC))


QUESTIONS: Final[dict[str, Question]] = {
    "name": lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu),
    "uuid": lambda nvml, gpu: nvml.nvmlDeviceGetUUID(gpu),
    "pci_bus_id": lambda nvml, gpu: nvml.nvmlDeviceGetPciInfo(gpu).busId,
    "vbios": lambda nvml, gpu: nvml.nvmlDeviceGetVbiosVersion(gpu),
    "compute_capability": _compute_capability,
    "memory_total_mib": lambda nvml, gpu: ask_memory(nvml, gpu).total // MIB,
    "ecc_mode": lambda nvml, gpu: SWITCH[nvml.nvmlDeviceGetEccMode(gpu)[0]],
    "ecc_uncorrected": _ecc_uncorrected,
    "remapped_rows": _remapped_rows,
    "clocks_max_sm_mhz": _clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
    "clocks_max_memory_mhz": _clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
    "clocks_applications_sm_mhz": _clock("nvmlDeviceGetApplicationsClock", "NVML_CLOCK_SM"),
    "clocks_applications_memory_mhz": _clock("nvmlDeviceGetApplicationsClock", "NVML_CLOCK_MEM"),
    "power_limit_w": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "mig_mode": lambda nvml, gpu: SWITCH[nvml.nvmlDeviceGetMigMode(gpu)[0]],
    "compute_mode": lambda nvml, gpu: COMPUTE_MODES[nvml.nvmlDeviceGetComputeMode(gpu)],
    "throttle_reasons": throttle_reasons,
    "pcie_width": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    "nvlinks_up": _nvlinks_up,
    "fabric": _fabric,
}


def _read_topology() -> dict[str, Fact]:
    """Return the text of ``nvidia-smi topo -m``, and how many pairs of devices each link joins."""
    text = derive(sources.ask(["nvidia-smi", "topo", "-m"]), _without_colour)
    return {"topology_text": text, "topology_links": derive(text, parse_topology)}


def parse_topology(text: str) -> dict[str, Fact]:
    """Count the pairs of devices by their link: ``{"gpu_gpu": {"NV18": 28}, "gpu_nic": …}``."""
    gpus: Counter[str] = Counter()
    nics: Counter[str] = Counter()
    for _, column, link in list_pairs(text):
        (gpus if column.startswith("GPU") else nics)[link] += 1
    return {"gpu_gpu": dict(sorted(gpus.items())), "gpu_nic": dict(sorted(nics.items()))}


def list_pairs(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield each pair of a GPU and another device in nvidia-smi's matrix, with their link."""
    lines = [line.split() for line in text.splitlines()]
    headers = (words for words in lines if words[:1] == ["GPU0"] and "X" not in words[:2])
    header = next(headers, [])
    columns = [name for name in header if re.fullmatch(r"(GPU|NIC)\d+|mlx\S+", name)]
    for row, *links in filter(None, lines):
        if row not in columns or not row.startswith("GPU") or links == header[1:]:
            continue
        for column, link in zip(columns, links, strict=False):
            is_new = not column.startswith("GPU") or columns.index(row) < columns.index(column)
            if is_new:
                yield row, column, link


def _without_colour(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text).strip()


def _find_compat_libcuda(root: Path) -> str | Unknown:
    """CUDA's forward-compatibility library may replace the driver's own ``libcuda``."""
    for toolkit in list_names(root, "/usr/local"):
        if not re.fullmatch(r"cuda(-[\d.]+)?", toolkit):
            continue
        for folder in COMPAT_FOLDERS:
            names = " ".join(list_names(root, f"/usr/local/{toolkit}/compat{folder}"))
            found: list[str] = re.findall(r"libcuda\.so\.(\d+\.\d[\d.]*)(?: |$)", names)
            if found:
                return max(found, key=lambda version: [*map(int, re.findall(r"\d+", version))])
    return Unknown("/usr/local/cuda/compat holds no libcuda.so")
