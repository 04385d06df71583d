"""Read from a node's ``telemetry.jsonl`` how often a trial's devices were slowed down.

Each line is a sample of the node agent: ``{"t": unix seconds, "trial": name or null, "cpu_percent", "rss_bytes",
"gpus": [{"index", "memory_used_bytes", "utilization_percent", "power_w", "temperature_c", "sm_clock_mhz",
"throttle_reasons": [...]}]}``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlk_repro.base.files import decode_json
from rlk_repro.logs.lines import open_log, read_lines

MAX_LINE_BYTES: Final = 1 << 20
MAX_TRIALS: Final = 1000
MAX_TIME_S: Final = 2**63

# Parts of the reasons' names that mean "slowed down to protect the hardware": NVML's HW/SW thermal slowdown, HW
# slowdown and power brake; AMD's PROCHOT and thermal violations.  Power caps and idle clocks are normal operation.
THROTTLE_MARKS: Final = ("slowdown", "thermal", "thrm", "prochot")


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """``trials`` counts each trial's samples by whether a device was slowed down, without samples that do not tell."""

    trials: Mapping[str, Counter[bool]]
    reject_counts: Mapping[str, int]


def parse_telemetry(path: Path) -> Telemetry:
    """Read one node's samples.

    Raises:
        BundleUnreadable: the file is absent or cannot be read.
    """
    trials: dict[str, Counter[bool]] = {}
    rejects: Counter[str] = Counter()
    with open_log(path) as stream:
        for _, line in read_lines(stream, MAX_LINE_BYTES):
            try:
                sample = _Sample.model_validate(decode_json(line, MAX_LINE_BYTES))
            except ValidationError:
                rejects["not a sample"] += 1
            except ValueError:
                rejects[_describe_bytes(line)] += 1
            else:
                name = sample.trial
                if name is not None and name not in trials and len(trials) >= MAX_TRIALS:
                    rejects["not a sample"] += 1
                elif name is not None:
                    trials.setdefault(name, Counter()).update(sample.list_throttled())
    return Telemetry(trials=trials, reject_counts=dict(sorted(rejects.items())))


def _describe_bytes(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        return "longer than 1 MiB"
    return "not JSON" if line.endswith(b"\n") else "the last line is cut off"


def find_throttled(nodes: Iterable[Telemetry]) -> dict[str, float]:
    """Return by trial in which fraction of its samples on all nodes a device was slowed down."""
    merged: dict[str, Counter[bool]] = {}
    for node in nodes:
        for trial, counts in node.trials.items():
            merged.setdefault(trial, Counter()).update(counts)
    return {trial: counts[True] / counts.total() for trial, counts in merged.items() if counts}


class _Device(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    throttle_reasons: list[str] | None = None


class _Sample(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    t: Annotated[float, Field(ge=0, lt=MAX_TIME_S)]
    trial: str | None = None
    gpus: list[_Device] | None = None

    def list_throttled(self) -> list[bool]:
        """Return whether a device was slowed down; nothing if no device tells."""
        known = [device.throttle_reasons for device in self.gpus or () if device.throttle_reasons is not None]
        return [any(_is_throttled(names) for names in known)] if known else []


def _is_throttled(reasons: Iterable[str]) -> bool:
    return any(mark in reason.lower() for reason in reasons for mark in THROTTLE_MARKS)
