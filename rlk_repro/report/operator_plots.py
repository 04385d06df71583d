"""Plot the speed of each operator in each case, as a multiple of the speed of the trainer's own function."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.report.figure import LEGEND_Y, Figure, make_figure
from rlk_repro.report.operators import describe_case, describe_speedup, find_speedup, group_by_case
from rlk_repro.report.svg import WIDTH, Scale, line, marker, text
from rlk_repro.report.view import View
from rlk_repro.rundir.operator_results import REFERENCE, OperatorCase, OperatorKind, OperatorResult

LEFT: Final = 200
RIGHT: Final = WIDTH - 14
TOP: Final = 28
ROW: Final = 22
MAX_ROWS: Final = 40
LEGEND_LEFTS: Final = (5, 143, 283, 350)
STYLES: Final = {
    OperatorKind.FUSED: ("triangle", "dot enabled", "RL-Kernel fused"),
    OperatorKind.NATIVE: ("circle", "dot hollow", "RL-Kernel native"),
    OperatorKind.PEER: ("diamond", "dot other", "peer"),
    OperatorKind.TRAINER: ("circle", "dot baseline", f"{REFERENCE} + entropy"),
}


def plot_speedups(view: View) -> tuple[Figure, ...]:
    results = [result for result in view.analysis.operators if find_speedup(result) is not None]
    operators = list(dict.fromkeys(result.case.operator for result in results))
    return tuple(
        _plot_operator(place, operator, [result for result in results if result.case.operator == operator])
        for place, operator in enumerate(operators)
    )


def _plot_operator(place: int, operator: str, results: Sequence[OperatorResult]) -> Figure:
    cases = group_by_case(results)
    shown = cases[:MAX_ROWS]
    logs = [math.log2(speedup) for result in results if (speedup := find_speedup(result)) is not None]
    x = Scale(min(-1.0, math.floor(min(logs))), max(1.0, math.ceil(max(logs))), LEFT, RIGHT)
    bottom = TOP + ROW * len(shown) + 6
    kinds = [kind for kind in STYLES if any(result.kind is kind for result in results)]
    body = [*_draw_axis(x, bottom), *_draw_legend(kinds)]
    for number, (case, found) in enumerate(shown):
        body += _draw_row(case, found, x, TOP + ROW * (number + 0.5) + 3)
    caption = (
        "A mark is the speed of one implementation in one case: the geometric mean over its processes, each relative "
        f"to {REFERENCE}'s own function in the same process. The axis is logarithmic; a mark right of 1 is faster than "
        f"{REFERENCE}. f is forward, f+b is forward and backward; a percentage is the share of rows that are used."
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


def _draw_legend(kinds: Sequence[OperatorKind]) -> Iterator[str]:
    for place, kind in enumerate(kinds):
        shape, style, name = STYLES[kind]
        left = LEGEND_LEFTS[place]
        yield marker(shape, left, LEGEND_Y - 4, 4.5, style)
        yield text(left + 11, LEGEND_Y, name, "legend")


def _draw_row(case: OperatorCase, results: Sequence[OperatorResult], x: Scale, y: float) -> Iterator[str]:
    yield text(LEFT - 8, y + 4, _label(case), "tick", "end")
    for result in sorted(results, key=lambda item: item.kind is OperatorKind.FUSED):  # the mark drawn last lies on top
        speedup = find_speedup(result)
        if speedup is None or result.kind not in STYLES:
            continue
        shape, style, _ = STYLES[result.kind]
        tip = f"{result.implementation}: {describe_speedup(result)} ({describe_case(case)})"
        yield marker(shape, x(math.log2(speedup)), y, 4.5, style, tip)


def _label(case: OperatorCase) -> str:
    """Return a short label like ``9216×151936 bf16 50 % f+b``."""
    sizes = (case.num_tokens, case.vocab_size) if case.hidden_size is None else (
        case.num_tokens, case.hidden_size, case.vocab_size
    )  # fmt: skip
    dtype = case.dtype.replace("bfloat", "bf").replace("float", "fp")
    wanted = "" if case.density == 1 else f" {case.density * 100:.3g} %"
    return f"{'×'.join(map(str, sizes))} {dtype}{wanted} {'f+b' if 'backward' in case.work else 'f'}"[:34]
