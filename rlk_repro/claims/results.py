"""Define the record of ``claims check``: measured and published numbers, and a result for each row."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter

from rlk_repro.rundir.operator_results import OperatorStatus

SCHEMA: Final = 1
ANSWER: Final = "rlk-repro-claims "
"""The measuring process begins its lines with this text, because RL-Kernel prints lines to the same output."""
RL_KERNEL: Final = "rl_kernel"


class Word(StrEnum):
    """The result of one row of a claim's table, or of one comparison in this row.

    Attributes:
        PARTLY: every comparison that was made agrees, but some published numbers were not compared.
        ARITHMETIC: the published memory figure agrees with a formula of the tensors' shapes; nothing was measured.
    """

    REPRODUCED = "reproduced"
    PARTLY = "reproduced in part"
    NOT_REPRODUCED = "not reproduced"
    ARITHMETIC = "arithmetic only"
    NOT_RUNNABLE = "not runnable here"


class Basis(StrEnum):
    MEASURED = "measured"
    ARITHMETIC = "follows from the shape"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement to make; with ``is_cold`` only the first call of a new process is timed."""

    row: str
    implementation: str
    pass_: Annotated[str, Field(alias="pass")]
    is_cold: bool = False

    def __str__(self) -> str:
        return f"{self.row}, {self.implementation}, {self.pass_}" + (", cold" if self.is_cold else "")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurement of one cell: seconds of each timed call, bytes of the inputs, peak bytes beyond the inputs.

    ``ran`` is the class that was called.  A number of bytes is None if the device does not report it.
    """

    cell: Cell
    status: OperatorStatus
    reason: str = ""
    ran: str = ""
    samples_s: tuple[float, ...] = ()
    peak_extra_bytes: int | None = None
    input_bytes: int | None = None

    @property
    def median_s(self) -> float | None:
        return median(self.samples_s) if self.samples_s else None


@dataclass(frozen=True, kw_only=True)
class Task:
    operator: str
    settings: Mapping[str, float]
    dtype: str
    device: str
    warmup: int
    repeats: int
    shapes: Mapping[str, Mapping[str, int]]
    cells: tuple[Cell, ...]


TASK: Final = TypeAdapter(Task)
MEASUREMENT: Final = TypeAdapter(Measurement)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One comparison of a table row: of memory, or of a ratio of two times; ``published`` and ``here`` are in ``unit``.

    For a cold comparison, ``warm`` is the ratio of the times of warm calls.
    """

    what: str
    unit: str
    word: Word
    published: float | None = None
    here: float | None = None
    warm: float | None = None
    tolerance_pct: float
    basis: Basis = Basis.MEASURED
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RowResult:
    row: str
    word: Word
    reason: str = ""
    compared: tuple[Compared, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """The result of one claim; ``is_same_hardware`` is None if this machine or the claim names no GPU."""

    claim: str
    title: str
    source: str
    published_on: str
    here: str
    is_same_hardware: bool | None
    rows: tuple[RowResult, ...]
    measurements: tuple[Measurement, ...] = ()
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClaimsCheck:
    """The record of ``claims check``; ``environment`` holds the sections ``gpu`` and ``code`` of a manifest."""

    version: str
    results: tuple[ClaimResult, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    process: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def count(self) -> dict[Word, int]:
        found = Counter(row.word for result in self.results for row in result.rows)
        return {word: found[word] for word in Word}

    @property
    def has_measured(self) -> bool:
        """Whether any published value was compared with a measurement, not only with a formula."""
        return any(
            item.basis is Basis.MEASURED and item.word in {Word.REPRODUCED, Word.NOT_REPRODUCED}
            for result in self.results
            for row in result.rows
            for item in row.compared
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self, dict_factory=_rename_keywords)


def _rename_keywords(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name.rstrip("_"): value for name, value in items}


def join_words(words: Iterable[Word]) -> Word:
    found = set(words)
    if Word.NOT_REPRODUCED in found:
        return Word.NOT_REPRODUCED
    if not found & {Word.REPRODUCED, Word.PARTLY}:
        return Word.ARITHMETIC if Word.ARITHMETIC in found else Word.NOT_RUNNABLE
    return Word.REPRODUCED if found == {Word.REPRODUCED} else Word.PARTLY
