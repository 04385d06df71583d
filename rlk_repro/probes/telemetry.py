"""Sample a node's activity into ``telemetry.jsonl``, from a thread.

CPU and memory are those of the trial's processes; 100 % CPU is one core.
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
from rlk_repro.probes.gpu_sensors import AmdSensors, NvidiaSensors

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
