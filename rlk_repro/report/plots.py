"""Draw the plots of a report as SVG, each with a caption; a plot without data becomes a sentence that says why.

Baseline is a circle and a solid line; enabled is a triangle and a dashed line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from rlk_repro.report.blocks import Figure
from rlk_repro.report.checks import plot_drift
from rlk_repro.report.drawing import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    SHAPES,
    TOP,
    Scale,
    clip,
    describe_start,
    draw_legend,
    draw_y_axis,
    is_drawable,
    make_figure,
    make_scale,
    marker,
    polyline,
    rect,
    text,
    variant_class,
)
from rlk_repro.report.forest import Drawn, draw_values
from rlk_repro.report.labels import NOT_RECORDED, headline_value
from rlk_repro.report.stack import plot_parts
from rlk_repro.report.view import View
from rlk_repro.rundir.results import GateStatus, Series, TrialResult
from rlk_repro.schedule import SHADOW, Schedule, make_schedule
from rlk_repro.statistics.stats import ABS_DIFF, PEAK_MEMORY, RAW_REWARD, STEP_TIME

PASSES_MEMORY: Final = "peak_memory_in_forward_only_bytes"
ONE_POLICY: Final = "Both variants of a session train one policy in turn, so their values are one curve."


def make_figures(view: View) -> tuple[Figure, ...]:
    if view.analysis.microbatches:
        return plot_steps(view, PEAK_MEMORY), plot_steps(view, PASSES_MEMORY)
    if not view.is_comparison:
        return tuple(plot_drift(view))
    return (
        plot_trials(view, STEP_TIME),
        plot_steps(view, STEP_TIME),
        plot_parts(view),
        plot_trials(view, PEAK_MEMORY),
        plot_steps(view, RAW_REWARD),
        plot_steps(view, ABS_DIFF),
    )


def _explain_absence(view: View, metric: str) -> Figure:
    """Say why a plot is missing, in the words of the metric's gate."""
    gate = next((gate for gate in view.analysis.gates if gate.name == metric), None)
    is_told = gate is not None and gate.status is GateStatus.NOT_APPLICABLE
    why = f"not compared, because {gate.detail}" if gate is not None and is_told else NOT_RECORDED
    title = view.metric(metric).title
    return Figure(key=f"plot-steps-{metric}", title=title, caption=f"{title}: {why}.")


def plot_trials(view: View, metric: str) -> Figure:
    """Draw one row per trial: a mean with its standard deviation, or the highest value with the range below it."""
    is_peak, label = metric.startswith("peak_"), view.metric(metric)
    key, title = f"plot-trials-{metric}", f"{label.title if is_peak else f'Mean {label.label}'}, every trial"
    rows, steps = [], set()
    for trial in view.analysis.trials:
        item = trial.summary(metric)
        if item is None or not is_drawable(item.maximum):
            continue
        spread = item.stdev or 0.0
        ends = (item.minimum, item.maximum) if is_peak else (item.mean - spread, item.mean + spread)
        low, high = map(label.scale, ends)
        value, shape = headline_value(metric, item), SHAPES.get(trial.variant, "diamond")
        name, style = f"{trial.pair[:6]} {trial.variant}", f"dot {variant_class(trial)}"
        shown = label.show(value)
        rows.append(
            Drawn(name=name, value=label.scale(value), low=low, high=high, shape=shape, style=style, text=shown)
        )
        steps.add(item.n)
    if not rows:
        return Figure(key=key, title=title, caption=f"{label.title}: {NOT_RECORDED}.")
    what = "A mark is the highest value of a trial's steps; its line reaches down to the lowest."
    if not is_peak:
        what = "A mark is the mean of a trial's scored steps; the line is ± 1 standard deviation of these steps."
    number = f"n = {len(rows)} trials of {' or '.join(map(str, sorted(steps)))} scored steps"
    return draw_values(rows, key, title, f"{what} {number}.", label.named)


def plot_steps(view: View, metric: str) -> Figure:
    """Draw a metric over the steps: a line per trial, or one per session if both variants train one policy."""
    key, title = f"plot-steps-{metric}", f"{view.metric(metric).title} over the steps"
    found = [(trial, series) for trial in view.analysis.trials if (series := trial.get_series(metric)) is not None]
    values = [view.metric(metric).scale(value) for _, series in found for value in series.values if is_drawable(value)]
    is_stored = metric == RAW_REWARD and view.analysis.lane != "live"
    if not values or is_stored:
        return _explain_absence(view, metric)
    summaries = [summary for trial, _ in found if (summary := trial.summary(metric)) is not None]
    ends = [end for summary in summaries for end in (summary.minimum, summary.maximum) if is_drawable(end)]
    y = make_scale([view.metric(metric).scale(end) for end in ends] or values, BOTTOM, TOP)
    num_steps = max(len(series.values) for _, series in found)
    x = Scale(-0.5, num_steps - 0.5, LEFT, RIGHT)
    is_one_policy = view.analysis.is_crossover and metric in {RAW_REWARD, ABS_DIFF}
    areas = list(_list_areas(view))
    body = []
    for first, last, name in areas:
        left, right = x(first - 0.5), min(x(last + 0.5), RIGHT)
        body.append(rect(left, TOP, right - left, BOTTOM - TOP, "warmup"))
        body.append(text(min((left + right) / 2, RIGHT - 20), TOP - 5, name, "tick", "middle"))
    body += [*draw_y_axis(y, view.metric(metric).named), *_step_axis(x, num_steps)]
    body += draw_legend([trial for trial, _ in found], is_line=not is_one_policy)
    curves: list[str] = []
    if is_one_policy:
        curves += _draw_sessions(view, metric, x, y, [series for _, series in found])
    for trial, series in found:
        curves += _draw_series(view, metric, x, y, trial, series, is_marked=is_one_policy)
    body += clip(key, (LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP), curves)
    parts = [f"A line is one trial, n = {len(found)} trials; nothing is averaged or smoothed.", describe_start(y)]
    if is_one_policy:
        parts[0] = f"{ONE_POLICY} Circles are baseline, triangles are enabled."
    if areas:
        parts.append(f"The shaded steps are not compared: {', '.join(dict.fromkeys(name for *_, name in areas))}.")
    if not y.low <= min(values) <= max(values) <= y.high:
        what = "Unscored" if view.analysis.is_crossover else "Warm-up"
        parts.append(f"{what} steps with values beyond the axis are not shown.")
    return make_figure(key, title, " ".join(parts), HEIGHT, body)


def _list_areas(view: View) -> Iterator[tuple[int, int, str]]:
    """Yield the first and the last step of each stretch that is not compared, and what it is."""
    plan = view.context.plan
    if plan is None or not view.analysis.is_crossover:
        if num := view.analysis.num_warmup_steps:
            yield 0, num - 1, "warm-up"
        return
    schedules = [make_schedule(plan.run.measure, trial.seed) for trial in plan.trials]
    names = [_name_steps(schedule) for schedule in schedules]
    first = 0
    for name, steps in groupby(names[0] if all(item == names[0] for item in names) else ()):
        length = len(list(steps))
        if name:
            yield first, first + length - 1, name
        first += length


def _name_steps(schedule: Schedule) -> list[str]:
    names = []
    for rollout in schedule.rollouts:
        if rollout.letter == SHADOW:
            names.append("shadow")
        elif rollout.block is None:
            names.append("warm-up")
        else:
            names.append("control" if schedule.blocks[rollout.block].is_control else "")
    return names


def _step_axis(x: Scale, num_steps: int) -> Iterator[str]:
    ticks = [tick for tick in Scale(0, max(1, num_steps - 1), 0, 1).ticks(6) if tick == int(tick)]
    for tick in ticks:
        yield text(x(tick), BOTTOM + 17, f"{tick:.0f}", "tick", "middle")
    yield text((LEFT + RIGHT) / 2, BOTTOM + 36, "step", "axis", "middle")


def _draw_sessions(view: View, metric: str, x: Scale, y: Scale, found: Sequence[Series]) -> Iterator[str]:
    """Draw one line per session through the steps of both variants, each of which has the other's steps empty."""
    for first, second in zip(found[::2], found[1::2], strict=False):
        values = [b if a is None else a for a, b in zip(first.values, second.values, strict=False)]
        points = [
            (x(step), y(view.metric(metric).scale(value))) for step, value in enumerate(values) if is_drawable(value)
        ]
        yield polyline(points, "path other")


def _draw_series(
    view: View, metric: str, x: Scale, y: Scale, trial: TrialResult, series: Series, *, is_marked: bool = False
) -> Iterator[str]:
    stretch: list[tuple[float, float]] = []
    for step, value in enumerate((*series.values, None)):
        if is_drawable(value):
            stretch.append((x(step), y(view.metric(metric).scale(value))))
        elif stretch:
            yield from _draw_stretch(stretch, trial, is_marked=is_marked)
            stretch = []


def _draw_stretch(points: Sequence[tuple[float, float]], trial: TrialResult, *, is_marked: bool) -> Iterator[str]:
    if is_marked or len(points) == 1:
        shape = SHAPES.get(trial.variant, "diamond")
        yield from (marker(shape, *point, 2.2, f"dot {variant_class(trial)}") for point in points)
    else:
        yield polyline(points, f"path {variant_class(trial)}")
