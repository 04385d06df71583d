"""Compare measurements of this machine with published ones: ratios of times, and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rlk_repro.claims.files import (
    BYTES,
    Claim,
    Comparison,
    MeasureCheck,
    MemoryComparison,
    Row,
    SpeedComparison,
    chosen_rows,
    find_published,
)
from rlk_repro.claims.results import (
    Basis,
    Cell,
    ClaimResult,
    Compared,
    Measurement,
    RowResult,
    Word,
    join_words,
)
from rlk_repro.rundir.operator_results import OperatorStatus

# A published "~0 MB" or "0.00 GB" may be up to this many bytes, for example workspaces and one value per row.
ZERO_BYTES: Final = 32 << 20
NO_GPU: Final = "this machine has no GPU, and speed is not checked on a CPU"
COMPUTED: Final = "the published memory figure was only compared with a formula; nothing was measured"
NOTHING_COMPARED: Final = "the published run ran out of memory, so no published value can be compared"


def is_same_gpu(gpu: str, name_part: str) -> bool | None:
    """Tell whether ``name_part`` is a whole part of the name ``gpu``; the result is None if one of the two is empty."""
    if not name_part or not gpu:
        return None
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(name_part)}(?![0-9])", gpu) is not None


def list_cells(claim: Claim) -> list[Cell]:
    if not isinstance(claim.check, MeasureCheck):
        return []
    cells: dict[Cell, None] = {}
    for row in claim.rows:
        for comparison in _comparisons_of(claim, claim.check, row):
            cells.update(dict.fromkeys(_cells_of(claim, row, comparison)))
    return list(cells)


def _comparisons_of(claim: Claim, check: MeasureCheck, row: Row) -> list[Comparison]:
    return [
        comparison
        for comparison in check.compare
        if row in chosen_rows(claim, comparison) and find_published(claim, row, comparison) is not None
    ]


def _cells_of(claim: Claim, row: Row, comparison: Comparison) -> Iterator[Cell]:
    pass_ = claim.quantities[comparison.quantity].pass_
    for implementation in comparison.implementations:
        yield Cell(row=row.row, implementation=implementation, pass_=pass_)
    if isinstance(comparison, SpeedComparison) and comparison.is_cold:
        yield Cell(row=row.row, implementation=comparison.baseline, pass_=pass_, is_cold=True)


def judge_claim(claim: Claim, gpu: str, measurements: Mapping[Cell, Measurement]) -> ClaimResult:
    """Find the result of each row of a claim; a comparison gets *not runnable* if a measurement for it is missing.

    ``gpu`` is the name that the driver gives this machine's GPU, empty without a GPU.
    """
    return ClaimResult(
        claim=claim.claim,
        title=claim.title,
        source=str(claim.source),
        published_on=f"GPU {claim.testbed.gpu}, stack {claim.testbed.stack}",
        here=gpu or "a CPU",
        is_same_hardware=is_same_gpu(gpu, claim.testbed.name_part),
        rows=tuple(_judge_row(claim, row, gpu, measurements) for row in claim.rows),
        measurements=tuple(measurements.values()),
        doubts=claim.doubts,
    )


def _judge_row(claim: Claim, row: Row, gpu: str, measurements: Mapping[Cell, Measurement]) -> RowResult:
    if not isinstance(claim.check, MeasureCheck):
        return RowResult(row=row.row, word=Word.NOT_RUNNABLE, reason=claim.check.reason)
    comparisons = _comparisons_of(claim, claim.check, row)
    if not comparisons:
        return RowResult(row=row.row, word=Word.NOT_RUNNABLE, reason=NOTHING_COMPARED)
    compared = tuple(
        _compare_speed(claim, row, comparison, gpu, measurements)
        if isinstance(comparison, SpeedComparison)
        else _compare_memory(claim, row, comparison, gpu, measurements)
        for comparison in comparisons
    )
    gaps = dict.fromkeys([*_list_gaps(compared), *_list_ignored(row, comparisons)])
    word = join_words(item.word for item in compared)
    return RowResult(
        row=row.row,
        word=Word.PARTLY if gaps and word is Word.REPRODUCED else word,
        reason="; ".join(gaps),
        compared=compared,
    )


def _list_gaps(compared: tuple[Compared, ...]) -> Iterator[str]:
    for item in compared:
        if item.word is Word.NOT_RUNNABLE:
            yield item.reason
        elif item.basis is Basis.ARITHMETIC:
            yield COMPUTED


def _list_ignored(row: Row, comparisons: Sequence[Comparison]) -> Iterator[str]:
    used = {(name, comparison.quantity) for comparison in comparisons for name in comparison.implementations}
    for implementation, values in row.published.items():
        for quantity in values:
            if (implementation, quantity) not in used:
                yield f"{quantity} of {implementation} is not compared"


def _compare_speed(
    claim: Claim, row: Row, comparison: SpeedComparison, gpu: str, measurements: Mapping[Cell, Measurement]
) -> Compared:
    pass_ = claim.quantities[comparison.quantity].pass_
    published = find_published(claim, row, comparison)
    what = f"{pass_}, {comparison.baseline} / {comparison.candidate}"
    baseline, candidate, *first = (measurements.get(cell) for cell in _cells_of(claim, row, comparison))
    reason = _find_obstacle(gpu, baseline, candidate, *first)
    warm = _ratio(baseline, candidate)
    ratio = _ratio(first[0], candidate) if first else warm
    if reason is None and published and ratio is not None:
        is_near = max(ratio / published, published / ratio) <= 1 + comparison.tolerance_pct / 100
        word = Word.REPRODUCED if is_near else Word.NOT_REPRODUCED
    else:
        word = _word_without(claim, gpu, baseline, candidate)
    return Compared(
        what=f"{what}, cold start" if first else what,
        unit="x",
        word=word,
        published=published,
        here=ratio,
        warm=warm if first else None,
        tolerance_pct=comparison.tolerance_pct,
        reason=reason or "",
    )


def _ratio(baseline: Measurement | None, candidate: Measurement | None) -> float | None:
    times = [item.median_s if item is not None else None for item in (baseline, candidate)]
    return times[0] / times[1] if times[0] is not None and times[1] else None


def _compare_memory(
    claim: Claim, row: Row, comparison: MemoryComparison, gpu: str, measurements: Mapping[Cell, Measurement]
) -> Compared:
    quantity = claim.quantities[comparison.quantity]
    published = find_published(claim, row, comparison)
    (measurement,) = (measurements.get(cell) for cell in _cells_of(claim, row, comparison))
    is_arithmetic = not gpu and comparison.bytes_per_logit is not None
    scale = BYTES[quantity.unit]
    found = _found_bytes(row, comparison, measurement, is_arithmetic=is_arithmetic)
    reason = None if is_arithmetic else _find_obstacle(gpu, measurement)
    if found is not None and published is not None:
        is_near = _is_near_bytes(found, published * scale, comparison.tolerance_pct)
        agrees = Word.ARITHMETIC if is_arithmetic else Word.REPRODUCED
        word = agrees if is_near else Word.NOT_REPRODUCED
    else:
        word = _word_without(claim, gpu, measurement)
    counted = "with inputs" if comparison.counts_inputs else "above inputs"
    return Compared(
        what=f"{quantity.pass_}, memory {counted}, {comparison.implementation}",
        unit=quantity.unit,
        word=word,
        published=published,
        here=None if found is None else found / scale,
        tolerance_pct=comparison.tolerance_pct,
        basis=Basis.ARITHMETIC if is_arithmetic else Basis.MEASURED,
        reason=(comparison.made_of or "") if is_arithmetic else reason or "",
    )


def _found_bytes(
    row: Row, comparison: MemoryComparison, measurement: Measurement | None, *, is_arithmetic: bool
) -> float | None:
    if is_arithmetic and comparison.bytes_per_logit is not None:
        return comparison.bytes_per_logit * row.num_logits
    if measurement is None or measurement.peak_extra_bytes is None:
        return None
    inputs = (measurement.input_bytes or 0) if comparison.counts_inputs else 0
    return measurement.peak_extra_bytes + inputs


def _is_near_bytes(found: float, published: float, tolerance_pct: float) -> bool:
    return abs(found - published) <= max(published * tolerance_pct / 100, ZERO_BYTES if published < ZERO_BYTES else 0)


def _find_obstacle(gpu: str, *measurements: Measurement | None) -> str | None:
    if not gpu:
        return NO_GPU
    for measurement in measurements:
        if measurement is None:
            return "a measurement is missing"
        if measurement.status is OperatorStatus.OOM:
            return f"{measurement.cell.implementation} ran out of memory here"
        if measurement.status is not OperatorStatus.PASSED:
            return f"{measurement.cell.implementation}: {measurement.reason or measurement.status.value}"
    return None


def _word_without(claim: Claim, gpu: str, *measurements: Measurement | None) -> Word:
    """Return ``not reproduced`` only if a call ran out of memory on the GPU that the claim names."""
    is_oom = any(item is not None and item.status is OperatorStatus.OOM for item in measurements)
    return Word.NOT_REPRODUCED if is_oom and is_same_gpu(gpu, claim.testbed.name_part) else Word.NOT_RUNNABLE
