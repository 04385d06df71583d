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
class TrialTelemetry:
    num_throttle_samples: int = 0
    num_throttled: int = 0

    @property
    def throttled_fraction(self) -> float | None:
        return self.num_throttled / self.num_throttle_samples if self.num_throttle_samples else None

    def __add__(self, other: TrialTelemetry) -> TrialTelemetry:
        return TrialTelemetry(
            num_throttle_samples=self.num_throttle_samples + other.num_throttle_samples,
            num_throttled=self.num_throttled + other.num_throttled,
        )


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    trials: Mapping[str, TrialTelemetry]
    reject_counts: Mapping[str, int]


def parse_telemetry(path: Path) -> Telemetry:
    """Read one node's samples.

    Raises:
        BundleUnreadable: the file is absent or cannot be read.
    """
    trials: dict[str, TrialTelemetry] = {}
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
                    trials[name] = trials.get(name, TrialTelemetry()) + sample.summarise()
    return Telemetry(trials=trials, reject_counts=dict(sorted(rejects.items())))


def _describe_bytes(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        return "longer than 1 MiB"
    return "not JSON" if line.endswith(b"\n") else "the last line is cut off"


def merge_telemetry(nodes: Iterable[Telemetry]) -> dict[str, TrialTelemetry]:
    merged: dict[str, TrialTelemetry] = {}
    for node in nodes:
        for trial, summary in node.trials.items():
            merged[trial] = merged.get(trial, TrialTelemetry()) + summary
    return merged


class _Device(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    throttle_reasons: list[str] | None = None


class _Sample(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    t: Annotated[float, Field(ge=0, lt=MAX_TIME_S)]
    trial: str | None = None
    gpus: list[_Device] | None = None

    def summarise(self) -> TrialTelemetry:
        known = [device.throttle_reasons for device in self.gpus or () if device.throttle_reasons is not None]
        return TrialTelemetry(
            num_throttle_samples=int(bool(known)),
            num_throttled=int(any(_is_throttled(names) for names in known)),
        )


def _is_throttled(reasons: Iterable[str]) -> bool:
    return any(mark in reason.lower() for reason in reasons for mark in THROTTLE_MARKS)
