"""What the sampler writes, and what the sensors say on either vendor."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlk_repro.base import proc, procfs
from rlk_repro.logs.telemetry import parse_telemetry
from rlk_repro.probes import gpu, gpu_amd, gpu_nvidia, nvidia_smi, nvml
from rlk_repro.probes.gpu_sensors import AmdSensors, NvidiaSensors, open_sensors
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.telemetry import Current, ProcessSampler, Sampler
from rlk_repro.rundir.manifest import Unknown
from tests.support.probe_examples import (
    NVIDIA,
    NVML_FUNCTIONS,
    SMI_ANSWERS,
    UUIDS,
    FakeNvml,
    tools,
    write_amd,
    write_tool,
    write_tree,
)
from tests.support.waiting import wait_until


class NVMLError(Exception):
    pass


def refuse(*_: object) -> None:
    raise NVMLError


def make_nvml(**changes: Any) -> Any:
    """Two GPUs, the second of which refuses its power and is too hot."""
    answers = {
        "NVMLError": NVMLError,
        "nvmlMemory_v2": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda gpu, version: SimpleNamespace(used=(gpu + version - 1) << 30),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97),
        "nvmlDeviceGetPowerUsage": lambda gpu: refuse() if gpu else 512_500,
        "nvmlDeviceGetTemperature": lambda *_: 61,
        "nvmlDeviceGetClockInfo": lambda *_: 1980,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x40 if gpu else 0,
    }
    return SimpleNamespace(**answers | changes)


def test_nvml_answers_and_refusals_become_numbers_and_nulls() -> None:
    closed: list[bool] = []
    sensors = NvidiaSensors(make_nvml(nvmlShutdown=lambda: closed.append(True)))
    first, second = sensors.read()
    assert first == {
        "index": 0, "memory_used_bytes": 1 << 30, "utilization_percent": 97, "power_w": 512.5, "temperature_c": 61,
        "sm_clock_mhz": 1980, "throttle_reasons": [],
    }  # fmt: skip
    assert second["power_w"] is None
    assert second["throttle_reasons"] == ["hw_thermal_slowdown"]
    sensors.close()
    assert closed == [True]


def test_telemetry_is_of_the_gpus_that_the_job_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    sensors = NvidiaSensors(make_nvml())
    assert len(sensors.gpus) == 1
    assert [sample["index"] for sample in sensors.read()] == [1]


def test_a_machine_without_the_driver_has_no_sensors(tmp_path: Path) -> None:
    assert NvidiaSensors(make_nvml(nvmlInit=refuse)).gpus == []
    assert open_sensors(tmp_path) is None


class AmdSmiException(Exception):
    pass


def test_amd_is_read_from_sysfs_and_throttling_asked_in_turn(tmp_path: Path) -> None:
    for number in (0, 1):
        folder = tmp_path / f"gpu{number}"
        (folder / "hwmon" / "hwmon3").mkdir(parents=True)
        for name, text in {"mem_info_vram_used": "1024", "gpu_busy_percent": "55"}.items():
            (folder / name).write_text(text)
        for name, text in {"power1_average": "750000000", "temp2_input": "64000", "freq1_input": "2100000000"}.items():
            (folder / "hwmon" / "hwmon3" / name).write_text(text)
    lib = SimpleNamespace(
        AmdSmiException=AmdSmiException,
        amdsmi_get_processor_handles=lambda: ["a", "b"],
        amdsmi_get_violation_status=lambda handle: {
            "active_prochot_thrm": handle == "b", "active_ppt_pwr": True, "active_vr_thrm": "N/A", "per_ppt_pwr": 12,
        },
        amdsmi_shut_down=lambda: None,
    )  # fmt: skip
    sensors = AmdSensors(tmp_path, ["/gpu0", "/gpu1"], lib)
    first, second = sensors.read()
    assert first["memory_used_bytes"] == 1024
    assert (first["power_w"], first["temperature_c"], first["sm_clock_mhz"]) == (750.0, 64.0, 2100.0)
    assert (first["throttle_reasons"], second["throttle_reasons"]) == (None, ["ppt_pwr", "prochot_thrm"])
    assert sensors.read()[0]["throttle_reasons"] == ["ppt_pwr"]
    sensors.close()


def test_a_session_is_measured_without_its_leader(tmp_path: Path) -> None:
    code = "import os\nif os.fork() == 0:\n while True: pass\nimport time; time.sleep(60)"
    with (tmp_path / "log").open("wb") as log:
        leader = proc.start([sys.executable, "-I", "-S", "-c", code], output_fd=log.fileno())
    sampler = ProcessSampler()
    wait_until(lambda: len(procfs.find_session(leader.pid)) == 2)
    (child,) = procfs.find_session(leader.pid).keys() - {leader.pid}

    def count_ticks() -> int:
        stat = procfs.read_stat(child)
        assert stat is not None
        return stat.cpu_ticks

    before, began = count_ticks(), time.monotonic()
    assert sampler.read(leader.pid, began)[0] is None
    after = count_ticks()
    wait_until(lambda: count_ticks() >= after + 20)
    least, now = count_ticks() - after, time.monotonic()
    percent, rss_bytes = sampler.read(leader.pid, now)
    most = count_ticks() - before
    assert percent is not None
    low, high = (100 * ticks / procfs.TICKS_PER_S / (now - began) for ticks in (least, most))
    assert low <= percent <= high
    assert rss_bytes is not None
    assert 1 << 20 < rss_bytes < 100 << 20
    proc.signal_group(leader.pid, signal.SIGKILL)
    leader.wait()
    wait_until(lambda: not procfs.find_session(leader.pid))
    assert sampler.read(leader.pid, time.monotonic()) == (None, None)
    assert sampler.read(None, time.monotonic()) == (None, None)


def test_samples_are_whole_lines_that_the_reader_understands(tmp_path: Path) -> None:
    path = tmp_path / "nodes" / "node-0" / "telemetry.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"t": 1, "tri')
    current = Current(trial="00-p1-baseline", session=os.getsid(0))
    with Sampler(path, 0.02, lambda: current, NvidiaSensors(make_nvml())):
        wait_until(lambda: path.read_text().count("\n") > 5)
    found = parse_telemetry(path)
    assert found.reject_counts == {"not JSON": 1}
    samples = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert found.trials["00-p1-baseline"] == {True: len(samples)}
    assert len(samples) > 3
    assert {max(gpu["memory_used_bytes"] for gpu in sample["gpus"]) for sample in samples} == {2 << 30}
    assert all(sample["rss_bytes"] for sample in samples)


__all__ = ["tools"]
NO_NVML = FakeNvml("nvmlInit")


def known(facts: dict[str, Any] | Unknown) -> dict[str, Any]:
    assert isinstance(facts, dict)
    return facts


def test_nvidia_smi_agrees_with_nvml_and_missing_facts_name_the_package(tools, tmp_path):
    write_tool(tools, "nvidia-smi", SMI_ANSWERS)
    root = write_tree(tmp_path / "root", NVIDIA)
    by_nvml, by_smi = known(gpu_nvidia.probe(root, FakeNvml())), known(gpu_nvidia.probe(root, NO_NVML))
    assert by_smi.pop("source") == "nvidia-smi"
    assert by_nvml.pop("source") == "nvml"
    reason = Unknown("nvidia-smi does not report this fact; install nvidia-ml-py")
    assert by_smi.pop("nvlinks_up") == reason
    assert by_smi.pop("fabric") == dict.fromkeys(by_nvml.pop("fabric"), reason)
    del by_nvml["nvlinks_up"]
    for device, other in zip(by_smi["devices"], by_nvml["devices"], strict=True):
        assert {device.pop(name) for name in ("throttle_reasons", "remapped_rows", "nvlinks_up")} == {reason}
        for name in ("throttle_reasons", "remapped_rows", "nvlinks_up", "memory_used_mib"):
            del other[name]
        del device["memory_used_mib"]
    assert by_smi == by_nvml


def test_a_node_of_h200_is_described_whole(tools, tmp_path):
    write_tool(tools, "nvidia-smi", SMI_ANSWERS)
    write_tool(tools, "nvidia-ctk", {"--version": "NVIDIA Container Toolkit CLI version 1.17.8\ncommit: abc"})
    facts = known(gpu_nvidia.probe(write_tree(tmp_path / "root", NVIDIA), FakeNvml()))
    device = facts.pop("devices")[1]
    del facts["topology_text"]
    assert facts == {
        "vendor": "nvidia",
        "count": 2,
        "source": "nvml",
        "driver": "580.159.04",
        "cuda_driver_version": "13.0",
        "nvlinks_up": 36,
        "fabric": {
            "state": "Completed",
            "status": "Success",
            "cluster_uuid": "6f2a4b0e-0000-4000-8000-000000000001",
            "clique_id": 32766,
        },
        "topology_links": {"gpu_gpu": {"NV18": 1}, "gpu_nic": {"PIX": 2, "SYS": 2}},
        "kernel_module": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release",
        "imex_channels": 1,
        "compat_libcuda": "580.95.05",
        "container_toolkit": "NVIDIA Container Toolkit CLI version 1.17.8",
        "cdi_versions": ["0.5.0", "0.7.0"],
    }
    assert device["name"] == "NVIDIA H200"
    assert device["remapped_rows"] == {"correctable": 0, "uncorrectable": 1, "is_pending": True, "is_failed": False}
    assert device["throttle_reasons"] == ["sw_power_cap", "hw_thermal_slowdown"]
    assert (device["mig_mode"], device["ecc_mode"], device["power_limit_w"]) == ("disabled", "enabled", 700.0)


@pytest.mark.parametrize("function", NVML_FUNCTIONS)
def test_any_refusal_of_nvml_is_a_reason_and_not_an_error(tools, tmp_path, function):
    refusing = FakeNvml(function)
    told = str(gpu_nvidia.probe(tmp_path, refusing))
    assert "NVML: " in told or function == "nvmlDeviceGetComputeRunningProcesses"
    assert isinstance(gpu_nvidia.read_use(refusing), list)


def test_facts_that_nvidia_smi_lacks_are_unknown(tools):
    row = SMI_ANSWERS["--query-gpu=index,name"].splitlines()[0].replace("Enabled, 0, 0", "[N/A], [N/A], N/A")
    write_tool(tools, "nvidia-smi", {"--query-gpu=index,name": row})
    devices = nvidia_smi.read_devices()
    assert isinstance(devices, list)
    assert devices[0]["ecc_mode"] == Unknown("nvidia-smi reports [N/A]")
    assert devices[0]["ecc_uncorrected"] == Unknown("nvidia-smi reports N/A")


def test_use_names_the_processes_behind_it(tools):
    write_tool(tools, "nvidia-smi", SMI_ANSWERS)
    by_smi, by_nvml = gpu_nvidia.read_use(NO_NVML), gpu_nvidia.read_use(FakeNvml())
    assert by_smi == [
        GpuUse(index=0, memory_used_mib=4715, pids=(404,)),
        GpuUse(index=1, memory_used_mib=600),
    ]
    assert isinstance(by_nvml, list)
    assert [use.is_busy for use in by_nvml] == [True, False]
    assert str(by_nvml[0]) == "GPU 0: 4715 MiB in use, processes: 404, 9"


def test_mi300x_is_described_from_the_kernels_files(tools, tmp_path):
    facts = known(gpu_amd.probe(write_amd(tmp_path / "root")))
    devices = facts.pop("devices")
    assert facts == {
        "vendor": "amd",
        "count": 2,
        "source": "sysfs",
        "driver": "6.12.12",
        "rocm_version": "7.0.2-56",
        "topology_links": {"gpu_gpu": {"XGMI": 1}},
    }
    assert devices[1] == {
        "index": 1,
        "name": "AMD Instinct MI300X OAM",
        "pci_bus_id": "0000:1c:00.0",
        "device_id": "0x74a1",
        "gfx": "gfx942",
        "vbios": "113-M3000100-102",
        "memory_total_mib": 196592,
        "memory_used_mib": 284,
        "compute_partition": "SPX",
        "memory_partition": "NPS1",
        "clocks_current_sm_mhz": 132,
        "clocks_max_sm_mhz": 2100,
        "clocks_current_memory_mhz": 900,
        "clocks_max_memory_mhz": 1300,
        "power_limit_w": 750.0,
        "power_limit_default_w": 750.0,
        "ecc_mode": "enabled",
        "ecc_corrected": 2,
        "ecc_uncorrected": 0,
        "retired_pages": {"retired": 1, "is_pending": True, "is_failed": False},
        "pcie_speed": "32.0 GT/s PCIe",
        "pcie_width": 16,
    }


@pytest.mark.parametrize("text", ["[]", "{}", "null", '"x"', '{"gpu_data": 3}', '[{"asic": 1, "bus": {}}]', "{" * 2000])
def test_no_answer_of_a_tool_crashes_the_parser(text):
    assert gpu_amd.parse_product_names(text) == {}


@pytest.mark.parametrize(
    ("vendor", "device_class", "name", "reason"),
    [
        ("0x10de", "0x030200", "nvidia", "nvidia-ml-py is not installed; nvidia-smi is not on PATH"),
        ("0x1002", "0x120000", "amd", "/sys/class/kfd/kfd absent"),
    ],
)
def test_a_gpu_without_a_driver_is_not_the_same_as_none(
    tools, tmp_path, monkeypatch, vendor, device_class, name, reason
):
    monkeypatch.setattr(nvml, "load_pynvml", lambda: None)
    device = "/sys/bus/pci/devices/0000:01:00.0"
    bridge = "/sys/bus/pci/devices/0000:02:00.0"
    write_tree(tmp_path, {f"{device}/vendor": vendor, f"{device}/class": device_class})
    write_tree(tmp_path, {f"{bridge}/vendor": vendor, f"{bridge}/class": "0x068000"})
    facts = gpu.probe(tmp_path)
    assert (facts["vendor"], facts["count"]) == (name, Unknown(f"GPUs on the PCI bus: 1, but {reason}"))
    assert isinstance(gpu.busy_gpus(tmp_path), Unknown)


def test_the_vendor_whose_gpus_answer_is_probed(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(nvml, "load_pynvml", lambda: NO_NVML)
    root = write_amd(tmp_path / "root")
    assert gpu.probe(root)["vendor"] == "amd"
    busy = gpu.busy_gpus(root)
    assert isinstance(busy, list)
    assert [use.index for use in busy] == [0]
    write_tool(tools, "nvidia-smi", SMI_ANSWERS)
    assert gpu.probe(root)["vendor"] == "nvidia"
    assert UUIDS[0] in str(gpu.probe(root))


@pytest.mark.parametrize(
    ("listed", "indices"),
    [
        ("0", [0]), ("1", [1]), ("1,0", [0, 1]), (" 1 ", [1]), ("1,-1,0", [1]), ("0,x,1", [0]), (UUIDS[1], [1]),
        (UUIDS[1].upper().replace("GPU", "gpu"), [1]), ("GPU-4f71446f", [0, 1]),
        # nothing that is here: what there is stays a fact
        ("", [0, 1]), ("-1", [0, 1]), ("7", [0, 1]), ("MIG-8a1b", [0, 1]), ("NoDevFiles", [0, 1]),
    ],
)  # fmt: skip
def test_a_job_with_some_gpus_ignores_the_others(tools, monkeypatch, tmp_path, listed, indices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    write_tool(tools, "nvidia-smi", SMI_ANSWERS)
    root = write_tree(tmp_path / "root", NVIDIA)
    for module in (NO_NVML, FakeNvml()):
        facts = known(gpu_nvidia.probe(root, module))
        assert [device["index"] for device in facts["devices"]] == indices
        assert facts["count"] == len(indices)
        use = gpu_nvidia.read_use(module)
        assert isinstance(use, list)
        assert [gpu.index for gpu in use] == indices
