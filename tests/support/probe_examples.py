"""Machines to probe: file trees, tools that answer as recorded, and a stand-in for NVML.

The H200 answers were recorded on one H200 (driver 580.159.04) and doubled; the AMD files follow the kernel's
documentation of amdgpu and KFD for an MI300X.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlk_repro.base import proc

UUIDS = ("GPU-4f71446f-dd45-be62-5d17-363fc230afea", "GPU-4f71446f-dd45-be62-5d17-363fc230afeb")

HOST = {
    "/proc/sys/kernel/hostname": "node-1\n",
    "/proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=UUID=1234 ro iommu=pt ip=10.0.0.7::10.0.0.1 -- --token abc\n",
    "/proc/sys/kernel/numa_balancing": "1\n",
    "/proc/sys/kernel/random/boot_id": "5c4f\n",
    "/proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8480C\nprocessor\t: 1\n",
    "/proc/meminfo": "MemTotal:       2113513028 kB\nMemAvailable:   2000000000 kB\nSwapTotal:             0 kB\n",
    "/proc/loadavg": "0.50 0.25 0.10 1/2000 12345\n",
    "/proc/self/cgroup": "0::/system.slice/job_7/step_0\n",
    "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\n',
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave\n",
    "/sys/devices/system/cpu/smt/active": "1\n",
    "/sys/devices/system/node/node0/cpulist": "0\n",
    "/sys/devices/system/node/node1/cpulist": "1\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "/sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    "/sys/fs/cgroup/system.slice/job_7/step_0/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/system.slice/job_7/cpu.max": "1600000 100000\n",
    "/sys/fs/cgroup/system.slice/job_7/step_0/memory.max": "max\n",
    "/sys/fs/cgroup/system.slice/job_7/memory.max": f"{64 << 30}\n",
}
NETWORK = {
    "/sys/class/net/lo/mtu": "65536\n",
    "/sys/class/net/docker0/mtu": "1500\n",
    "/sys/class/net/ens1/mtu": "9000\n",
    "/sys/class/net/ens1/speed": "200000\n",
    "/sys/class/net/ens1/operstate": "up\n",
    "/sys/class/net/ens1/device/numa_node": "1\n",
    "/sys/class/net/ens1/address": "aa:bb:cc:dd:ee:ff\n",
    "/sys/class/infiniband/mlx5_0/fw_ver": "28.39.3560\n",
    "/sys/class/infiniband/mlx5_0/board_id": "MT_0000000838\n",
    "/sys/class/infiniband/mlx5_0/hca_type": "MT4129\n",
    "/sys/class/infiniband/mlx5_0/device/numa_node": "0\n",
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "/sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp\n",
    "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "/sys/module/nvidia_peermem/version": "580.159.04\n",
    "/sys/module/gdrdrv/refcnt": "0\n",
}
NVIDIA = {"/usr/local/cuda/compat/libcuda.so.580.95.05": ""}
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\tSYS\t0-55\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tPIX\t56-111\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tPIX\tSYS\t X \t\t\t\t\n\n"
    "Legend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
SMI_ANSWERS = {"topo": TOPOLOGY}

AMD_DEVICE = {
    "product_name": "AMD Instinct MI300X OAM\n",
    "device": "0x74a1\n",
    "vbios_version": "113-M3000100-102\n",
    "mem_info_vram_total": "206141652992\n",
    "mem_info_vram_used": "297795584\n",
    "current_compute_partition": "SPX\n",
    "current_memory_partition": "NPS1\n",
    "pp_dpm_sclk": "S: 132Mhz *\n0: 500Mhz\n1: 2100Mhz\n",
    "pp_dpm_mclk": "0: 900Mhz *\n1: 1300Mhz\n",
    "hwmon/hwmon3/power1_cap": "750000000\n",
    "ras/umc_err_count": "ue: 0\nce: 2\n",
    "ras/gpu_vram_bad_pages": "0x00001001 : 0x00001000 : R\n0x00001002 : 0x00001000 : P\n",
    "current_link_width": "16\n",
}


def amd_tree() -> dict[str, str]:
    """Two MI300X joined by xGMI, a third that this container was not given, and the processor's own node."""
    files = {
        "/sys/module/amdgpu/version": "6.12.12\n",
        "/opt/rocm/.info/version": "7.0.2-56\n",
        "/sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 96\nsimd_count 0\n",
        "/sys/class/kfd/kfd/proc/4711/vram_51000": "1073741824\n",
        "/dev/dri/renderD128": "",
        "/dev/dri/renderD129": "",
    }
    for index in range(3):
        node = f"/sys/class/kfd/kfd/topology/nodes/{index + 1}"
        files |= {
            f"{node}/gpu_id": f"{51000 + index}\n",
            f"{node}/properties": f"simd_count 1216\ngfx_target_version 90402\ndrm_render_minor {128 + index}\n",
            f"{node}/io_links/0/properties": f"type 2\nnode_from {index + 1}\nnode_to 0\n",
        }
        for other in range(3):
            files[f"{node}/io_links/{other + 1}/properties"] = (
                f"type 11\nnode_from {index + 1}\nnode_to {other + 1}\n" if other != index else "type 0\n"
            )
        folder = f"/sys/devices/pci0000:00/0000:{index}c:00.0"
        files |= {f"{folder}/{name}": text for name, text in AMD_DEVICE.items()}
    return files


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
DATED = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}


def git(folder: Path, *words: str) -> str:
    done = proc.run(["git", *IDENTITY, *words], cwd=folder, env=os.environ | DATED)
    assert done.is_ok, done.stderr
    return done.stdout.strip()


def commit_files(folder: Path, files: Mapping[str, str], message: str = "a") -> str:
    """The commit that holds these files and all others of the folder."""
    write_tree(folder, files)
    if not (folder / ".git").is_dir():
        git(folder, "init", "-q", "-b", "main")
        git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def write_amd(root: Path, **changes: str) -> Path:
    write_tree(root, amd_tree())
    for index in range(3):
        folder = root / f"sys/devices/pci0000:00/0000:{index}c:00.0"
        write_tree(folder, changes)
        link = root / f"sys/class/drm/renderD{128 + index}/device"
        link.parent.mkdir(parents=True)
        link.symlink_to(folder)
    return root


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH; what is put here answers, everything else is absent."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_tool(folder: Path, name: str, answers: Mapping[str, str], *, refusal: str = "no such question") -> None:
    """A tool that answers when its arguments begin with a key, and else exits 2 with ``refusal``."""
    cases = []
    for number, (start, text) in enumerate(answers.items()):
        (folder / f".{name}.{number}").write_text(text if text.endswith("\n") else f"{text}\n")
        cases.append(
            f"'{start}'*) while IFS= read -r line; do printf '%s\\n' \"$line\"; done <'{folder}/.{name}.{number}' ;;"
        )
    script = "\n".join(["#!/bin/sh", 'case "$*" in', *cases, f"*) echo '{refusal}' >&2; exit 2 ;;", "esac"])
    (folder / name).write_text(script + "\n")
    (folder / name).chmod(0o755)


class NVMLError(Exception):
    """What pynvml raises."""


class FabricInfo(ctypes.Structure):
    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    )


class FakeNvml:
    """Two H200 on an NVLink fabric, as pynvml would answer; ``refused`` names the functions that raise."""

    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_TEMPERATURE_GPU = 0
    NVML_NVLINK_MAX_LINKS = 36

    def __init__(self, *refused: str, answers: Mapping[str, Any] | None = None) -> None:
        self.refused = refused
        self.answers = NVML_ANSWERS if answers is None else answers

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name=name, obj=self)
        answer = self.answers[name]
        if name in {"nvmlMemory_v2", "c_nvmlGpuFabricInfoV_t"}:
            return answer

        def call(*arguments: Any, **_: Any) -> Any:
            if name in self.refused:
                raise NVMLError("Not Supported")
            return answer(*arguments) if callable(answer) else answer

        return call


def _link_state(_: int, link: int) -> int:
    if link >= 18:
        raise NVMLError("Invalid Argument")
    return 1


def _fill_fabric(_: int, info: Any) -> None:
    fabric = info._obj
    fabric.clusterUuid[:] = bytes.fromhex("6f2a4b0e000040008000000000000001")
    fabric.state, fabric.cliqueId = 3, 32766


PROCESSES = [SimpleNamespace(pid=404), SimpleNamespace(pid=9)]
# A value, or a function of the arguments; the handle of a GPU is its index.
NVML_ANSWERS: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlErrorString": "Success",
    "nvmlSystemGetCudaDriverVersion_v2": 13000,
    "nvmlSystemGetDriverVersion": "580.159.04",
    "nvmlMemory_v2": 0x02000028,
    "c_nvmlGpuFabricInfoV_t": FabricInfo,
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetUUID": lambda gpu: UUIDS[gpu],
    "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:0{gpu}:06.0"),
    "nvmlDeviceGetVbiosVersion": "96.00.A5.00.1A",
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=143771 << 20, used=(600 if gpu else 4715) << 20),
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": lambda gpu: (0, gpu, gpu, 0),
    "nvmlDeviceGetClockInfo": lambda _, kind: 405 if kind == 1 else 3201,
    "nvmlDeviceGetMaxClockInfo": lambda _, kind: 1980 if kind == 1 else 3201,
    "nvmlDeviceGetApplicationsClock": lambda _, kind: 1980 if kind == 1 else 3201,
    "nvmlDeviceGetEnforcedPowerLimit": 700000,
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x44 if gpu else 0x1,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetNvLinkState": _link_state,
    "nvmlDeviceGetGpuFabricInfoV": _fill_fabric,
    "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [] if gpu else PROCESSES,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
    "nvmlDeviceGetPowerUsage": 512_500,
    "nvmlDeviceGetTemperature": 61,
}
NVML_FUNCTIONS = sorted(name for name in NVML_ANSWERS if name.startswith(("nvmlDevice", "nvmlSystem")))


def write_program(folder: Path, name: str = "program") -> tuple[Path, Path]:
    """Return a program, and the file that exists once the program has run."""
    mark = folder / f"{name} ran"
    path = folder / name
    path.write_text(f'#!/bin/sh\ntouch "{mark}"\ncat\n')
    path.chmod(0o755)
    return path, mark
