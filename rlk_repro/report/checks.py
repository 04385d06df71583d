"""Show whether engines agree: a table of comparisons, a matrix of engines, and a plot of differences by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.base.units import format_count, format_number
from rlk_repro.report.blocks import Block, Bullets, Section, Table, TableCell, Text, Tone, make_columns, make_row
from rlk_repro.report.figure import BOTTOM, LEFT, RIGHT, TOP, UNIT_Y, Figure, draw_powers, make_figure
from rlk_repro.report.labels import start_sentence
from rlk_repro.report.svg import Scale, line, marker, polyline, text
from rlk_repro.report.view import View
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord, describe_checks, list_failures
from rlk_repro.rundir.results import ProofStatus

KEY: Final = "engines"
TITLE: Final = "Whether engines agree"
NOT_RUN: Final = "did not run; the trainer's own functions computed the loss."
DRIFT_TITLE: Final = "Where drift starts"
TONES: Final = {CheckWord.PASS: Tone.GOOD, CheckWord.FAIL: Tone.BAD, CheckWord.NOT_MEASURED: Tone.FAINT}
SHAPES: Final = ("circle", "triangle", "diamond")
NUM_COLOURS: Final = 6
MOST_NAMED: Final = 8
MOST_CURVES: Final = 12
LEGEND_STEP: Final = 17
EQUAL: Final = "equal"


def make_checks(view: View, *, is_brief: bool = False) -> Section:
    """Show the checks of engines; with ``is_brief``, only layers have a table of their own."""
    checks = view.analysis.checks
    failed = list_failures(checks)
    names = [str(item) for item in failed[:MOST_NAMED]]
    names += [f"and {len(failed) - MOST_NAMED} more failed checks"] if failed[MOST_NAMED:] else []
    tables = [_make_table(kind, [item for item in checks if item.kind is kind]) for kind in CheckKind]
    if is_brief:
        tables = [_count_words(checks), *(table for table in tables if table.title == _name(CheckKind.LAYERS))]
    idle = [trial.name for trial in view.analysis.trials if trial.proof is ProofStatus.FALLBACK]
    blocks: tuple[Block, ...] = (
        Text(text="A check compares what two engines compute from the same tokens; the contract sets the bounds."),
        Text(text=f"{start_sentence(describe_checks(checks))}."),
        *(Text(text=f"{name}: {view.analysis.serving} {NOT_RUN}") for name in idle),
        *((Bullets(items=tuple(names)),) if names else ()),
        *make_matrices(checks),
        *(table for table in tables if table.rows),
    )
    return Section(key=KEY, title=TITLE, blocks=blocks)


def _count_words(checks: Sequence[AgreementCheck]) -> Table:
    rows = []
    for kind in CheckKind:
        found = [item for item in checks if item.kind is kind]
        reasons = dict.fromkeys(item.found for item in found if item.word is CheckWord.NOT_MEASURED)
        numbers = [str(sum(item.word is word for item in found)) for word in CheckWord]
        rows += [make_row(kind.value, *numbers, "; ".join(reasons))] if found else []
    words = tuple(word.value for word in CheckWord)
    columns = make_columns("compared", *words, "why not", numbers=words, prose=("why not",))
    return Table(title="Checks by result", columns=columns, rows=tuple(rows))


def _name(kind: CheckKind) -> str:
    return kind.value.capitalize()


def make_matrices(checks: Sequence[AgreementCheck]) -> Iterator[Table]:
    found = [item for item in checks if item.kind is CheckKind.LOG_PROBS and item.step == 0]
    for variant in dict.fromkeys(item.variant for item in found):
        here = {frozenset((item.first, item.second)): item for item in found if item.variant == variant}
        engines = list(dict.fromkeys(name for item in here.values() for name in (item.first, item.second)))
        if len(engines) < 3:
            continue
        rows = [
            make_row(row, *(_describe_pair(here.get(frozenset((row, column)))) for column in engines))
            for row in engines
        ]
        columns = make_columns("engine", *engines, numbers=tuple(engines))
        title = f"Largest difference of log-probs, {variant}, step 0"
        yield Table(title=title, columns=columns, rows=tuple(rows))


def _describe_pair(check: AgreementCheck | None) -> TableCell:
    if check is None:
        return TableCell(text="")
    return TableCell(text=_describe_size(check), tone=TONES[check.word])


def _describe_size(check: AgreementCheck) -> str:
    if check.word is CheckWord.NOT_MEASURED and not check.num:
        return "–"
    if check.num and not check.num_unequal:
        return EQUAL
    return "not finite" if check.largest is None else format_number(check.largest, 3)


def _make_table(kind: CheckKind, checks: Sequence[AgreementCheck]) -> Table:
    numbers = ("values", "differ", "largest", "bound")
    columns = make_columns("compared", "variant", "step", "word", *numbers, "found", numbers=numbers, prose=("found",))
    rows = tuple(
        make_row(
            f"{item.first} / {item.second}",
            item.variant,
            str(item.step),
            TableCell(text=item.word.value, tone=TONES[item.word]),
            format_count(item.num) if item.num else "",
            format_count(item.num_unequal) if item.num else "",
            "" if item.largest is None else format_number(item.largest, 3),
            "" if item.bound is None else f"{item.bound:g} ({item.dtype})",
            item.found,
        )
        for item in checks
    )
    return Table(title=_name(kind), columns=columns, rows=rows, is_folded=len(rows) > MOST_NAMED)


def plot_drift(view: View) -> Iterator[Figure]:
    found = [item for item in view.analysis.checks if item.kind is CheckKind.LAYERS and item.points]
    # a check of two cases of one engine has the engine's name in both names
    engines = [item for item in found if not item.second.startswith(f"{item.first}, ")]
    shown = [item for item in engines if item.pair == found[0].pair][:MOST_CURVES]
    sizes = [size for item in shown for size in item.curve if size]
    if not shown:
        return
    key = f"{KEY}-drift"
    if not sizes:
        compared = "; ".join(dict.fromkeys(f"{item.first} / {item.second}" for item in shown))
        yield Figure(key=key, title=DRIFT_TITLE, caption=f"Between these engines no layer differs: {compared}.")
        return
    points = max((item.points for item in shown), key=len)
    top = TOP + LEGEND_STEP * len(shown)
    bottom = BOTTOM + LEGEND_STEP * len(shown)
    bounds = {item.bound for item in shown if item.bound is not None}
    powers = [math.log10(size) for size in (*sizes, *bounds)]
    y = Scale(math.floor(min(powers)), math.floor(max(powers)) + 1, bottom, top)
    x = Scale(-0.5, len(points) - 0.5, LEFT, RIGHT)
    body = [*_draw_axes(x, y, points, bottom, UNIT_Y + LEGEND_STEP * (len(shown) - 1))]
    body += [line(LEFT, y(math.log10(bound)), RIGHT, y(math.log10(bound)), "floor") for bound in sorted(bounds)]
    colours = list(dict.fromkeys((item.first, item.second) for item in shown))
    for number, item in enumerate(shown):
        body += _draw_curve(number, colours.index((item.first, item.second)), item, points, x, y)
    caption = (
        "Largest relative difference between two engines' outputs for one token, after each operator of each layer. "
        "No point is drawn where the engines are equal. A solid curve is baseline, a dashed curve is enabled. "
        "A dashed horizontal line is the contract's bound."
    )
    yield make_figure(key, DRIFT_TITLE, caption, bottom + 44, body)


def _draw_axes(x: Scale, y: Scale, points: Sequence[str], bottom: float, unit_y: float) -> Iterator[str]:
    yield from draw_powers(y, "relative difference", unit_y)
    yield text((LEFT + RIGHT) / 2, bottom + 36, "layer (its operators in the order of computation)", "axis", "middle")
    layers = [place for place, point in enumerate(points) if point.endswith(" attention")]
    stride = max(1, math.ceil(len(layers) / 12))
    for number in range(0, len(layers), stride):
        yield text(x(layers[number]), bottom + 17, str(number), "tick", "middle")


def _draw_curve(
    number: int, engines: int, check: AgreementCheck, points: Sequence[str], x: Scale, y: Scale
) -> Iterator[str]:
    variant = "enabled" if check.variant == "enabled" else "baseline"
    colour = f"series-{engines % NUM_COLOURS}"
    shape = SHAPES[engines % len(SHAPES)]
    legend_y = 12 + LEGEND_STEP * number
    yield line(0, legend_y - 4, 22, legend_y - 4, f"path {variant} {colour}")
    yield marker(shape, 11, legend_y - 4, 4, f"dot {colour}")
    yield text(30, legend_y, f"{check.first} / {check.second}, {check.variant}", "legend")
    places = {point: place for place, point in enumerate(points)}
    drawn = [
        (x(places[point]), y(math.log10(size)))
        for point, size in zip(check.points, check.curve, strict=True)
        if size and point in places
    ]
    if len(drawn) > 1:
        yield polyline(drawn, f"path {variant} {colour}")
    tip = f"{check.first} / {check.second}, {check.variant}: {check.found}"
    for at in drawn if len(points) <= 30 else drawn[:: max(1, len(drawn) // 12)]:
        yield marker(shape, *at, 3.5, f"dot {colour}", tip)
