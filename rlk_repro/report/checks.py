"""Show whether engines agree: one sentence, tables of comparisons, and a plot of differences by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.base.units import count, format_count, format_number, group
from rlk_repro.report.blocks import Block, Bullets, Figure, Row, Section, Table, TableCell, Text, Tone, make_table
from rlk_repro.report.drawing import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    UNIT_Y,
    Scale,
    draw_powers,
    line,
    make_figure,
    marker,
    polyline,
    text,
)
from rlk_repro.report.view import View
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord, list_failures
from rlk_repro.rundir.results import ProofStatus
from rlk_repro.spec.values import BASELINE, ENABLED

KEY: Final = "engines"
TITLE: Final = "Whether engines agree"
NOT_RUN: Final = "did not run; the trainer's own functions computed the loss."
DRIFT_TITLE: Final = "Where drift starts"
TONES: Final = {CheckWord.PASS: Tone.GOOD, CheckWord.FAIL: Tone.BAD, CheckWord.NOT_MEASURED: Tone.FAINT}
SHAPES: Final = {BASELINE: ("circle", 4.5, "hollow"), ENABLED: ("triangle", 3.0, "")}
"""A large open circle stays visible around a small triangle, where both variants have the same value."""
NUM_COLOURS: Final = 6
MOST_NAMED: Final = 8
MOST_CURVES: Final = 12
LEGEND_STEP: Final = 17


def describe_agreement(view: View) -> str:
    """Say how many checks failed, in which variants, and where first: ``14 of 66 checks failed, in both …``."""
    checks = view.analysis.checks
    failed = list_failures(checks)
    if failed:
        found = f"{len(failed)} of {count(len(checks), 'check')} failed, {_find_cause(view, failed)}"
        return f"{found}; first: {_describe_first(failed[0])}"
    measured = sum(item.word is not CheckWord.NOT_MEASURED for item in checks)
    missing = f", {len(checks) - measured} could not be measured" if measured < len(checks) else ""
    return f"{measured} of {count(len(checks), 'check')} passed{missing}"


def _find_cause(view: View, failed: Sequence[AgreementCheck]) -> str:
    """Say in which variants checks failed; what fails in the baseline alike is not caused by RL-Kernel."""
    found = {variant: {item.key[:1] + item.key[3:] for item in failed if item.variant == variant} for variant in SHAPES}
    idle = any(trial.proof is ProofStatus.FALLBACK for trial in view.analysis.trials)
    name = view.analysis.switch or view.analysis.serving
    only = found[ENABLED] - found[BASELINE]
    if not found[BASELINE]:
        where = "only in enabled" if found[ENABLED] else "between the variants"
        return where if idle else f"{where}: {name} may be the cause"
    cause = "" if idle else f", so {name} is not the cause"
    if not found[ENABLED]:
        return f"only in baseline{cause}"
    return f"in both variants, {len(only)} of them only in enabled" if only else f"in both variants alike{cause}"


def _describe_first(check: AgreementCheck) -> str:
    engines = f"between {check.first} and {check.second}"
    sizes = zip(check.points, check.curve, strict=False)
    bound = math.inf if check.bound is None else check.bound
    point, size = next(((name, size) for name, size in sizes if size is not None and size > bound), ("", None))
    if check.kind is CheckKind.LAYERS and size is not None:
        place = point.replace("mlp", "MLP")
        return f"{place} by {format_number(100 * size, 3)} % {engines} (limit {format_number(100 * bound, 3)} %)"
    if check.largest is not None and check.bound is not None:
        return f"{check.kind} by {format_number(check.largest, 3)} {engines} (limit {check.bound:g})"
    return f"{check.kind} {engines}: {check.found}"


def make_checks(view: View) -> Section:
    checks = view.analysis.checks
    failed = list_failures(checks)
    names = [str(item) for item in failed[:MOST_NAMED]]
    names += [f"and {len(failed) - MOST_NAMED} more failed checks"] if failed[MOST_NAMED:] else []
    idle = [trial.name for trial in view.analysis.trials if trial.proof is ProofStatus.FALLBACK]
    blocks: list[Block] = [
        Text(text="A check compares what two engines compute from the same tokens; the contract sets the bounds."),
        *(Text(text=f"{name}: {view.analysis.serving} {NOT_RUN}") for name in idle),
    ]
    if names:
        blocks.append(Bullets(items=tuple(names)))
    blocks += [_count_words(checks), _list_checks(checks)]
    return Section(key=KEY, title=TITLE, blocks=tuple(blocks), summary=True)


def _count_words(checks: Sequence[AgreementCheck]) -> Table:
    rows = []
    for kind, found in group((item.kind, item) for item in checks).items():
        reasons = dict.fromkeys(item.found for item in found if item.word is CheckWord.NOT_MEASURED)
        numbers = [str(sum(item.word is word for item in found)) for word in CheckWord]
        rows.append((kind.value, *numbers, "; ".join(reasons)))
    words = [word.value for word in CheckWord]
    prose = ("why not",)
    return make_table("compared", *words, *prose, rows=rows, numbers=words, prose=prose, title="Checks by result")


def _list_checks(checks: Sequence[AgreementCheck]) -> Table:
    numbers, prose = ("step", "values", "differ", "largest", "bound"), ("found",)
    names = ("compared", "engines", "variant", "word", *numbers, *prose)
    rows = map(_check_row, checks)
    return make_table(*names, rows=rows, numbers=numbers, prose=prose, title="Every check", is_folded=True)


def _check_row(check: AgreementCheck) -> Row:
    return (
        check.kind.value,
        f"{check.first} / {check.second}",
        check.variant,
        TableCell(text=check.word.value, tone=TONES[check.word]),
        str(check.step),
        format_count(check.num) if check.num else "",
        format_count(check.num_unequal) if check.num else "",
        "" if check.largest is None else format_number(check.largest, 3),
        "" if check.bound is None else f"{check.bound:g} ({check.dtype})",
        check.found,
    )


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
    drop = LEGEND_STEP * len(shown)
    bounds = {item.bound for item in shown if item.bound is not None}
    powers = [math.log10(size) for size in (*sizes, *bounds)]
    y = Scale(math.floor(min(powers)), math.floor(max(powers)) + 1, BOTTOM + drop, TOP + drop)
    x = Scale(-0.5, len(points) - 0.5, LEFT, RIGHT)
    body = [*draw_powers(y, "relative difference", UNIT_Y + drop - LEGEND_STEP), *_draw_layers(x, points, y.start)]
    body += [line(LEFT, y(math.log10(bound)), RIGHT, y(math.log10(bound)), "floor") for bound in sorted(bounds)]
    for number, item in enumerate(shown):
        body += _draw_curve(number, item, points, x, y)
    caption = (
        "Largest relative difference between two engines' outputs for one token, after each operator of each layer. "
        "No point is drawn where the engines are equal. A solid curve with circles is baseline, a dashed curve with "
        "triangles is enabled; the dashed horizontal line is the contract's bound."
    )
    yield make_figure(key, DRIFT_TITLE, caption, y.start + 44, body)


def _draw_layers(x: Scale, points: Sequence[str], bottom: float) -> Iterator[str]:
    yield text((LEFT + RIGHT) / 2, bottom + 36, "layer (its operators in the order of computation)", "axis", "middle")
    layers = [place for place, point in enumerate(points) if point.endswith(" attention")]
    stride = max(1, math.ceil(len(layers) / 12))
    for number in range(0, len(layers), stride):
        yield text(x(layers[number]), bottom + 17, str(number), "tick", "middle")


def _draw_curve(number: int, check: AgreementCheck, points: Sequence[str], x: Scale, y: Scale) -> Iterator[str]:
    variant = ENABLED if check.variant == ENABLED else BASELINE
    shape, size, fill = SHAPES[variant]
    colour = f"series-{number % NUM_COLOURS}"
    legend_y = 12 + LEGEND_STEP * number
    name = f"{check.first} / {check.second}, {check.variant}"
    yield line(0, legend_y - 4, 22, legend_y - 4, f"path {variant} {colour}")
    yield marker(shape, 11, legend_y - 4, size, f"dot {colour} {fill}")
    yield text(30, legend_y, name, "legend")
    places = {point: place for place, point in enumerate(points)}
    drawn = [
        (x(places[point]), y(math.log10(size)))
        for point, size in zip(check.points, check.curve, strict=True)
        if size and point in places
    ]
    if len(drawn) > 1:
        yield polyline(drawn, f"path {variant} {colour}")
    for at in drawn if len(points) <= 30 else drawn[:: max(1, len(drawn) // 12)]:
        yield marker(shape, *at, size, f"dot {colour} {fill}", f"{name}: {check.found}")
