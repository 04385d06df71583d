"""Show an operator run: the speed of each implementation as a multiple of the trainer's own function's speed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rlk_repro.base.units import count, format_bytes, format_count, format_number, group, name_some
from rlk_repro.report.blocks import Block, Row, Section, Table, TableCell, Text, Tone, make_table
from rlk_repro.report.drawing import is_drawable
from rlk_repro.report.labels import NOT_RECORDED, format_fixed
from rlk_repro.report.view import View, log_path
from rlk_repro.rundir.operator_results import REFERENCE, OperatorCase, OperatorKind, OperatorResult, OperatorStatus

KIND_TONES: Final = {
    OperatorKind.TRAINER: Tone.PLAIN,
    OperatorKind.FUSED: Tone.GOOD,
    OperatorKind.NATIVE: Tone.OPEN,
    OperatorKind.PEER: Tone.FAINT,
    OperatorKind.UNRESOLVED: Tone.FAINT,
}
STATUS_TONES: Final = {
    OperatorStatus.PASSED: Tone.PLAIN,
    OperatorStatus.OOM: Tone.OPEN,
    OperatorStatus.BLOCKED: Tone.FAINT,
    OperatorStatus.FAILED: Tone.BAD,
}
WORKS: Final = {"forward": "forward", "forward_backward": "forward and backward"}
MAX_KERNELS: Final = 3
MAX_KERNEL_NAME: Final = 40
MAX_ROWS: Final = 40
TIMES: Final = f"× {REFERENCE}"
INTRODUCTION: Final = (
    f"{TIMES} is the speed of an implementation as a multiple of the speed of {REFERENCE}'s own function with the same "
    "input in the same process. fused means RL-Kernel's own kernels, identified by class and compiled symbols; native "
    "means RL-Kernel's plain PyTorch; peer means another project's function, for comparison only. blocked means that "
    "an implementation cannot run here; oom means that an implementation ran out of memory."
)
LEGEND: Final = (
    "A median covers all timed calls of one process; a range goes over the processes. ± is the largest median absolute "
    "deviation within a process. Extra memory is the peak during the calls minus the level before them. Error is the "
    "largest difference from float64 over the checked rows; a gradient's error is a fraction of its largest element. "
    "The column 'of floor' is the shortest possible time, from the bandwidth and the matrix rate that the same process "
    "measured, divided by the median. 'repeats' says whether a second call gave the same bits."
)


def make_cells(view: View) -> Section:
    results = view.analysis.operators
    title = "Operators, case by case"
    if not results:
        return Section(key="cells", title=title, blocks=(Text(text=f"Operators: {NOT_RECORDED}."),), summary=True)
    tables = [_make_table(view, case, found) for case, found in group((item.case, item) for item in results).items()]
    blocks: list[Block] = [Text(text=INTRODUCTION), *tables, Text(text=LEGEND)]
    return Section(key="cells", title=title, blocks=tuple(blocks), summary=True)


def describe_speedups(results: Sequence[OperatorResult]) -> str:
    """Return the range of speedups of RL-Kernel's own kernels for each operator."""
    fused = [result for result in results if result.kind is OperatorKind.FUSED and find_speedup(result) is not None]
    found = group((result.case.operator, find_speedup(result)) for result in fused)
    shown = [f"{name} {_show_range(speeds).replace('–', 'to')}" for name, speeds in found.items()]
    if not shown:
        return "operators were measured one by one; no variants were compared"
    return f"speed of RL-Kernel's operators alone, as a multiple of {REFERENCE}'s speed: {', '.join(shown)}"


def _show_range(values: Iterable[float | None]) -> str:
    ordered = sorted(value for value in values if value is not None)
    return " – ".join(dict.fromkeys(f"{value:.3g}" for value in (ordered[0], ordered[-1]))) if ordered else ""


def describe_case(case: OperatorCase) -> str:
    """Return a case in words, like ``logp, forward: 9,216 tokens, vocabulary 151,936, float32``."""
    parts = [f"{format_count(case.num_tokens)} tokens"]
    if case.hidden_size is not None:
        parts.append(f"hidden {format_count(case.hidden_size)}")
    parts += [f"vocabulary {format_count(case.vocab_size)}", case.dtype]
    if case.density < 1:
        parts.append(f"the loss uses {case.density * 100:.3g} % of the tokens")
    return f"{case.operator}, {WORKS.get(case.work, case.work)}: {', '.join(parts)}"


def _make_table(view: View, case: OperatorCase, results: Sequence[OperatorResult]) -> Table:
    numbers = ("median (ms)", "±", TIMES, "extra memory", "error", "gradient error", "of floor")
    prose = ("what was called", "why")
    names = ("implementation", "kind", "status", *numbers, "repeats", *prose)
    rows = [_make_row(view, result) for result in results]
    return make_table(*names, rows=rows, numbers=numbers, prose=prose, title=describe_case(case), is_folded=True)


def _make_row(view: View, result: OperatorResult) -> Row:
    passed = [trial for trial in result.trials if trial.median_s is not None]
    medians = sorted(trial.median_s for trial in passed if trial.median_s is not None)
    shown = " – ".join(dict.fromkeys(_format_ms(value) for value in (*medians[:1], *medians[-1:])))
    target = view.file_cell(log_path(passed[0].trial), "").target if passed else ""
    note = f":{passed[0].line}" if passed and passed[0].line is not None else ""
    spreads = [trial.mad_s / trial.median_s for trial in passed if trial.mad_s is not None and trial.median_s]
    peaks = [trial.peak_extra_bytes for trial in passed if trial.peak_extra_bytes is not None]
    floors = [100 * trial.floor_fraction for trial in passed if trial.floor_fraction is not None]
    kernels = [name[:MAX_KERNEL_NAME] for name in result.kernels]
    return (
        TableCell(text=result.implementation, is_code=True),
        TableCell(text=result.kind.value, tone=KIND_TONES[result.kind]),
        TableCell(text=result.status.value, tone=STATUS_TONES[result.status]),
        TableCell(text=shown or "–", note=note, target=target),
        _show_percent(max(spreads, default=None)),
        describe_speedup(result),
        format_bytes(max(peaks)) if peaks else "",
        "" if result.error is None else format_number(result.error, 2),
        "" if result.gradient_error is None else format_number(result.gradient_error, 2),
        f"{_show_range(floors)} %" if floors else "",
        {True: "yes", False: "no", None: ""}[result.is_repeatable],
        ", ".join(part for part in (result.class_name, result.version, name_some(kernels, MAX_KERNELS)) if part),
        result.reason,
    )


def _format_ms(seconds: float) -> str:
    value = seconds * 1e3
    decimals = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return format_fixed(value, min(6, max(0, decimals)))


def find_speedup(result: OperatorResult) -> float | None:
    """Return the geometric mean of the processes' speedups; the reference itself gives None."""
    speedups = [trial.speedup for trial in result.trials if is_drawable(trial.speedup) and trial.speedup > 0]
    if result.implementation == REFERENCE or not speedups:
        return None
    return math.exp(math.fsum(map(math.log, speedups)) / len(speedups))


def describe_speedup(result: OperatorResult) -> str:
    """Return the range of the processes' speedups, like ``3.05 – 3.09``; the reference's speedup is ``1``."""
    if result.implementation == REFERENCE:
        return "1" if result.status is OperatorStatus.PASSED else ""
    return _show_range(trial.speedup for trial in result.trials)


def _show_percent(fraction: float | None) -> str:
    if fraction is None:
        return ""
    value = fraction * 100
    return "<0.1 %" if 0 < value < 0.1 else f"{value:.0f} %" if value >= 10 else f"{value:.1f} %"


def describe_operators(view: View) -> Iterator[tuple[str, str]]:
    """Yield the facts that the result of an operator run rests on."""
    results = view.analysis.operators
    counts = Counter(result.status for result in results)
    cells = ", ".join(f"{counts[status]} {status}" for status in OperatorStatus if counts[status])
    num_cases = len({result.case for result in results})
    yield "measurements", f"{cells} (in {count(num_cases, 'case')})" if results else NOT_RECORDED
    found = [result for result in results if result.implementation == REFERENCE]
    if found and not any(result.status is OperatorStatus.PASSED for result in found):
        yield REFERENCE, f"not measured, so no speedup is known: {found[0].status} ({found[0].reason})"
