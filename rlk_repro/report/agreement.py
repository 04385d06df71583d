"""Show how the log-probs of training and rollout differ: a table of counts, and two plots with logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rlk_repro.base.units import count, format_count, format_number
from rlk_repro.report.blocks import Figure, Section, Text, make_table
from rlk_repro.report.drawing import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LEGEND_STEP,
    LEGEND_Y,
    RIGHT,
    SHAPES,
    TOP,
    Scale,
    draw_powers,
    make_figure,
    marker,
    polyline,
    text,
)
from rlk_repro.report.labels import number_or_dash
from rlk_repro.report.view import View
from rlk_repro.rundir.agreement import LADDER, AgreementResult
from rlk_repro.spec.values import BASELINE, ENABLED

KEY: Final = "agreement"
TITLE: Final = "Training against rollout, token by token"


def make_agreement(view: View) -> Section:
    found = {item.variant: item for item in view.analysis.agreement}
    columns = [_describe(found[variant]) if variant in found else {} for variant in (BASELINE, ENABLED)]
    rows = [
        (name, *(column.get(name, "–") for column in columns)) for name in dict.fromkeys([*columns[0], *columns[1]])
    ]
    places = [
        f"The log-probs of {item.variant} differ most at {place.place}, position {place.position}, token {place.token}."
        for item in found.values()
        if (place := item.largest) is not None
    ]
    numbers = (BASELINE, ENABLED)
    is_folded = view.is_comparison
    table = make_table("tokens", *numbers, rows=rows, numbers=numbers, note=" ".join(places), is_folded=is_folded)
    words = [f"{item.variant}: {item.reason}" for item in found.values() if item.reason]
    about = "The table counts the tokens of scored steps by the difference between log-probs of training and rollout."
    missing = [Text(text=f"Steps without a record: {'; '.join(words)}.")] if words else []
    return Section(key=KEY, title=TITLE, blocks=(Text(text=about), table, *missing))


def _describe(item: AgreementResult) -> dict[str, str]:
    rows = {"all tokens": format_count(item.num_tokens)}
    for bound, part in zip(LADDER, item.beyond, strict=False):
        share = f"{format_count(part)} ({format_number(100 * part / item.num_tokens)} %)" if part else "0"
        rows[f"differ by more than {bound:g}" if bound else "differ at all"] = share
    return rows | {
        "without a finite log-prob": format_count(item.num_not_finite),
        "largest difference": "0" if item.largest is None else format_number(item.largest.abs_difference),
        "mean difference": number_or_dash(item.mean_abs),
        "KL estimate k1": number_or_dash(item.k1),
        "KL estimate k3": number_or_dash(item.k3),
    }


def plot_agreement(view: View) -> Iterator[Figure]:
    found = [item for item in view.analysis.agreement if item.num_tokens]
    if not found:
        return
    tokens = count(max(item.num_tokens for item in found), "token")
    shares = {item.variant: [part / item.num_tokens for part in item.beyond] for item in found}
    caption = f"Each point is the share of {tokens} whose difference exceeds the bound on the axis."
    names = ("Tokens that differ by more than a bound", "share of tokens", "bound")
    yield _draw(f"{KEY}-shares", names, caption, shares, [f"{bound:g}" for bound in LADDER])
    means = {item.variant: item.mean_by_position for item in found}
    firsts = [str(2**band - 1) for band in range(max(map(len, means.values())))]
    caption = "A point is the mean difference over a band of positions; the axis shows the first position of each band."
    names = ("Difference by position", "mean difference", "position in the response")
    yield _draw(f"{KEY}-positions", names, caption, means, firsts)


def _draw(
    key: str,
    names: tuple[str, str, str],
    caption: str,
    curves: Mapping[str, Sequence[float | None]],
    labels: Sequence[str],
) -> Figure:
    title, y_name, x_name = names
    logs = {
        variant: [(place, math.log10(value)) for place, value in enumerate(values) if value is not None and value > 0]
        for variant, values in curves.items()
    }
    heights = [height for points in logs.values() for _, height in points]
    if not heights:
        return Figure(key=key, title=title, caption=f"{title}: no token differs.")
    y = Scale(math.floor(min(heights)), max(math.floor(min(heights)) + 1, math.ceil(max(heights))), BOTTOM, TOP)
    x = Scale(-0.5, len(labels) - 0.5, LEFT, RIGHT)
    body = [*draw_powers(y, y_name), text((LEFT + RIGHT) / 2, BOTTOM + 36, x_name, "axis", "middle")]
    for place in range(0, len(labels), math.ceil(len(labels) / 9)):
        body.append(text(x(place), BOTTOM + 17, labels[place], "tick", "middle"))
    for number, (variant, points) in enumerate(logs.items()):
        drawn = [(x(place), y(height)) for place, height in points]
        body += [polyline(drawn, f"path {variant}")] if len(drawn) > 1 else []
        body += [marker(SHAPES[variant], *point, 4, f"dot {variant}") for point in drawn]
        body += [marker(SHAPES[variant], 5 + LEGEND_STEP * number, LEGEND_Y - 4, 4.5, f"dot {variant}")]
        body += [text(16 + LEGEND_STEP * number, LEGEND_Y, variant, "legend")]
    return make_figure(key, title, caption, HEIGHT, body)
