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
from rlk_repro.probes.gpu_sensors import AmdSensors, NvidiaSensors, open_sensors
from rlk_repro.probes.telemetry import Current, ProcessSampler, Sampler
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
