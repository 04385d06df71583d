"""Draw the plots of a report as SVG, each with a caption; a plot without data becomes a sentence.

Baseline is a circle and a solid line; enabled is a triangle and a dashed line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.base.units import group
from rlk_repro.report.agreement import plot_agreement
from rlk_repro.report.checks import plot_drift
from rlk_repro.report.figure import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    SHAPES,
    TOP,
    Figure,
    describe_absence,
    describe_start,
    draw_legend,
    draw_y_axis,
    is_drawable,
    make_figure,
    variant_class,
)
from rlk_repro.report.labels import NOT_RECORDED, headline_value
from rlk_repro.report.operator_plots import plot_speedups
from rlk_repro.report.row_plots import plot_modules, plot_pairs
from rlk_repro.report.svg import Scale, clip, line, make_scale, marker, polyline, rect, text
from rlk_repro.report.view import View
from rlk_repro.rundir.results import Series, Summary, TrialResult, TrialStatus
from rlk_repro.statistics.stats import ABS_DIFF, PEAK_MEMORY, STEP_TIME

MANY: Final = 40
MAX_TICK_LABELS: Final = 10
PASSES_MEMORY: Final = "peak_memory_in_forward_only_bytes"


def make_figures(view: View) -> tuple[Figure, ...]:
    if view.analysis.microbatches:
        return plot_steps(view, PEAK_MEMORY), plot_steps(view, PASSES_MEMORY)
    if not view.is_comparison:
        return (*plot_drift(view), *plot_agreement(view), *plot_speedups(view))
    of_trials = [STEP_TIME, "tokens_per_s" if "tokens_per_s" in view.metrics else PASSES_MEMORY, PEAK_MEMORY]
    # both variants of a session train one policy, so their rewards are not compared
    compared = (ABS_DIFF,) if view.analysis.is_crossover else ("raw_reward", ABS_DIFF)
    of_steps = [STEP_TIME, *(metric for metric in compared if metric in view.metrics)]
    trials = [plot_trials(view, metric) for metric in of_trials]
    steps = [plot_steps(view, metric) for metric in of_steps]
    rest = (*trials[1:], *steps[1:], *plot_agreement(view))
    return (plot_pairs(view), trials[0], steps[0], plot_modules(view), *rest)


def plot_trials(view: View, metric: str) -> Figure:
    is_peak = metric.startswith("peak_")
    key, title = f"plot-trials-{metric}", f"{view.title(metric)}, every trial"
    found = [(place, trial, trial.summary(metric)) for place, trial in enumerate(view.analysis.trials)]
    points = [
        (place, trial, item) for place, trial, item in found if item and all(map(is_drawable, _spread(metric, item)))
    ]
    if not points:
        return Figure(key=key, title=title, caption=f"{view.title(metric)}: {NOT_RECORDED}.")
    y = make_scale(
        (view.numbers.scale(metric, end) for *_, item in points for end in _spread(metric, item)), BOTTOM, TOP
    )
    x = Scale(-0.5, len(found) - 0.5, LEFT, RIGHT)
    drawn = [trial for _, trial, _ in points]
    body = [*draw_y_axis(y, view.name_with_unit(metric)), *draw_legend(drawn), *_pair_axis(view, x)]
    for place, trial, summary in points:
        body += _draw_trial(view, metric, x(place), y, trial, summary)
    drawn_places = {place for place, *_ in points}
    absent = [(place, trial) for place, trial, _ in found if place not in drawn_places]
    body += [marker("cross", x(place), BOTTOM - 8, 4, "absent", describe_absence(trial)) for place, trial in absent]
    steps = sorted({summary.n for _, _, summary in points})
    what = "A point is the highest value of a trial's steps; its line reaches down to the lowest." if is_peak else (
        "A point is the mean of a trial's scored steps; the line is ± 1 standard deviation of these steps."
    )  # fmt: skip
    caption = (
        f"{what} n = {len(points)} trials of {' or '.join(map(str, steps))} scored steps. "
        f"{describe_start(y)}{' A cross is a trial without a value.' if absent else ''}"
    )
    return make_figure(key, title, caption, HEIGHT, body)


def _draw_trial(view: View, metric: str, x: float, y: Scale, trial: TrialResult, summary: Summary) -> list[str]:
    value = headline_value(metric, summary)
    low, high = (y(view.numbers.scale(metric, end)) for end in _spread(metric, summary))
    size = 4.5 if len(view.analysis.trials) <= MANY else 2.5
    tip = f"{trial.name}: {view.numbers.format(metric, value)} {view.label(metric).unit}"
    shape = SHAPES.get(trial.variant, "diamond")
    return [
        line(x, low, x, high, f"whisker {variant_class(trial)}"),
        marker(shape, x, y(view.numbers.scale(metric, value)), size, f"dot {variant_class(trial)}", tip),
    ]


def _spread(metric: str, summary: Summary) -> tuple[float, float]:
    if metric.startswith("peak_"):
        return summary.minimum, summary.maximum
    spread = summary.stdev or 0.0
    return summary.mean - spread, summary.mean + spread


def _pair_axis(view: View, x: Scale) -> Iterator[str]:
    places = group((trial.pair, place) for place, trial in enumerate(view.analysis.trials))
    stride = math.ceil(len(places) / MAX_TICK_LABELS)
    for number, (pair, found) in enumerate(places.items()):
        if number % 2:
            left, right = x(found[0] - 0.5), x(found[-1] + 0.5)
            yield rect(left, TOP, right - left, BOTTOM - TOP, "band")
        if number % stride == 0:
            yield text((x(found[0]) + x(found[-1])) / 2, BOTTOM + 17, pair[:12], "tick", "middle")
    yield text((LEFT + RIGHT) / 2, BOTTOM + 36, f"{view.analysis.unit}s, in the order they ran", "axis", "middle")


def plot_steps(view: View, metric: str) -> Figure:
    key, title = f"plot-steps-{metric}", f"{view.title(metric)} over the steps"
    found = [(trial, series) for trial in view.analysis.trials if (series := trial.get_series(metric)) is not None]
    values = [view.numbers.scale(metric, value) for _, series in found for value in series.values if is_drawable(value)]
    summaries = [summary for trial, _ in found if (summary := trial.summary(metric)) is not None]
    ends = [end for summary in summaries for end in (summary.minimum, summary.maximum) if is_drawable(end)]
    scored = [view.numbers.scale(metric, end) for end in ends]
    if not values:
        return Figure(key=key, title=title, caption=f"{view.title(metric)}: {NOT_RECORDED}.")
    num_steps = max(len(series.values) for _, series in found)
    x, y = Scale(-0.5, num_steps - 0.5, LEFT, RIGHT), make_scale(scored or values, BOTTOM, TOP)
    body = [*_warmup(view, x), *draw_y_axis(y, view.name_with_unit(metric)), *_step_axis(x, num_steps)]
    body += draw_legend([trial for trial, _ in found], is_line=True)
    curves = [shape for trial, series in found for shape in _draw_series(view, metric, x, y, trial, series)]
    body += clip(key, (LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP), curves)
    caption = (
        f"A line is one trial, n = {len(found)} trials; nothing is averaged or smoothed. "
        f"{'The shaded warm-up steps are not scored. ' if view.analysis.num_warmup_steps else ''}{describe_start(y)}"
    )
    if any(trial.status is not TrialStatus.OK for trial, _ in found):
        caption += " A cross marks where a trial ended early."
    if not y.low <= min(values) <= max(values) <= y.high:
        what = "Unscored" if view.analysis.is_crossover else "Warm-up"
        caption += f" {what} steps with values beyond the axis are not shown."
    return make_figure(key, title, caption, HEIGHT, body)


def _warmup(view: View, x: Scale) -> Iterator[str]:
    if num := view.analysis.num_warmup_steps:
        yield rect(LEFT, TOP, min(x(num - 0.5), RIGHT) - LEFT, BOTTOM - TOP, "warmup")


def _step_axis(x: Scale, num_steps: int) -> Iterator[str]:
    ticks = [tick for tick in Scale(0, max(1, num_steps - 1), 0, 1).ticks(6) if tick == int(tick)]
    for tick in ticks:
        yield text(x(tick), BOTTOM + 17, f"{tick:.0f}", "tick", "middle")
    yield text((LEFT + RIGHT) / 2, BOTTOM + 36, "step", "axis", "middle")


def _draw_series(view: View, metric: str, x: Scale, y: Scale, trial: TrialResult, series: Series) -> Iterator[str]:
    stretch: list[tuple[float, float]] = []
    last: tuple[float, float] | None = None
    for step, value in enumerate((*series.values, None)):
        if is_drawable(value):
            last = (x(step), y(view.numbers.scale(metric, value)))
            stretch.append(last)
        elif stretch:
            yield _draw_stretch(stretch, trial)
            stretch = []
    if last is not None and trial.status is not TrialStatus.OK:
        yield marker("cross", *last, 4, "absent", describe_absence(trial))


def _draw_stretch(points: Sequence[tuple[float, float]], trial: TrialResult) -> str:
    if len(points) == 1:
        return marker(SHAPES.get(trial.variant, "diamond"), *points[0], 2, f"dot {variant_class(trial)}")
    return polyline(points, f"path {variant_class(trial)}")
