"""Draw the change of each pair or session, and the effect with its interval below them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.base.units import format_change, format_interval, group
from rlk_repro.report.basis import describe_confidence, describe_effect
from rlk_repro.report.blocks import Figure
from rlk_repro.report.drawing import (
    LEGEND_STEP,
    LEGEND_Y,
    WIDTH,
    Scale,
    format_ticks,
    is_drawable,
    line,
    make_figure,
    marker,
    rect,
    text,
)
from rlk_repro.report.labels import NOT_RECORDED
from rlk_repro.report.results import pair_ratio
from rlk_repro.report.view import View
from rlk_repro.rundir.results import Effect, PairResult, PairStatus
from rlk_repro.statistics.stats import to_ratio

LEFT: Final = 86
RIGHT: Final = WIDTH - 70
TOP: Final = 40
ROW: Final = 20


def plot_pairs(view: View) -> Figure:
    metric, unit = view.primary, view.analysis.unit
    label = view.metric(metric).label
    key, title = "plot-pairs", f"Change of {label}, {unit} by {unit}"
    pairs = sorted(view.analysis.pairs, key=lambda pair: pair.is_control)
    ratios = {pair.pair: ratio for pair in pairs if is_drawable(ratio := pair_ratio(pair, metric))}
    if not ratios:
        return Figure(key=key, title=title, caption=f"{view.metric(metric).title} of {unit}s: {NOT_RECORDED}.")
    effect = view.analysis.effect(metric)
    blocks = _block_changes(view)
    x = _change_scale(view, list(ratios.values()), effect, [change for found in blocks.values() for change in found])
    bottom = TOP + ROW * (len(pairs) + (effect is not None and effect.ratio is not None)) + 8
    body = [*_limits(view, x, bottom), *_draw_axis(x, bottom, label)]
    body += [marker("circle", 5, LEGEND_Y - 4, 4.5, "dot neutral"), text(16, LEGEND_Y, f"comparison {unit}")]
    if any(pair.is_control for pair in pairs):
        body.append(marker("circle", 5 + LEGEND_STEP, LEGEND_Y - 4, 4.5, "dot hollow"))
        body.append(text(16 + LEGEND_STEP, LEGEND_Y, f"control {unit}"))
    y = TOP + ROW / 2 + 4.0
    for pair in pairs:
        body += [marker("circle", x(change), y, 2, "dot other") for change in blocks.get(pair.pair, ())]
        body += _pair_row(pair, ratios.get(pair.pair), x, y)
        y += ROW
    if effect is not None and effect.ratio is not None:
        body += _effect_row(effect, x, y, unit)
    return make_figure(key, title, _describe(view, effect), bottom + 44, body)


def _block_changes(view: View) -> dict[str, list[float]]:
    counted = [block for block in view.analysis.blocks if not block.is_control and not block.reason]
    return group(
        (block.session, 100 * (to_ratio(block.log_ratio) - 1)) for block in counted if block.log_ratio is not None
    )


def _change_scale(view: View, ratios: Sequence[float], effect: Effect | None, blocks: Sequence[float]) -> Scale:
    floor = view.analysis.noise_floor.fraction or 0.0
    reach = _limit_changes(max(view.analysis.verdict.smallest_effect, floor))
    ends = [value for value in (effect.low, effect.high) if is_drawable(value)] if effect else []
    changes = [*reach, *(100 * (value - 1) for value in (*ratios, *ends)), *filter(is_drawable, blocks)]
    air = 0.06 * (max(changes) - min(changes)) or 1.0
    return Scale(min(changes) - air, max(changes) + air, LEFT, RIGHT)


def _limits(view: View, x: Scale, bottom: float) -> Iterator[str]:
    low, high = _limit_changes(view.analysis.verdict.smallest_effect)
    yield rect(x(low), TOP, x(high) - x(low), bottom - TOP, "warmup")
    floor = view.analysis.noise_floor
    if floor.fraction is not None:
        for end in _limit_changes(floor.fraction):
            yield line(x(end), TOP, x(end), bottom, "floor")


def _limit_changes(fraction: float) -> tuple[float, float]:
    """Return the ratios 1 / (1 + fraction) and 1 + fraction as changes in percent: the limits of a band around 0."""
    return 100 * (1 / (1 + fraction) - 1), 100 * fraction


def _draw_axis(x: Scale, bottom: float, label: str) -> Iterator[str]:
    ticks = x.ticks(6)
    for tick, shown in zip(ticks, format_ticks(ticks), strict=True):
        yield line(x(tick), TOP, x(tick), bottom, "zero" if abs(tick) < 1e-9 else "grid")
        yield text(x(tick), bottom + 17, shown if tick <= 0 else f"+{shown}", "tick", "middle")
    yield text((LEFT + RIGHT) / 2, bottom + 36, f"change of {label}, enabled / baseline (%)", "axis", "middle")


def _pair_row(pair: PairResult, ratio: float | None, x: Scale, y: float) -> Iterator[str]:
    name = f"{pair.pair[:10]} (control)" if pair.is_control else pair.pair[:12]
    yield text(LEFT - 10, y + 4, name, "tick", "end")
    is_counted = pair.status is PairStatus.SCORED
    if ratio is None:
        yield text(WIDTH, y + 4, pair.status.value if not is_counted else NOT_RECORDED, "tick", "end")
        return
    shape, style = ("circle", "dot hollow" if pair.is_control else "dot neutral") if is_counted else ("cross", "absent")
    tip = f"{pair.pair}: {format_change(ratio)}{'' if is_counted else f', {pair.status}'}"
    yield marker(shape, x(100 * (ratio - 1)), y, 4.5, style, tip)
    yield text(WIDTH, y + 4, format_change(ratio), "tick", "end")


def _effect_row(effect: Effect, x: Scale, y: float, unit: str) -> Iterator[str]:
    assert effect.ratio is not None
    yield text(LEFT - 10, y + 4, "effect", "strong", "end")
    if effect.low is not None and effect.high is not None:
        yield line(x(100 * (effect.low - 1)), y, x(100 * (effect.high - 1)), y, "interval")
    yield marker("diamond", x(100 * (effect.ratio - 1)), y, 5, "dot neutral", describe_effect(effect, unit))
    yield text(WIDTH, y + 4, format_change(effect.ratio), "strong", "end")


def _describe(view: View, effect: Effect | None) -> str:
    verdict, floor, unit = view.analysis.verdict, view.analysis.noise_floor, view.analysis.unit
    smallest = verdict.smallest_effect
    limits = format_interval(1 / (1 + smallest), 1 + smallest)
    parts = [f"The band is the smallest effect of interest, {limits}."]
    if floor.fraction is not None:
        limits = format_interval(1 / (1 + floor.fraction), 1 + floor.fraction)
        parts.append(f"The dashed lines are the noise floor, {limits}, from {floor.n} control {unit}s.")
    elif not view.analysis.is_crossover:
        parts.append("The noise floor was not measured.")
    if effect is not None and effect.low is not None:
        interval = f"{describe_confidence(effect)} interval (t on log ratios)"
        parts.append(f"The diamond is the effect over n = {effect.n} scored {unit}s with its {interval}.")
    if view.analysis.blocks:
        parts.append("Small dots are the blocks of a session.")
    if any(pair.status is not PairStatus.SCORED for pair in view.analysis.pairs):
        parts.append(f"A cross or a word marks a {unit} that does not count.")
    return " ".join(parts)
