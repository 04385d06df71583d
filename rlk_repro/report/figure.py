"""Define a figure, and draw the parts that all plots have: axes, legend and the sentences of a caption."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeGuard

from rlk_repro.report.svg import WIDTH, Scale, document, format_ticks, line, marker, text
from rlk_repro.rundir.results import TrialResult

SHAPES: Final = {"baseline": "circle", "enabled": "triangle"}
LEFT: Final = 66
RIGHT: Final = WIDTH - 10
TOP: Final = 50
BOTTOM: Final = 256
HEIGHT: Final = 300
LEGEND_Y: Final = 12
UNIT_Y: Final = 36
MAX_DRAWABLE: Final = 1e300


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A plot with its caption; where ``svg`` is empty, nothing was drawn and the caption says what is missing."""

    key: str
    title: str
    svg: str = ""
    caption: str


def make_figure(key: str, title: str, caption: str, height: float, body: Iterable[str]) -> Figure:
    return Figure(key=key, title=title, svg=document(key, height, title, caption, body), caption=caption)


def draw_y_axis(y: Scale, name: str) -> Iterator[str]:
    ticks = y.ticks(5)
    for tick, label in zip(ticks, format_ticks(ticks), strict=True):
        yield line(LEFT, y(tick), RIGHT, y(tick), "grid")
        yield text(LEFT - 8, y(tick) + 4, label, "tick", "end")
    yield text(0, UNIT_Y, name, "axis")


def draw_powers(y: Scale, name: str, unit_y: float = UNIT_Y) -> Iterator[str]:
    """Draw a logarithmic axis with its name; ``y`` converts an exponent of ten to a pixel."""
    for power in range(int(y.low), int(y.high) + 1, max(1, math.ceil((y.high - y.low) / 8))):
        yield line(LEFT, y(power), RIGHT, y(power), "grid")
        yield text(LEFT - 8, y(power) + 4, "1" if power == 0 else f"1e{power}", "tick", "end")
    yield text(0, unit_y, name, "axis")


def draw_legend(trials: Iterable[TrialResult], *, is_line: bool = False) -> Iterator[str]:
    found = list(trials)
    left = 5.0
    for variant, shape in SHAPES.items():
        n = sum(trial.variant == variant for trial in found)
        if not n:
            continue
        if is_line:
            yield line(left - 5, LEGEND_Y - 4, left + 15, LEGEND_Y - 4, f"path {variant}")
        else:
            yield marker(shape, left, LEGEND_Y - 4, 4.5, f"dot {variant}")
        yield text(left + (21 if is_line else 11), LEGEND_Y, f"{variant} (n = {n})", "legend")
        left += 165


def variant_class(trial: TrialResult) -> str:
    return trial.variant if trial.variant in SHAPES else "other"


def describe_start(scale: Scale) -> str:
    return "The axis starts at 0." if scale.low == 0 else "The axis does not start at 0."


def describe_absence(trial: TrialResult) -> str:
    return f"{trial.name}: {trial.status}{f', {trial.reason}' if trial.reason else ''}"


def is_drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) < MAX_DRAWABLE
