"""Show an operator run: the speed of each implementation as a multiple of the trainer's own function's speed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rlk_repro.base.units import count, format_bytes, format_count, format_number, group, name_some
from rlk_repro.report.blocks import Block, Figure, Row, Section, Table, TableCell, Text, Tone, make_table
from rlk_repro.report.drawing import LEGEND_Y, WIDTH, Scale, is_drawable, line, make_figure, marker, text
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
    "measured, divided by the median. 'repeats' says whether a second call gave the same bits. A profiler named the "
    "kernels in one call of each case, after all timing."
)
ROW: Final = 22
TOP: Final = 28
LEFT: Final = 176
RIGHT: Final = WIDTH - 14
STYLES: Final = {
    OperatorKind.FUSED: ("triangle", "dot enabled", "fused"),
    OperatorKind.NATIVE: ("circle", "dot hollow", "native"),
    OperatorKind.PEER: ("diamond", "dot other", "peer"),
    OperatorKind.TRAINER: ("circle", "dot baseline", f"{REFERENCE} + entropy"),
}


def make_cells(view: View) -> Section:
    results = view.analysis.operators
    title = "Operators, case by case"
    if not results:
        return Section(key="cells", title=title, blocks=(Text(text=f"Operators: {NOT_RECORDED}."),), summary=True)
    tables = [_make_table(view, case, found) for case, found in group((item.case, item) for item in results).items()]
    blocks: list[Block] = [_make_overview(results), Text(text=INTRODUCTION), *tables, Text(text=LEGEND)]
    return Section(key="cells", title=title, blocks=tuple(blocks), summary=True)


def _make_overview(results: Sequence[OperatorResult]) -> Table:
    fused = [result for result in results if result.kind is OperatorKind.FUSED and find_speedup(result) is not None]
    numbers = ("cases", TIMES)
    rows: list[Row] = []
    for (operator, name), found in group(((item.case.operator, item.implementation), item) for item in fused).items():
        cells = [TableCell(text=text, is_code=True) for text in (operator, name)]
        rows.append((*cells, str(len(found)), _show_range(map(find_speedup, found))))
    return make_table("operator", "implementation of RL-Kernel", *numbers, rows=rows, numbers=numbers)


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
    spreads = sorted(result.process_spread for result in results if result.process_spread is not None)
    if spreads:
        middle, largest = (_show_percent(spreads[place]) for place in (len(spreads) // 2, -1))
        number = len({trial.trial for result in results for trial in result.trials})
        yield "processes", f"{number}; their medians differ by at most {middle} in half of the cases, {largest} in all"
    found = [result for result in results if result.implementation == REFERENCE]
    passed = sum(result.status is OperatorStatus.PASSED for result in found)
    if found and not passed:
        yield REFERENCE, f"not measured, so no speedup is known: {found[0].status} ({found[0].reason})"
    else:
        yield REFERENCE, f"measured in {passed} of {count(len(found), 'case')}" if found else "not in this run"


def plot_speedups(view: View) -> tuple[Figure, ...]:
    results = [result for result in view.analysis.operators if find_speedup(result) is not None]
    by_operator = group((result.case.operator, result) for result in results)
    return tuple(_plot_operator(place, *item) for place, item in enumerate(by_operator.items()))


def _plot_operator(place: int, operator: str, results: Sequence[OperatorResult]) -> Figure:
    cases = list(group((result.case, result) for result in results).items())
    shown = cases[:MAX_ROWS]
    logs = [math.log2(speedup) for result in results if (speedup := find_speedup(result)) is not None]
    x = Scale(min(-1.0, math.floor(min(logs))), max(1.0, math.ceil(max(logs))), LEFT, RIGHT)
    bottom = TOP + ROW * len(shown) + 6
    body = list(_draw_axis(x, bottom))
    kinds = {result.kind for result in results}
    for number, (shape, style, name) in enumerate(STYLES[kind] for kind in STYLES if kind in kinds):
        body += [marker(shape, 5 + 80 * number, LEGEND_Y - 4, 4.5, style), text(16 + 80 * number, LEGEND_Y, name)]
    for number, (case, found) in enumerate(shown):
        body += _draw_row(case, found, x, TOP + ROW * (number + 0.5) + 3)
    caption = (
        "A mark is the speed of one implementation in one case: the geometric mean over its processes. The axis is "
        f"logarithmic; a mark right of 1 is faster than {REFERENCE}'s own function. f is forward, f+b is forward and "
        "backward; a percentage is the share of rows that are used."
    )
    if len(cases) > len(shown):
        caption += f" The plot shows the first {len(shown)} of {len(cases)} cases."
    title = f"{operator}: speed relative to {REFERENCE}"
    return make_figure(f"plot-operator-{place}", title, caption, bottom + 40, body)


def _draw_axis(x: Scale, bottom: float) -> Iterator[str]:
    step = max(1, math.ceil((x.high - x.low) / 8))
    for power in range(math.ceil(x.low), math.floor(x.high) + 1):
        if power % step == 0:
            yield line(x(power), TOP, x(power), bottom, "zero" if power == 0 else "grid")
            yield text(x(power), bottom + 17, f"{2.0**power:g}", "tick", "middle")
    yield text((LEFT + RIGHT) / 2, bottom + 36, f"speed relative to {REFERENCE}", "axis", "middle")


def _draw_row(case: OperatorCase, results: Sequence[OperatorResult], x: Scale, y: float) -> Iterator[str]:
    yield text(LEFT - 8, y + 4, _label(case), "tick", "end")
    for result in sorted(results, key=lambda item: item.kind is OperatorKind.FUSED):  # the mark drawn last lies on top
        speedup = find_speedup(result)
        if speedup is not None and result.kind in STYLES:
            shape, style, _ = STYLES[result.kind]
            tip = f"{result.implementation}: {describe_speedup(result)} ({describe_case(case)})"
            yield marker(shape, x(math.log2(speedup)), y, 4.5, style, tip)


def _label(case: OperatorCase) -> str:
    """Return a short label like ``9216×151936 bf16 50 % f+b``."""
    sizes = [size for size in (case.num_tokens, case.hidden_size, case.vocab_size) if size is not None]
    dtype = case.dtype.replace("bfloat", "bf").replace("float", "fp")
    wanted = "" if case.density == 1 else f" {case.density * 100:.3g} %"
    return f"{'×'.join(map(str, sizes))} {dtype}{wanted} {'f+b' if 'backward' in case.work else 'f'}"[:34]
