"""Run ``python -m rlk_repro.bench.claims`` and collect its measurements, even if a measurement kills the process.

If the process dies, the cell that it was measuring counts as failed, and a new process measures the other cells.  After
a timeout, the implementation is not tried again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from signal import Signals
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.base.places import hide_places
from rlk_repro.claims.files import Claim, MeasureCheck
from rlk_repro.claims.judge import list_cells
from rlk_repro.claims.results import ANSWER, MEASUREMENT, TASK, Cell, Measurement, Task
from rlk_repro.rundir.operator_results import OperatorStatus

MAX_REASON: Final = 200


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How the measuring processes are started; ``timeout_s`` is the limit for all cells of one claim."""

    device: str = "cuda"
    warmup: int = 3
    repeats: int = 10
    timeout_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """``process`` describes the measuring process: its device, torch and RL-Kernel."""

    measurements: Mapping[Cell, Measurement]
    process: Mapping[str, Any]


def measure_claim(claim: Claim, bench: Bench) -> Measured:
    """Measure every cell of a claim: all warm cells in one process, each cold cell in a process of its own."""
    cells = list_cells(claim)
    groups = [[cell for cell in cells if not cell.is_cold], *([cell] for cell in cells if cell.is_cold)]
    measurements: dict[Cell, Measurement] = {}
    process: Mapping[str, Any] = {}
    for group in groups:
        measured = _measure_cells(claim, group, bench)
        measurements |= measured.measurements
        process = process or measured.process
    return Measured(measurements=measurements, process=process)


def _measure_cells(claim: Claim, cells: Sequence[Cell], bench: Bench) -> Measured:
    found: dict[Cell, Measurement] = {}
    process: Mapping[str, Any] = {}
    while pending := [cell for cell in cells if cell not in found]:
        done = proc.run(
            [sys.executable, "-m", "rlk_repro.bench.claims"],
            stdin=TASK.dump_json(_make_task(claim, pending, bench), by_alias=True),
            env=bench.env,
            timeout_s=bench.timeout_s,
        )
        header, answers = _read_answers(done.stdout)
        process = process or header
        found |= {answer.cell: answer for answer in answers}
        lost = _find_lost(
            [cell for cell in pending if cell not in found], is_started=bool(header), is_silent=done.is_timeout
        )
        found |= {cell: _failed(cell, done) for cell in lost}
    return Measured(measurements=found, process=process)


def _find_lost(rest: Sequence[Cell], *, is_started: bool, is_silent: bool) -> Sequence[Cell]:
    if not is_started:
        return rest
    if is_silent:
        return [cell for cell in rest if cell.implementation == rest[0].implementation]
    return rest[:1]


def _make_task(claim: Claim, cells: Sequence[Cell], bench: Bench) -> Task:
    assert isinstance(claim.check, MeasureCheck)
    assert claim.dtype is not None
    return Task(
        operator=claim.check.operator,
        settings=claim.check.settings,
        dtype=claim.dtype,
        device=bench.device,
        warmup=bench.warmup,
        repeats=bench.repeats,
        shapes={row.row: row.shape for row in claim.rows},
        cells=tuple(cells),
    )


def _read_answers(stdout: str) -> tuple[Mapping[str, Any], list[Measurement]]:
    process: Mapping[str, Any] = {}
    answers: list[Measurement] = []
    with suppress(ValueError):
        for line in stdout.splitlines():
            if line.startswith(ANSWER) and not process:
                process = json.loads(line.removeprefix(ANSWER))
            elif line.startswith(ANSWER):
                answers.append(MEASUREMENT.validate_json(line.removeprefix(ANSWER)))
    return process, answers


def _failed(cell: Cell, done: proc.Completed) -> Measurement:
    if done.is_timeout:
        reason = "the measuring process exceeded its time limit"
    elif done.returncode < 0:
        reason = f"the measuring process was killed by {Signals(-done.returncode).name}"
    else:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"the measuring process ended with exit code {done.returncode}"
    return Measurement(
        cell=cell, status=OperatorStatus.FAILED, reason=hide_places(" ".join(reason.split()))[:MAX_REASON]
    )
