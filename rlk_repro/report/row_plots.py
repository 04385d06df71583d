"""Draw the plots in which each row is a pair, a session or a module timer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.base.units import format_percent
from rlk_repro.report.basis import describe_confidence, describe_effect
from rlk_repro.report.figure import LEGEND_Y, SHAPES, Figure, draw_legend, is_drawable, make_figure, variant_class
from rlk_repro.report.labels import NOT_RECORDED
from rlk_repro.report.sections import INSIDE_NOTE, pair_ratio
from rlk_repro.report.surroundings import MODULE_PREFIX, NESTING, WHOLE_STEP
from rlk_repro.report.svg import WIDTH, Scale, format_ticks, line, marker, rect, text
from rlk_repro.report.view import View
from rlk_repro.rundir.results import Effect, PairResult, PairStatus, TrialResult
from rlk_repro.statistics.stats import to_ratio

PAIR_LEFT: Final = 92
PAIR_RIGHT: Final = WIDTH - 84
MODULE_LEFT: Final = 158
RIGHT: Final = WIDTH - 14
TOP: Final = 40
PAIR_ROW: Final = 20
MODULE_ROW: Final = 24


def plot_pairs(view: View) -> Figure:
    metric = view.primary
    label = view.label(metric).label
    key, title = "plot-pairs", f"Change of {label}, {view.analysis.unit} by {view.analysis.unit}"
    pairs = sorted(view.analysis.pairs, key=lambda pair: pair.is_control)
    ratios = {pair.pair: ratio for pair in pairs if is_drawable(ratio := pair_ratio(pair, metric))}
    if not ratios:
        return Figure(key=key, title=title, caption=f"{view.title(metric)} of {view.analysis.unit}s: {NOT_RECORDED}.")
    effect = view.analysis.effect(metric)
    blocks = _block_changes(view)
    x = _change_scale(view, list(ratios.values()), effect, [change for found in blocks.values() for change in found])
    bottom = TOP + PAIR_ROW * (len(pairs) + (effect is not None and effect.ratio is not None)) + 8
    has_control = any(pair.is_control for pair in pairs)
    axis = _change_axis(x, bottom, label, view.analysis.unit, has_control=has_control)
    body = [*_limits(view, x, bottom), *axis]
    y = TOP + PAIR_ROW / 2 + 4.0
    for pair in pairs:
        body += [marker("circle", x(change), y, 2, "dot other") for change in blocks.get(pair.pair, ())]
        body += _pair_row(pair, ratios.get(pair.pair), x, y)
        y += PAIR_ROW
    if effect is not None and effect.ratio is not None:
        body += _effect_row(effect, x, y, view.analysis.unit)
    caption = _pairs_caption(view, effect)
    return make_figure(key, title, caption, bottom + 44, body)


def _block_changes(view: View) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for block in view.analysis.blocks:
        if not block.is_control and not block.reason and block.log_ratio is not None:
            found.setdefault(block.session, []).append(100 * (to_ratio(block.log_ratio) - 1))
    return found


def _change_scale(view: View, ratios: Sequence[float], effect: Effect | None, blocks: Sequence[float]) -> Scale:
    floor = view.analysis.noise_floor.fraction or 0.0
    reach = _limit_changes(max(view.analysis.verdict.smallest_effect, floor))
    ends = [value for value in (effect.low, effect.high) if is_drawable(value)] if effect else []
    changes = [*reach, *(100 * (value - 1) for value in (*ratios, *ends)), *filter(is_drawable, blocks)]
    air = 0.06 * (max(changes) - min(changes)) or 1.0
    return Scale(min(changes) - air, max(changes) + air, PAIR_LEFT, PAIR_RIGHT)


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


def _describe_limits(fraction: float) -> str:
    low, high = _limit_changes(fraction)
    return f"{low:+.2f} % to {high:+.2f} %"


def _change_axis(x: Scale, bottom: float, label: str, unit: str, *, has_control: bool) -> Iterator[str]:
    ticks = x.ticks(6)
    for tick, shown in zip(ticks, format_ticks(ticks), strict=True):
        yield line(x(tick), TOP, x(tick), bottom, "zero" if abs(tick) < 1e-9 else "grid")
        yield text(x(tick), bottom + 17, shown if tick <= 0 else f"+{shown}", "tick", "middle")
    yield text(
        (PAIR_LEFT + PAIR_RIGHT) / 2, bottom + 36, f"change of {label}, enabled / baseline (%)", "axis", "middle"
    )
    yield marker("circle", 5, LEGEND_Y - 4, 4.5, "dot neutral")
    yield text(16, LEGEND_Y, f"comparison {unit}", "legend")
    if has_control:
        yield marker("circle", 170, LEGEND_Y - 4, 4.5, "dot hollow")
        yield text(181, LEGEND_Y, f"control {unit}", "legend")


def _pair_row(pair: PairResult, ratio: float | None, x: Scale, y: float) -> Iterator[str]:
    name = f"{pair.pair[:10]} (control)" if pair.is_control else pair.pair[:12]
    yield text(PAIR_LEFT - 10, y + 4, name, "tick", "end")
    is_counted = pair.status is PairStatus.SCORED
    if ratio is None:
        yield text(WIDTH, y + 4, pair.status.value if not is_counted else NOT_RECORDED, "tick", "end")
        return
    shape, style = ("circle", "dot hollow" if pair.is_control else "dot neutral") if is_counted else ("cross", "absent")
    tip = f"{pair.pair}: {format_percent(ratio)}{'' if is_counted else f', {pair.status}'}"
    yield marker(shape, x(100 * (ratio - 1)), y, 4.5, style, tip)
    yield text(WIDTH, y + 4, format_percent(ratio), "tick", "end")


def _effect_row(effect: Effect, x: Scale, y: float, unit: str) -> Iterator[str]:
    assert effect.ratio is not None
    yield text(PAIR_LEFT - 10, y + 4, "effect", "strong", "end")
    if effect.low is not None and effect.high is not None:
        yield line(x(100 * (effect.low - 1)), y, x(100 * (effect.high - 1)), y, "interval")
    yield marker("diamond", x(100 * (effect.ratio - 1)), y, 5, "dot neutral", describe_effect(effect, unit))
    yield text(WIDTH, y + 4, format_percent(effect.ratio), "strong", "end")


def _pairs_caption(view: View, effect: Effect | None) -> str:
    verdict, floor = view.analysis.verdict, view.analysis.noise_floor
    parts = [f"The band is the smallest effect of interest, {_describe_limits(verdict.smallest_effect)}."]
    if floor.fraction is not None:
        limits = _describe_limits(floor.fraction)
        parts.append(f"The dashed lines are the noise floor, {limits}, from {floor.n} control {view.analysis.unit}s.")
    elif not view.analysis.is_crossover:
        parts.append("The noise floor was not measured.")
    if effect is not None and effect.low is not None:
        kind = "t" if view.analysis.is_crossover else "paired t"
        interval = f"{describe_confidence(effect)} interval ({kind} on log ratios)"
        parts.append(f"The diamond is the effect over n = {effect.n} scored {view.analysis.unit}s with its {interval}.")
    if view.analysis.blocks:
        parts.append("Small dots are the blocks of a session.")
    if any(pair.status is not PairStatus.SCORED for pair in view.analysis.pairs):
        parts.append(f"A cross or a word marks a {view.analysis.unit} that does not count.")
    return " ".join(parts)


def plot_modules(view: View) -> Figure:
    key, title = "plot-modules", "Module times"
    rows = [
        (metric, _means(view, metric))
        for metric in view.metrics
        if metric.startswith(MODULE_PREFIX) and metric != WHOLE_STEP
    ]
    drawn = {trial.name: trial for _, found in rows for trial, _ in found}
    if not drawn:
        return Figure(key=key, title=title, caption=f"Module times: {NOT_RECORDED}.")
    largest = max(mean for _, found in rows for _, mean in found)
    x = Scale(0.0, largest * 1.05 or 1.0, MODULE_LEFT, RIGHT)
    bottom = TOP + MODULE_ROW * len(rows)
    body = [*_time_axis(x, bottom), *draw_legend(drawn.values())]
    for number, (metric, found) in enumerate(rows):
        body += _module_row(_name_module(view, metric), found, x, TOP + MODULE_ROW * (number + 0.5))
    caption = (
        f"A mark is one trial: the mean of its scored steps, n = {len(drawn)} trials. The axis starts at 0. {NESTING}"
    )
    if not all(view.is_comparable(metric) for metric, found in rows if found):
        caption += f" {INSIDE_NOTE}"
    return make_figure(key, title, caption, bottom + 40, body)


def _name_module(view: View, metric: str) -> str:
    return f"{view.label(metric).label}{'' if view.is_comparable(metric) else ' †'}"


def _means(view: View, metric: str) -> list[tuple[TrialResult, float]]:
    found = ((trial, trial.summary(metric)) for trial in view.analysis.trials)
    return [(trial, item.mean) for trial, item in found if item and is_drawable(item.mean)]


def _time_axis(x: Scale, bottom: float) -> Iterator[str]:
    ticks = x.ticks(6)
    for tick, label in zip(ticks, format_ticks(ticks), strict=True):
        yield line(x(tick), TOP, x(tick), bottom, "grid")
        yield text(x(tick), bottom + 17, label, "tick", "middle")
    yield text((MODULE_LEFT + RIGHT) / 2, bottom + 36, "seconds per step", "axis", "middle")


def _module_row(label: str, found: list[tuple[TrialResult, float]], x: Scale, y: float) -> Iterator[str]:
    yield text(MODULE_LEFT - 10, y + 4, label, "tick", "end")
    if not found:
        yield text(MODULE_LEFT + 6, y + 4, NOT_RECORDED, "axis")
    for trial, mean in found:
        lane = y - 4 if trial.variant == "baseline" else y + 4
        shape = SHAPES.get(trial.variant, "diamond")
        yield marker(shape, x(mean), lane, 3, f"dot {variant_class(trial)}", f"{trial.name}: {mean:.4g} s")
