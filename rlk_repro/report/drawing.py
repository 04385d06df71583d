"""Draw SVG elements, axes and legends; the page's CSS classes give colours and fonts for light, dark and print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, TypeGuard

from rlk_repro.report.blocks import Figure
from rlk_repro.report.labels import clean
from rlk_repro.rundir.results import TrialResult

WIDTH: Final = 440
SHAPES: Final = {"baseline": "circle", "enabled": "triangle"}
LEFT: Final = 62
RIGHT: Final = WIDTH - 10
TOP: Final = 54
BOTTOM: Final = 256
HEIGHT: Final = 300
LEGEND_Y: Final = 12
LEGEND_STEP: Final = 168
UNIT_Y: Final = 30
MAX_DRAWABLE: Final = 1e300
MAX_PLAIN_POWER: Final = 4
# The left margin of a plot (LEFT) has room for a label of this many characters.
MAX_LABEL: Final = 8


def element(name: str, content: str = "", **attributes: str | float) -> str:
    """Return an element around ``content``, which is markup; the keyword ``text_anchor`` becomes ``text-anchor``."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{shown}>{content}</{name}>" if content else f"<{name}{shown}/>"


def text(x: float, y: float, content: str, class_: str = "", anchor: str = "start") -> str:
    return element("text", escape(clean(content)), x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str) -> str:
    return element("rect", x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=class_)


def polyline(points: Sequence[tuple[float, float]], class_: str) -> str:
    return element("polyline", points=" ".join(f"{_short(x)},{_short(y)}" for x, y in points), class_=class_)


def marker(shape: str, x: float, y: float, size: float, class_: str, tip: str = "") -> str:
    """Draw a circle, triangle, diamond or cross at a point; ``tip`` appears under the mouse pointer."""
    title = element("title", escape(clean(tip))) if tip else ""
    if shape == "circle":
        return element("circle", title, cx=x, cy=y, r=size, class_=class_)
    if shape == "cross":
        path = f"M{_short(x - size)} {_short(y - size)}l{_short(2 * size)} {_short(2 * size)}"
        path += f"M{_short(x - size)} {_short(y + size)}l{_short(2 * size)} {_short(-2 * size)}"
        return element("path", title, d=path, class_=class_)
    corners = {
        "triangle": ((0, -1.2), (1.15, 0.9), (-1.15, 0.9)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    }[shape]
    points = " ".join(f"{_short(x + dx * size)},{_short(y + dy * size)}" for dx, dy in corners)
    return element("polygon", title, points=points, class_=class_)


def clip(key: str, box: tuple[float, float, float, float], body: Iterable[str]) -> Iterator[str]:
    x, y, width, height = box
    yield element("clipPath", element("rect", x=x, y=y, width=width, height=height), id=f"{key}-clip")
    yield element("g", "".join(body), clip_path=f"url(#{key}-clip)")


@dataclass(frozen=True)
class Scale:
    """A linear axis: it draws the values ``low`` and ``high`` at the pixels ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """Return about ``count`` evenly spaced round values; the spacing is 1, 2, 2.5 or 5 times a power of ten."""
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def make_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """Make a scale with some space around all values.

    The axis covers at least 2 % of the largest value, so that tiny differences look tiny.
    """
    found = list(values)
    low, high = min(found), max(found)
    if 0 <= low < 0.4 * high:
        return Scale(0.0, high * 1.06, start, end)
    air = max(0.12 * (high - low), 0.01 * max(abs(low), abs(high))) or 1.0
    return Scale(low - air, high + air, start, end)


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """Format ticks with the fewest digits that show each value exactly, or with an exponent if the text is too long."""
    decimals = next((d for d in range(7) if all(math.isclose(round(t, d), t, abs_tol=1e-9) for t in ticks)), None)
    if decimals is not None and any(abs(tick) >= 1e-4 for tick in ticks):
        plain = [f"{value:,.{decimals}f}" for value in ticks]
        if all(len(label) <= MAX_LABEL for label in plain):
            return plain
    decimals = next((d for d in range(10) if all(math.isclose(float(f"{t:.{d}e}"), t) for t in ticks)), 9)
    return [_shorten_exponent(f"{value:.{decimals}e}") if value else "0" for value in ticks]


def _shorten_exponent(number: str) -> str:
    mantissa, exponent = number.split("e")
    return f"{mantissa}e{int(exponent)}"


def _attribute(value: str | float) -> str:
    return value if isinstance(value, str) else _short(value)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def make_figure(key: str, title: str, caption: str, height: float, body: Iterable[str]) -> Figure:
    """Return a drawing of ``WIDTH`` × ``height``; its ids begin with ``key``, which is unique on the page."""
    head = element("title", escape(clean(title)), id=f"{key}-title")
    head += element("desc", escape(clean(caption)), id=f"{key}-desc")
    names, box = f"{key}-title {key}-desc", f"0 0 {WIDTH} {_short(height)}"
    svg = element("svg", head + "".join(body), viewBox=box, role="img", aria_labelledby=names, class_="plot")
    return Figure(key=key, title=title, svg=svg, caption=caption)


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
        label = f"{10.0**power:g}" if abs(power) <= MAX_PLAIN_POWER else f"1e{power}"
        yield text(LEFT - 8, y(power) + 4, label, "tick", "end")
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
        left += LEGEND_STEP


def variant_class(trial: TrialResult) -> str:
    return trial.variant if trial.variant in SHAPES else "other"


def describe_start(scale: Scale) -> str:
    return "The axis starts at 0." if scale.low == 0 else "The axis does not start at 0."


def is_drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) < MAX_DRAWABLE
