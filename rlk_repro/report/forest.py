"""Draw values with their intervals, one row below the other: of pairs or sessions, trials, machines, or bundles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rlk_repro.base.units import format_change, format_interval, group
from rlk_repro.report.basis import describe_confidence
from rlk_repro.report.blocks import Figure
from rlk_repro.report.drawing import (
    WIDTH,
    Scale,
    describe_start,
    element,
    format_ticks,
    is_drawable,
    line,
    make_figure,
    make_scale,
    marker,
    rect,
    text,
)
from rlk_repro.report.labels import NOT_RECORDED
from rlk_repro.report.results import pair_ratio
from rlk_repro.report.view import View
from rlk_repro.rundir.results import Effect, PairResult, PairStatus
from rlk_repro.statistics.stats import to_ratio

RIGHT: Final = WIDTH - 78
TOP: Final = 10
ROW: Final = 20
LETTER: Final = 8
NARROW_LEFT: Final = 114
WIDE_LEFT: Final = 140
CELL: Final = 128
MARGIN: Final = 6
EFFECT: Final = "effect"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A row: a value with its interval, the values of its blocks, and what stands at the right end."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    blocks: tuple[float, ...] = ()
    shape: str = "diamond"
    style: str = "dot neutral"
    text: str = ""

    @property
    def ends(self) -> list[float]:
        return [value for value in (self.low, self.value, self.high, *self.blocks) if is_drawable(value)]


def plot_pairs(view: View) -> Figure:
    metric, unit = view.primary, view.analysis.unit
    label = view.metric(metric).label
    key, title = "plot-pairs", f"Change of {label}, {unit} by {unit}"
    blocks = group(
        (block.session, _to_percent(to_ratio(block.log_ratio)))
        for block in view.analysis.blocks
        if block.log_ratio is not None and not block.is_control and not block.reason
    )
    pairs = sorted(view.analysis.pairs, key=lambda pair: pair.is_control)
    rows = [_make_pair_row(pair, pair_ratio(pair, metric), blocks.get(pair.pair, [])) for pair in pairs]
    if not any(row.ends for row in rows):
        return Figure(key=key, title=title, caption=f"{view.metric(metric).title} of {unit}s: {NOT_RECORDED}.")
    effect = view.analysis.effect(metric)
    if effect is not None and effect.ratio is not None:
        rows.append(make_change(EFFECT, effect.ratio, effect.low, effect.high))
    limits = [view.analysis.verdict.smallest_effect, view.analysis.noise_floor.fraction]
    return draw_changes(rows, key, title, _describe(view, effect), label=label, left=NARROW_LEFT, limits=limits)


def _make_pair_row(pair: PairResult, ratio: float | None, blocks: Sequence[float]) -> Drawn:
    name = f"{pair.pair[:10]} (control)" if pair.is_control else pair.pair[:12]
    value = None if ratio is None else _to_percent(ratio)
    if pair.status is not PairStatus.SCORED:
        return Drawn(name=name, value=value, shape="cross", style="absent", text=pair.status.value)
    style = "dot hollow" if pair.is_control else "dot neutral"
    shown = NOT_RECORDED if ratio is None else format_change(ratio)
    return Drawn(name=name, value=value, blocks=tuple(blocks), shape="circle", style=style, text=shown)


def _to_percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def make_change(name: str, ratio: float | None, low: float | None, high: float | None) -> Drawn:
    """Make the row of a ratio with its interval, drawn as changes in percent."""
    value, low, high = (None if end is None else _to_percent(end) for end in (ratio, low, high))
    return Drawn(name=name, value=value, low=low, high=high, text="" if ratio is None else format_change(ratio))


def draw_changes(
    rows: Sequence[Drawn],
    key: str,
    title: str,
    caption: str,
    *,
    label: str = "step time",
    left: int = WIDE_LEFT,
    limits: Sequence[float | None] = (),
) -> Figure:
    """Draw changes in percent; around 0 lie a band up to the first and dashed lines at the second of ``limits``."""
    reach = [_to_percent(end) for limit in limits if limit is not None for end in (1 / (1 + limit), 1 + limit)]
    ends = [0.0, *reach, *(end for row in rows for end in row.ends)]
    air = 0.06 * (max(ends) - min(ends)) or 1.0
    x = Scale(min(ends) - air, max(ends) + air, left, RIGHT)
    places = x.ticks(6)
    ticks = [
        (tick, shown if tick <= 0 else f"+{shown}") for tick, shown in zip(places, format_ticks(places), strict=True)
    ]
    return _draw(rows, key, title, caption, x, ticks, f"change of {label}, enabled / baseline (%)", reach)


def draw_values(rows: Sequence[Drawn], key: str, title: str, caption: str, axis: str) -> Figure:
    x = make_scale([end for row in rows for end in row.ends], NARROW_LEFT, RIGHT)
    ticks = list(zip(x.ticks(4), format_ticks(x.ticks(4)), strict=True))
    return _draw(rows, key, title, f"{caption} {describe_start(x)}", x, ticks, axis)


def _draw(
    rows: Sequence[Drawn],
    key: str,
    title: str,
    caption: str,
    x: Scale,
    ticks: Sequence[tuple[float, str]],
    axis: str,
    reach: Sequence[float] = (),
) -> Figure:
    bottom = TOP + ROW * len(rows) + 8
    body = [rect(x(reach[0]), TOP, x(reach[1]) - x(reach[0]), bottom - TOP, "warmup")] if reach else []
    body += [line(x(end), TOP, x(end), bottom, "floor") for end in reach[2:]]
    for tick, label in ticks:
        body.append(line(x(tick), TOP, x(tick), bottom, "zero" if abs(tick) < 1e-9 else "grid"))
        body.append(text(x(tick), bottom + 17, label, "tick", "middle"))
    body.append(text(WIDTH, bottom + 36, axis, "axis", "end"))
    for number, row in enumerate(rows):
        body += _draw_row(row, x, TOP + ROW * (number + 0.5) + 4)
    return make_figure(key, title, caption, bottom + 44, body)


def _draw_row(row: Drawn, x: Scale, y: float) -> Iterator[str]:
    style = "strong" if row.name == EFFECT else "tick"
    yield text(x.start - 10, y + 4, row.name[: int(x.start - 10) // LETTER], style, "end")
    yield from (marker("circle", x(block), y, 2, "dot other") for block in row.blocks if is_drawable(block))
    yield from _draw_mark(row, x, y)
    yield text(WIDTH, y + 4, row.text, style, "end")


def _draw_mark(row: Drawn, x: Scale, y: float) -> Iterator[str]:
    if is_drawable(row.low) and is_drawable(row.high):
        yield line(x(row.low), y, x(row.high), y, "interval")
    if is_drawable(row.value):
        yield marker(row.shape, x(row.value), y, 4.5, row.style, f"{row.name}: {row.text}" if row.name else "")


def make_cell_scale(effects: Sequence[Effect]) -> Scale:
    """Return one scale for the small drawings of a table's column."""
    ends = [_to_percent(end) for item in effects for end in (item.low, item.ratio, item.high) if is_drawable(end)]
    return Scale(min(0.0, *ends), max(0.0, *ends), MARGIN, CELL - MARGIN)


def draw_cell(effect: Effect, x: Scale) -> str:
    """Draw a change with its interval and a line at 0, for a cell of a table."""
    row = make_change("", effect.ratio, effect.low, effect.high)
    body = [line(x(0.0), 0, x(0.0), ROW, "zero"), *_draw_mark(row, x, ROW / 2)]
    return element("svg", "".join(body), viewBox=f"0 0 {CELL} {ROW}", aria_hidden="true", class_="plot small")


def _describe(view: View, effect: Effect | None) -> str:
    smallest, floor, unit = view.analysis.verdict.smallest_effect, view.analysis.noise_floor, view.analysis.unit
    parts = [f"The band is the smallest effect of interest, {format_interval(1 / (1 + smallest), 1 + smallest)}."]
    if floor.fraction is not None:
        limits = format_interval(1 / (1 + floor.fraction), 1 + floor.fraction)
        parts.append(f"The dashed lines are the noise floor, {limits}, from {floor.n} control {unit}s.")
    if effect is not None and effect.low is not None:
        interval = f"{describe_confidence(effect)} interval (t on log ratios)"
        parts.append(f"The diamond is the effect over n = {effect.n} scored {unit}s with its {interval}.")
    if any(pair.is_control for pair in view.analysis.pairs):
        parts.append(f"An open circle is a control {unit}.")
    if view.analysis.blocks:
        parts.append("Small dots are the blocks of a session.")
    if any(pair.status is not PairStatus.SCORED for pair in view.analysis.pairs):
        parts.append(f"A cross or a word marks a {unit} that does not count.")
    return " ".join(parts)
