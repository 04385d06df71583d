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
from rlk_repro.probes import gpu, gpu_amd, gpu_nvidia
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.telemetry import AmdSensors, Current, NvidiaSensors, ProcessSampler, Sampler, open_sensors
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

__all__ = ["tools"]
NO_NVML = FakeNvml("nvmlInit")


def test_nvml_answers_and_refusals_become_numbers_and_nulls() -> None:
    nvml = FakeNvml("nvmlDeviceGetPowerUsage")
    sensors = NvidiaSensors(nvml)
    first, second = sensors.read()
    assert first == {
        "index": 0, "memory_used_bytes": 4715 << 20, "utilization_percent": 97, "power_w": None,
        "temperature_c": 61, "sm_clock_mhz": 405, "throttle_reasons": ["gpu_idle"],
    }  # fmt: skip
    assert second["throttle_reasons"] == ["sw_power_cap", "hw_thermal_slowdown"]
    nvml.refused = ()
    assert [sample["power_w"] for sample in sensors.read()] == [512.5, 512.5]


def test_a_machine_without_the_driver_has_no_sensors(tmp_path: Path) -> None:
    assert NvidiaSensors(NO_NVML).gpus == []
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
    with Sampler(path, 0.02, lambda: current, NvidiaSensors(FakeNvml())):
        wait_until(lambda: path.read_text().count("\n") > 5)
    found = parse_telemetry(path)
    assert found.reject_counts == {"not JSON": 1}
    samples = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert found.trials["00-p1-baseline"] == {True: len(samples)}
    assert len(samples) > 3
    assert {max(gpu["memory_used_bytes"] for gpu in sample["gpus"]) for sample in samples} == {4715 << 20}
    assert all(sample["rss_bytes"] for sample in samples)


def known(facts: dict[str, Any] | Unknown) -> dict[str, Any]:
    assert isinstance(facts, dict)
    return facts


def test_a_node_of_h200_is_described_whole(tools, tmp_path):
    write_tool(tools, "nvidia-smi", SMI_ANSWERS)
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
            "health": Unknown("this driver does not report the fabric's health"),
            "cluster_uuid": "6f2a4b0e-0000-4000-8000-000000000001",
            "clique_id": 32766,
        },
        "topology_links": {"gpu_gpu": {"NV18": 1}, "gpu_nic": {"PIX": 2, "SYS": 2}},
        "compat_libcuda": "580.95.05",
    }
    assert device["name"] == "NVIDIA H200"
    assert device["remapped_rows"] == {"correctable": 0, "uncorrectable": 1, "is_pending": True, "is_failed": False}
    assert device["throttle_reasons"] == ["sw_power_cap", "hw_thermal_slowdown"]
    assert (device["mig_mode"], device["ecc_mode"], device["power_limit_w"]) == ("disabled", "enabled", 700.0)


def test_any_refusal_of_nvml_is_a_reason_and_not_an_error(tools, tmp_path):
    def read(nvml: FakeNvml) -> list[Any]:
        return [gpu_nvidia.probe(tmp_path, nvml), gpu_nvidia.read_use(nvml), NvidiaSensors(nvml).read()]

    whole = read(FakeNvml())
    assert whole[1] == [GpuUse(index=0, memory_used_mib=4715, pids=(404, 9)), GpuUse(index=1, memory_used_mib=600)]
    for function in NVML_FUNCTIONS:
        assert read(FakeNvml(function)) != whole, function


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
    expected = {
        "name": "AMD Instinct MI300X OAM",
        "pci_bus_id": "0000:1c:00.0",
        "memory_total_mib": 196592,
        "memory_partition": "NPS1",
        "clocks_max_sm_mhz": 2100,
        "ecc_uncorrected": 0,
        "clocks_max_memory_mhz": 1300,
        "power_limit_w": 750.0,
        "retired_pages": {"retired": 1, "is_pending": True, "is_failed": False},
    }
    assert {name: devices[1][name] for name in expected} == expected


@pytest.mark.parametrize(("device", "name"), [("0x74b5", "AMD Instinct MI300X VF"), ("0x7550", None)])
def test_a_virtual_function_is_named_by_its_id(tools, tmp_path, device, name):
    facts = known(gpu_amd.probe(write_amd(tmp_path / "root", product_name="\n", device=f"{device}\n")))
    missing = Unknown(f"the board has no product name, and its id is {device}")
    assert [item["name"] for item in facts["devices"]] == [name or missing] * 2


@pytest.mark.parametrize(
    ("vendor", "device_class", "name", "reason"),
    [
        ("0x10de", "0x030200", "nvidia", "nvidia-ml-py is not installed"),
        ("0x1002", "0x120000", "amd", "/sys/class/kfd/kfd absent"),
    ],
)
def test_a_gpu_without_a_driver_is_not_the_same_as_none(
    tools, tmp_path, monkeypatch, vendor, device_class, name, reason
):
    monkeypatch.setattr(gpu_nvidia, "load_pynvml", lambda: None)
    device = "/sys/bus/pci/devices/0000:01:00.0"
    bridge = "/sys/bus/pci/devices/0000:02:00.0"
    write_tree(tmp_path, {f"{device}/vendor": vendor, f"{device}/class": device_class})
    write_tree(tmp_path, {f"{bridge}/vendor": vendor, f"{bridge}/class": "0x068000"})
    facts = gpu.probe(tmp_path)
    assert (facts["vendor"], facts["count"]) == (name, Unknown(f"GPUs on the PCI bus: 1, but {reason}"))
    assert isinstance(gpu.busy_gpus(tmp_path), Unknown)


def test_the_vendor_whose_gpus_answer_is_probed(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_nvidia, "load_pynvml", lambda: NO_NVML)
    root = write_amd(tmp_path / "root")
    assert gpu.probe(root)["vendor"] == "amd"
    busy = gpu.busy_gpus(root)
    assert isinstance(busy, list)
    assert [use.index for use in busy] == [0]
    monkeypatch.setattr(gpu_nvidia, "load_pynvml", FakeNvml)
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
    facts = known(gpu_nvidia.probe(root, FakeNvml()))
    assert [device["index"] for device in facts["devices"]] == indices
    assert facts["count"] == len(indices)
    use = gpu_nvidia.read_use(FakeNvml())
    assert isinstance(use, list)
    assert [gpu.index for gpu in use] == indices
    assert [sample["index"] for sample in NvidiaSensors(FakeNvml()).read()] == indices
