"""Make the tables of an operator run: one row per implementation of a case, compared with the trainer's function."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rlk_repro.base.units import format_bytes, format_count, format_number, group
from rlk_repro.report.blocks import (
    Block,
    Section,
    Table,
    TableCell,
    Text,
    Tone,
    drop_empty_columns,
    make_columns,
    make_row,
)
from rlk_repro.report.figure import is_drawable
from rlk_repro.report.labels import NOT_RECORDED, format_fixed
from rlk_repro.report.view import View, log_path
from rlk_repro.rundir.operator_results import (
    REFERENCE,
    OperatorCase,
    OperatorKind,
    OperatorResult,
    OperatorStatus,
    OperatorTrial,
)

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
MAX_PROCESSES: Final = 4
MAX_KERNELS: Final = 5
MAX_KERNEL_NAME: Final = 40

TIMES: Final = f"× {REFERENCE}"
INTRODUCTION: Final = (
    f"Each row is one implementation; all rows of a table have the same input. The row {REFERENCE} is {REFERENCE}'s "
    f"own function, and {TIMES} is a row's speed as a multiple of that function's speed in the same process. fused "
    "means RL-Kernel's own kernels, identified by class and compiled symbols; native means RL-Kernel's plain PyTorch; "
    "peer means another project's function, for comparison only. blocked means that an implementation cannot run here; "
    "oom means that an implementation ran out of memory."
)
LEGEND: Final = (
    "A median covers all timed calls of one process. ± is the median absolute deviation within a process, and the "
    "largest of all processes is shown. The column 'apart' is the difference between the medians of the processes. "
    "Extra memory is the peak during the calls minus the level before the calls. Error is the largest difference from "
    "float64 over the checked rows; a gradient's error is a fraction of its largest element. The column 'of floor' is "
    "the shortest possible time divided by the median; the shortest possible time follows from the bandwidth and the "
    "matrix rate that the same process measured. One rank's share of a vocabulary is measured on one device, without "
    "communication."
)


def make_cells(view: View) -> Section:
    results = view.analysis.operators
    title = "Operators, case by case"
    if not results:
        return Section(key="cells", title=title, blocks=(Text(text=f"Operators: {NOT_RECORDED}."),))
    tables = [_make_table(view, case, found) for case, found in group_by_case(results)]
    blocks: list[Block] = [Text(text=INTRODUCTION), Text(text=LEGEND), *tables, *_make_origin_tables(results)]
    return Section(key="cells", title=title, blocks=tuple(blocks))


def group_by_case(results: Iterable[OperatorResult]) -> list[tuple[OperatorCase, list[OperatorResult]]]:
    return list(group((result.case, result) for result in results).items())


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
    places = {trial.name: trial.index for trial in view.analysis.trials}
    names = list(dict.fromkeys(trial.trial for result in results for trial in result.trials))
    shown = names if len(names) <= MAX_PROCESSES else []
    medians = [f"median of trial {places.get(name, 0):02d} (ms)" for name in shown] or ["median (ms)"]
    numbers = (*medians, "±", "apart", TIMES, "extra memory", "error", "gradient error", "of floor")
    columns = make_columns("implementation", "kind", "status", *numbers, numbers=numbers)
    rows = [_make_row(view, result, shown) for result in results]
    return drop_empty_columns(Table(title=describe_case(case), columns=columns, rows=tuple(rows)))


def _make_row(view: View, result: OperatorResult, shown: Sequence[str]) -> tuple[TableCell, ...]:
    by_name = {trial.trial: trial for trial in result.trials}
    medians = [_median_cell(view, by_name.get(name)) for name in shown] or [TableCell(text=describe_median(result))]
    return make_row(
        TableCell(text=result.implementation, is_code=True),
        TableCell(text=result.kind.value, tone=KIND_TONES[result.kind]),
        TableCell(text=result.status.value, tone=STATUS_TONES[result.status]),
        *medians,
        _show_percent(_find_spread(result)),
        _show_percent(result.process_spread),
        describe_speedup(result),
        describe_memory(result),
        describe_error(result.error),
        describe_error(result.gradient_error),
        describe_floor_share(result),
    )


def _median_cell(view: View, trial: OperatorTrial | None) -> TableCell:
    if trial is None or trial.median_s is None:
        return TableCell(text="–", tone=Tone.FAINT)
    target = view.file_cell(log_path(trial.trial), "").target
    return TableCell(text=format_ms(trial.median_s), note=f":{trial.line}", target=target)


def format_ms(seconds: float) -> str:
    value = seconds * 1e3
    decimals = 3 - math.floor(math.log10(value)) if value > 0 else 0
    return format_fixed(value, min(6, max(0, decimals)))


def describe_median(result: OperatorResult) -> str:
    """Return the range of the processes' medians in milliseconds, like ``4.480 – 4.482``, or the status."""
    values = sorted(trial.median_s for trial in result.trials if trial.median_s is not None)
    if not values:
        return result.status.value
    return " – ".join(dict.fromkeys((format_ms(values[0]), format_ms(values[-1]))))


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
    values = sorted(trial.speedup for trial in result.trials if trial.speedup is not None)
    return " – ".join(dict.fromkeys(f"{value:#.3g}" for value in (values[0], values[-1]))) if values else ""


def describe_memory(result: OperatorResult) -> str:
    peaks = [trial.peak_extra_bytes for trial in result.trials if trial.peak_extra_bytes is not None]
    return format_bytes(max(peaks)) if peaks else ""


def describe_floor_share(result: OperatorResult) -> str:
    fractions = [trial.floor_fraction for trial in result.trials if trial.floor_fraction is not None]
    if not fractions:
        return ""
    ends = (f"{value * 100:.0f}" if value >= 0.01 else "<1" for value in (min(fractions), max(fractions)))
    return f"{' – '.join(dict.fromkeys(ends))} %"


def _find_spread(result: OperatorResult) -> float | None:
    found = [trial.mad_s / trial.median_s for trial in result.trials if trial.mad_s is not None and trial.median_s]
    return max(found, default=None)


def _show_percent(fraction: float | None) -> str:
    if fraction is None:
        return ""
    value = fraction * 100
    return "<0.1 %" if 0 < value < 0.1 else f"{value:.0f} %" if value >= 10 else f"{value:.1f} %"


def describe_error(error: float | None) -> str:
    return "" if error is None else format_number(error, 2)


def _make_origin_tables(results: Sequence[OperatorResult]) -> Iterator[Table]:
    passed = _group(result for result in results if result.status is OperatorStatus.PASSED)
    others = _group(result for result in results if result.status is not OperatorStatus.PASSED)
    names = ("implementation", "operator", "kind")
    if passed:
        prose = ("class or function called, and its version", "kernels")
        note = (
            "A profiler named the kernels in one call of each case, after all timing. The column 'repeats' says "
            "whether a second call gave the same bits."
        )
        columns = make_columns(*names, *prose, "repeats", prose=prose)
        yield Table(title="Implementations", columns=columns, rows=tuple(map(_make_origin_row, passed)), note=note)
    if others:
        columns = make_columns(*names, "status", "cases", "why", numbers=("cases",), prose=("why",))
        yield Table(title="Not measured", columns=columns, rows=tuple(map(_make_reason_row, others)))


def _group(results: Iterable[OperatorResult]) -> list[list[OperatorResult]]:
    groups: dict[tuple[str, ...], list[OperatorResult]] = {}
    for result in results:
        key = (result.case.operator, result.implementation, result.kind, result.class_name, result.version)
        groups.setdefault((*key, result.status, result.reason), []).append(result)
    return list(groups.values())


def _make_origin_row(found: Sequence[OperatorResult]) -> tuple[TableCell, ...]:
    first = found[0]
    repeats = {result.is_repeatable for result in found}
    return make_row(
        *_name_cells(first),
        ", ".join(part for part in (first.class_name, first.version, first.reason) if part),
        _describe_kernels(found),
        "no" if False in repeats else "yes" if True in repeats else NOT_RECORDED,
    )


def _make_reason_row(found: Sequence[OperatorResult]) -> tuple[TableCell, ...]:
    first = found[0]
    status = TableCell(text=first.status.value, tone=STATUS_TONES[first.status])
    return make_row(*_name_cells(first), status, str(len(found)), first.reason)


def _name_cells(result: OperatorResult) -> tuple[TableCell, TableCell, TableCell]:
    kind = TableCell(text=result.kind.value, tone=KIND_TONES[result.kind])
    return TableCell(text=result.implementation, is_code=True), TableCell(text=result.case.operator), kind


def _describe_kernels(found: Sequence[OperatorResult]) -> str:
    kernels = [name for result in found for name in result.kernels]
    own_first = sorted(kernels, key=lambda name: "at::native::" in name)
    names = list(dict.fromkeys(map(_shorten_kernel, own_first)))
    rest = len(names) - MAX_KERNELS
    return ", ".join(names[:MAX_KERNELS]) + (f" and {rest} more" if rest > 0 else "")


def _shorten_kernel(name: str) -> str:
    plain = name.removeprefix("void ").replace("(anonymous namespace)", "")
    head = plain.split("<")[0].split("(")[0]
    return (head.rpartition("::")[2] or head or name)[:MAX_KERNEL_NAME]


def make_operator_basis(view: View) -> tuple[tuple[str, str], ...]:
    results = view.analysis.operators
    counts = Counter(result.status for result in results)
    cells = ", ".join(f"{counts[status]} {status}" for status in OperatorStatus if counts[status])
    num_cases = len({result.case for result in results})
    return (
        ("measurements", f"{cells} (in {num_cases} cases)" if results else NOT_RECORDED),
        ("processes", _describe_processes(results)),
        (REFERENCE, _describe_reference(results)),
        ("RL-Kernel", _describe_rl_kernel(results)),
    )


def _describe_processes(results: Sequence[OperatorResult]) -> str:
    number = len({trial.trial for result in results for trial in result.trials})
    spreads = sorted(result.process_spread for result in results if result.process_spread is not None)
    if not spreads:
        return f"too few ({number}) to show how far processes differ"
    middle, largest = (_show_percent(spreads[place]) for place in (len(spreads) // 2, -1))
    return f"{number}; their medians differ by at most {middle} in half of the measurements, and {largest} in every one"


def _describe_reference(results: Sequence[OperatorResult]) -> str:
    found = [result for result in results if result.implementation == REFERENCE]
    passed = sum(result.status is OperatorStatus.PASSED for result in found)
    if found and not passed:
        return f"not measured, so no speedup is known: {found[0].status} ({found[0].reason})"
    return f"measured in {passed} of {len(found)} cases" if found else "not in this run"


def _describe_rl_kernel(results: Sequence[OperatorResult]) -> str:
    passed = [result for result in results if result.status is OperatorStatus.PASSED]
    fused = dict.fromkeys(result.class_name for result in passed if result.kind is OperatorKind.FUSED)
    if fused:
        return f"fused: {', '.join(fused)}"
    if any(result.kind is OperatorKind.NATIVE for result in passed):
        return "no fused implementation ran, only plain PyTorch"
    return "no implementation of RL-Kernel ran"
