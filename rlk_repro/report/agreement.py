"""Show how the log-probs of training and rollout differ: a table of counts, and two plots with logarithmic axes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rlk_repro.base.units import count, format_count, format_number
from rlk_repro.report.blocks import Block, Section, Table, Text, make_columns, make_row
from rlk_repro.report.figure import BOTTOM, HEIGHT, LEFT, LEGEND_Y, RIGHT, SHAPES, TOP, Figure, draw_powers, make_figure
from rlk_repro.report.labels import number_or_dash
from rlk_repro.report.svg import Scale, marker, polyline, text
from rlk_repro.report.view import View
from rlk_repro.rundir.agreement import LADDER, AgreementResult
from rlk_repro.spec.values import BASELINE, ENABLED

KEY: Final = "agreement"
TITLE: Final = "Training against rollout, token by token"


def make_agreement(view: View) -> Section:
    found = {item.variant: item for item in view.analysis.agreement}
    columns = make_columns("tokens", BASELINE, ENABLED, numbers=(BASELINE, ENABLED))
    rows = [
        make_row(name, *(say(found[variant]) if variant in found else "–" for variant in (BASELINE, ENABLED)))
        for name, say in _list_rows()
    ]
    note = "The table covers all tokens that a scored step trained on. " + " ".join(
        f"The log-probs of {item.variant} differ most at {place.place}, position {place.position}, token {place.token}."
        for item in found.values()
        if (place := item.largest) is not None
    )
    words = [f"{item.variant}: {item.reason}" for item in found.values() if item.reason]
    blocks: tuple[Block, ...] = (
        Text(text="The table counts tokens by the difference between the log-probs of training and rollout."),
        Table(columns=columns, rows=tuple(rows), note=note.strip(), is_folded=view.is_comparison),
        *(Text(text=f"Steps without a record: {'; '.join(words)}.") for _ in words[:1]),
    )
    return Section(key=KEY, title=TITLE, blocks=blocks)


def _list_rows() -> Iterator[tuple[str, Callable[[AgreementResult], str]]]:
    yield "all tokens", lambda item: format_count(item.num_tokens)
    for index, bound in enumerate(LADDER):
        yield f"differ by more than {bound:g}" if bound else "differ at all", functools.partial(_share, index)
    yield "without a finite log-prob", lambda item: format_count(item.num_not_finite)
    yield "largest difference", lambda item: "0" if item.largest is None else format_number(item.largest.abs_difference)
    yield "mean difference", lambda item: number_or_dash(item.mean_abs)
    yield "KL estimate k1", lambda item: number_or_dash(item.k1)
    yield "KL estimate k3", lambda item: number_or_dash(item.k3)


def _share(bound: int, item: AgreementResult) -> str:
    part = item.beyond[bound]
    return f"{format_count(part)} ({format_number(100 * part / item.num_tokens)} %)" if part else "0"


def plot_agreement(view: View) -> Iterator[Figure]:
    found = [item for item in view.analysis.agreement if item.num_tokens]
    if not found:
        return
    number = max(item.num_tokens for item in found)
    shares = [
        (item.variant, [(x, part / item.num_tokens) for x, part in enumerate(item.beyond) if part]) for item in found
    ]
    labels = [f"{bound:g}" for bound in LADDER]
    caption = f"Each point is the share of {count(number, 'token')} whose difference exceeds the bound on the axis."
    yield _draw(
        f"{KEY}-shares", "Tokens that differ by more than a bound", caption, "share of tokens", "bound", shares, labels
    )
    means = [
        (item.variant, [(x, mean) for x, mean in enumerate(item.mean_by_position) if mean is not None and mean > 0])
        for item in found
    ]
    num_bands = max(len(item.mean_by_position) for item in found)
    labels = [str(2**band - 1) for band in range(num_bands)]
    caption = "A point is the mean difference over a band of positions; the axis shows the first position of each band."
    where = "position in the response"
    yield _draw(f"{KEY}-positions", "Difference by position", caption, "mean difference", where, means, labels)


_Curve = tuple[str, Sequence[tuple[int, float]]]


def _draw(
    key: str, title: str, caption: str, y_name: str, x_name: str, curves: Sequence[_Curve], labels: Sequence[str]
) -> Figure:
    values = [math.log10(value) for _, points in curves for _, value in points]
    if not values:
        return Figure(key=key, title=title, caption=f"{title}: no token differs.")
    y = Scale(math.floor(min(values)), max(math.floor(min(values)) + 1, math.ceil(max(values))), BOTTOM, TOP)
    x = Scale(-0.5, len(labels) - 0.5, LEFT, RIGHT)
    body = [*draw_powers(y, y_name), text((LEFT + RIGHT) / 2, BOTTOM + 36, x_name, "axis", "middle")]
    for place, label in enumerate(labels):
        if place % math.ceil(len(labels) / 9) == 0:
            body.append(text(x(place), BOTTOM + 17, label, "tick", "middle"))
    for number, (variant, points) in enumerate(curves):
        drawn = [(x(place), y(math.log10(value))) for place, value in points]
        body += [polyline(drawn, f"path {variant}")] if len(drawn) > 1 else []
        body += [marker(SHAPES[variant], *point, 4, f"dot {variant}") for point in drawn]
        body += [marker(SHAPES[variant], 5 + 165 * number, LEGEND_Y - 4, 4.5, f"dot {variant}")]
        body += [text(16 + 165 * number, LEGEND_Y, variant, "legend")]
    return make_figure(key, title, caption, HEIGHT, body)
