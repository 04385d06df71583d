"""Sample a node's activity into ``telemetry.jsonl``, from a thread.

CPU and memory are those of the trial's processes; 100 % CPU is one core.  GPUs are read at low cost: by NVML
on NVIDIA, by sysfs files on AMD; a value that a device does not report is None.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from rlk_repro.base import procfs
from rlk_repro.base.disk import Stream, Unwritable, writing
from rlk_repro.base.files import dump_json_line
from rlk_repro.probes import gpu_amd, gpu_nvidia
from rlk_repro.probes.sources import derive, known_or, list_names, read_int

RESCAN_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Current:
    """The running trial, and the session id (setsid) of the trial's processes on this node."""

    trial: str | None = None
    session: int | None = None


class ProcessSampler:
    """Read CPU and resident memory of the processes with one session id (setsid).

    To find new processes, the sampler reads all of /proc, so it looks for them only every ``RESCAN_S`` seconds.
    """

    def __init__(self) -> None:
        self._session: int | None = None
        self._ticks: dict[int, int] = {}
        self._sampled = 0.0
        self._scanned = 0.0

    def read(self, session: int | None, now: float) -> tuple[float | None, int | None]:
        """Return CPU percent since the last call (None at first) and memory bytes; without a process, both are None."""
        if session is None:
            self._session = None
            return None, None
        is_first = session != self._session
        if is_first or now - self._scanned >= RESCAN_S:
            stats = procfs.find_session(session)
            self._scanned = now
        else:
            known = {pid: procfs.read_stat(pid) for pid in self._ticks}
            stats = {pid: stat for pid, stat in known.items() if stat and stat.is_running and stat.session == session}
        stats.pop(session, None)  # the guard leads the POSIX session (setsid), but is not a process of the trial
        ticks = {pid: stat.cpu_ticks for pid, stat in stats.items()}
        used = sum(count - self._ticks.get(pid, 0) for pid, count in ticks.items())
        elapsed_s = now - self._sampled
        self._session, self._ticks, self._sampled = session, ticks, now
        percent = None if is_first or elapsed_s <= 0 else 100 * used / procfs.TICKS_PER_S / elapsed_s
        return (percent, sum(stat.rss_bytes for stat in stats.values())) if stats else (None, None)


class Sampler:
    """A context manager whose thread takes samples; before each sample, it asks ``current`` which trial runs."""

    def __init__(
        self, path: Path, interval_s: float, current: Callable[[], Current], sensors: NvidiaSensors | AmdSensors | None
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._current = current
        self._sensors = sensors
        self._processes = ProcessSampler()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self._sensors is not None:
            self._sensors.close()

    def _run(self) -> None:
        # a full disk ends the sampling; the leader writes to the same disk and reports that it is full
        with contextlib.suppress(Unwritable), Stream(self._path, "ab", self._path) as stream:
            due = time.monotonic()
            while not self._is_over.wait(max(due - time.monotonic(), 0.0)):
                stream.write(dump_json_line(self._sample()).encode() + b"\n")
                due = max(due + self._interval_s, time.monotonic())

    def _sample(self) -> dict[str, Any]:
        current = self._current()
        percent, rss_bytes = self._processes.read(current.session, time.monotonic())
        return {
            "t": time.time(),
            "trial": current.trial,
            "cpu_percent": percent,
            "rss_bytes": rss_bytes,
            "gpus": [] if self._sensors is None else self._sensors.read(),
        }


def open_sensors(root: Path = Path("/")) -> NvidiaSensors | AmdSensors | None:
    """Open the sensors; return None if this process sees no GPU or has no library that reads the GPUs' sensors."""
    pynvml = gpu_nvidia.load_pynvml()
    if pynvml is not None:
        sensors = NvidiaSensors(pynvml)
        if sensors.gpus:
            return sensors
    on_amd = gpu_amd.find_gpus(root)
    return AmdSensors(root, [gpu.device for gpu in on_amd], load_amdsmi()) if on_amd else None


NVIDIA_QUESTIONS: Final[dict[str, gpu_nvidia.Question]] = {
    "memory_used_bytes": lambda nvml, gpu: gpu_nvidia.ask_memory(nvml, gpu).used,
    "utilization_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "throttle_reasons": gpu_nvidia.throttle_reasons,
}


class NvidiaSensors:
    def __init__(self, pynvml: Any) -> None:
        self._lib = pynvml
        self.gpus: list[tuple[int, Any]] = []
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self.gpus = gpu_nvidia.given_handles(pynvml)

    def read(self) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = []
        for index, gpu in self.gpus:
            samples.append({"index": index})
            for name, question in NVIDIA_QUESTIONS.items():
                samples[-1][name] = known_or(gpu_nvidia.ask(self._lib, question, gpu), None)
        return samples

    def close(self) -> None:
        self._lib.nvmlShutdown()


class AmdSensors:
    """Read the GPUs from sysfs; each call reads the throttling of one GPU only, because amdsmi needs 0.1 s per GPU."""

    def __init__(self, root: Path, devices: list[str], amdsmi: Any | None) -> None:
        self._root = root
        self._devices = devices
        self._lib = amdsmi
        self._handles = [] if amdsmi is None else amdsmi.amdsmi_get_processor_handles()
        self._turn = 0

    def read(self) -> list[dict[str, Any]]:
        samples = [{"index": index, **self._read_device(folder)} for index, folder in enumerate(self._devices)]
        if self._handles:
            self._turn = (self._turn + 1) % min(len(self._handles), len(samples))
            samples[self._turn]["throttle_reasons"] = self._read_throttling(self._handles[self._turn])
        return samples

    def close(self) -> None:
        if self._lib is not None:
            self._lib.amdsmi_shut_down()

    def _read_device(self, folder: str) -> dict[str, Any]:
        sensors = next(iter(list_names(self._root, f"{folder}/hwmon")), "")
        hwmon = f"{folder}/hwmon/{sensors}"
        power = self._read(f"{hwmon}/power1_input", 1e-6)
        return {
            "memory_used_bytes": self._read(f"{folder}/mem_info_vram_used"),
            "utilization_percent": self._read(f"{folder}/gpu_busy_percent"),
            "power_w": self._read(f"{hwmon}/power1_average", 1e-6) if power is None else power,
            "temperature_c": self._read(f"{hwmon}/temp2_input", 1e-3),
            "sm_clock_mhz": self._read(f"{hwmon}/freq1_input", 1e-6),
            "throttle_reasons": None,
        }

    def _read(self, path: str, scale: float = 1) -> float | None:
        return known_or(derive(read_int(self._root, path), lambda value: value * scale), None)

    def _read_throttling(self, handle: Any) -> list[str] | None:
        try:
            status = self._lib.amdsmi_get_violation_status(handle)  # type: ignore[union-attr]
        except (self._lib.AmdSmiException, AttributeError):  # type: ignore[union-attr]
            return None
        active = {name.removeprefix("active_"): value for name, value in status.items() if name.startswith("active_")}
        known = {name: value for name, value in active.items() if isinstance(value, int)}
        return sorted(name for name, value in known.items() if value) if known else None


def load_amdsmi() -> Any | None:
    try:
        import amdsmi
    except (ImportError, OSError, KeyError):  # importing amdsmi loads one of the driver's libraries
        return None
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        return None
    return amdsmi
