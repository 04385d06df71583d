"""Read the operator tier's log: the device's rates, the times of each cell in each sweep, and a check of each cell.

A cell is one implementation in one case; a sweep times every cell once.  A log may come from a stranger, so sizes and
counts are limited.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter

from rlk_repro.base.files import decode_json
from rlk_repro.logs.lines import LogLine, open_log, scan_lines
from rlk_repro.rundir.operator_results import OperatorCase, OperatorKind, OperatorStatus

MAX_RECORD_BYTES: Final = 1 << 20
MAX_CELLS: Final = 20_000
MAX_TIMES: Final = 200_000
MAX_SAMPLES: Final = 2_000_000

_NEEDLE: Final = b" - operator "
_LINE: Final = re.compile(
    rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\r\n]{0,40}\] [\w.\-]{1,100}\.py:\d{1,6} - operator (?=\{)"
)

Text: TypeAlias = Annotated[str, Field(max_length=400)]
Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Number: TypeAlias = Annotated[int, Field(ge=0, le=10**15)]
Seconds: TypeAlias = Annotated[float, Field(ge=1e-12, le=1e6)]
Rate: TypeAlias = Annotated[float, Field(gt=0, le=1e24)]
Size: TypeAlias = Annotated[float, Field(ge=0, le=1e300)]


class _Event(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class Device(_Event):
    event: Literal["device"]
    name: Text
    bytes_per_s: Rate
    flops_per_s: Annotated[dict[Word, Rate], Field(max_length=8)]


class _Case(_Event):
    operator: Word
    num_tokens: Number
    vocab_size: Number
    hidden_size: Number | None
    dtype: Word
    density: Annotated[float, Field(gt=0, le=1)]
    work: Word


class _Cell(_Event):
    case: _Case
    implementation: Word

    @property
    def key(self) -> CellKey:
        return OperatorCase(**self.case.model_dump()), self.implementation


class Time(_Cell):
    event: Literal["time"]
    sweep: Number
    kind: OperatorKind
    class_name: Text
    version: Text
    status: OperatorStatus
    reason: Text
    samples_s: Annotated[tuple[Seconds, ...], Field(max_length=10_000), FailFast()]
    peak_extra_bytes: Number | None
    floor_s: Seconds | None


class OracleCheck(_Cell):
    """A check of one cell after the last sweep: its error against float64, its repeatability, its kernels' names."""

    event: Literal["check"]
    status: OperatorStatus
    reason: Text
    error: Size | None
    gradient_error: Size | None
    is_repeatable: bool | None
    kernels: Annotated[tuple[Text, ...], Field(max_length=64), FailFast()]


CellKey: TypeAlias = tuple[OperatorCase, str]
Event: TypeAlias = Device | Time | OracleCheck
_EVENTS: Final[TypeAdapter[Event]] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


@dataclass(frozen=True, kw_only=True)
class OperatorLog:
    """``times`` maps each cell, in log order, and each sweep to the log line's number and its record of the times."""

    device: Device | None
    times: Mapping[CellKey, Mapping[int, tuple[int, Time]]]
    checks: Mapping[CellKey, OracleCheck]
    num_rejects: Mapping[str, int]


def parse_operators(path: Path) -> OperatorLog:
    """Read a trial's log.

    Raises:
        BundleUnreadable: the file is absent or cannot be read.
    """
    reader = _Reader()
    with open_log(path, buffering=0) as stream:
        for line in scan_lines(stream, {_NEEDLE: b""}):
            reader.read_line(line)
    return OperatorLog(
        device=reader.device,
        times=reader.times,
        checks=reader.checks,
        num_rejects=dict(sorted(reader.rejects.items())),
    )


class _Reader:
    def __init__(self) -> None:
        self.device: Device | None = None
        self.times: dict[CellKey, dict[int, tuple[int, Time]]] = {}
        self.checks: dict[CellKey, OracleCheck] = {}
        self.rejects: Counter[str] = Counter()
        self._num_times = 0
        self._num_samples = 0

    def read_line(self, line: LogLine) -> None:
        found = None if line.is_continued else _LINE.search(line.text)
        if found is None:
            return
        body = line.text[found.end() :]
        if len(body) > MAX_RECORD_BYTES:
            self.rejects["the record is too long"] += 1
            return
        try:
            event = _EVENTS.validate_json(body)
            decode_json(body, MAX_RECORD_BYTES)  # pydantic accepts duplicate keys
        except ValueError:
            is_whole = body.rstrip().endswith(b"}")
            self.rejects["not an operator record" if is_whole else "the record is cut off"] += 1
        else:
            self._take(line.number, event)

    def _take(self, number: int, event: Event) -> None:
        refusal = self._refuse(event)
        if refusal:
            self.rejects[refusal] += 1
        elif isinstance(event, Device):
            self.device = event
        elif isinstance(event, Time):
            self._num_times += 1
            self._num_samples += len(event.samples_s)
            self.times.setdefault(event.key, {})[event.sweep] = (number, event)
        else:
            self.checks[event.key] = event

    def _refuse(self, event: Event) -> str:
        match event:
            case Device():
                is_known = self.device is not None
            case Time():
                is_known = event.sweep in self.times.get(event.key, {})
            case _:
                if event.key not in self.times:
                    return "a check of a cell that was never timed"
                is_known = event.key in self.checks
        if is_known:
            return "the same record was read before"
        is_full = len(self.times) >= MAX_CELLS or self._num_times >= MAX_TIMES or self._num_samples >= MAX_SAMPLES
        return "too many records" if is_full and isinstance(event, Time) else ""
