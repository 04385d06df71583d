"""Draw where the time of a step goes: one bar per variant, whose parts do not overlap and add up to the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rlk_repro.base.units import format_change
from rlk_repro.report.blocks import Figure
from rlk_repro.report.drawing import WIDTH, is_drawable, line, make_figure, rect, text
from rlk_repro.report.labels import NOT_RECORDED
from rlk_repro.report.view import View
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.statistics.stats import STEP_TIME

TITLE: Final = "Where the time of a step goes"
REST: Final = "everything else"
WAIT: Final = "waiting for rollouts"
UPDATE: Final = "forward and backward"
LOSS: Final = "rest of the GRPO loss"
LOG_PROBS: Final = "log-probs of the loss"
OPTIMIZER: Final = "optimizer"
ROLLOUT: Final = "generating rollouts"
SYNC: Final = "weight sync"
SMALLEST_SHARE: Final = 0.001
"""Parts below this share of a step are counted in the rest."""
COLUMNS: Final = (266, 352, WIDTH)
BAR_LEFT: Final = 72
BAR: Final = 24
ROW: Final = 19
NUM_COLOURS: Final = 9


def list_parts(view: View, variant: str) -> dict[str, float]:
    """Return the seconds of each part of a variant's mean step; the parts add up to the step."""

    def mean(*metrics: str) -> float | None:
        values = [value for metric in metrics if is_drawable(value := view.mean(metric, variant))]
        return sum(values) if values else None

    step = mean(STEP_TIME)
    if not step:
        return {}
    forward, backward = "module_{}_forward_s", "module_{}_backward_s"
    log_probs = None
    if view.is_comparable(forward.format("log_probs")):
        log_probs = mean(forward.format("log_probs"), backward.format("log_probs"))
    loss = _split(LOSS, mean(forward.format("grpo_loss"), backward.format("grpo_loss")), {LOG_PROBS: log_probs})
    update = _split(UPDATE, mean("actor_train_time_s"), {**loss, OPTIMIZER: mean("module_optimizer_s")})
    wait = _split(WAIT, mean("train_wait_time_s"), {ROLLOUT: mean("rollout_time_s"), SYNC: mean("weight_sync_time_s")})
    passes = {
        view.metric(name).label.removesuffix(" time"): mean(name)
        for name in ("log_probs_time_s", "ref_log_probs_time_s")
    }
    return _split(REST, step, {**wait, **passes, **update}, smallest=SMALLEST_SHARE * step)


def _split(
    name: str, whole: float | None, parts: Mapping[str, float | None], smallest: float = 0.0
) -> dict[str, float]:
    """Divide a time into its parts and the rest, which has the name; parts that do not fit into it are left out."""
    if whole is None:
        return {}
    found = {part: value for part, value in parts.items() if value is not None and value > smallest}
    rest = whole - sum(found.values())
    return {name: whole} if rest < -0.01 * whole else {**found, name: max(0.0, rest)}


def plot_parts(view: View) -> Figure:
    key = "plot-modules"
    variants: tuple[str, ...] = (BASELINE, ENABLED)
    found = {variant: parts for variant in variants if (parts := list_parts(view, variant))}
    if not found:
        return Figure(key=key, title=TITLE, caption=f"{TITLE}: {NOT_RECORDED}.")
    names = [name for name in dict.fromkeys([*found.get(BASELINE, {}), *found.get(ENABLED, {})]) if name != REST]
    names.append(REST)
    longest = max(sum(parts.values()) for parts in found.values())
    unit, scale = ("ms", 1e3) if longest < 10 else ("s", 1.0)
    body: list[str] = []
    top = 4.0
    for variant, parts in found.items():
        left = float(BAR_LEFT)
        body.append(text(0, top + 16, variant, "tick"))
        for number, name in enumerate(names):
            width = parts.get(name, 0.0) * (WIDTH - BAR_LEFT) / longest
            body += [rect(left, top, width, BAR, f"part {_colour(number, names)}")] if width > 0 else []
            left += width
        top += BAR + 8
    body += _draw_table(found, names, top + ROW, scale, unit, has_change=not view.has_shared_gpus)
    caption = (
        "Means over the scored steps. The parts do not overlap and add up to the step. The loss, its log-probs, the "
        "optimizer, and forward and backward of the model are the parts of an update."
    )
    if view.has_shared_gpus:
        caption += " No change is shown, because these times do not count."
    elif view.analysis.is_crossover:
        caption += " The change of a part is that of the two means, not the paired estimate."
    return make_figure(key, TITLE, caption, top + ROW * (len(names) + 2) + 8, body)


def _draw_table(
    found: dict[str, dict[str, float]],
    names: list[str],
    y: float,
    scale: float,
    unit: str,
    *,
    has_change: bool,
) -> Iterator[str]:
    yield text(0, y, f"part ({unit})", "axis")
    for column, name in zip(COLUMNS, (BASELINE, ENABLED, "change"), strict=True):
        if has_change or name != "change":
            yield text(column, y, name, "axis", "end")
    first, second = (found.get(variant, {}) for variant in (BASELINE, ENABLED))
    rows = [(name, first.get(name), second.get(name)) for name in names]
    rows.append(("step", sum(first.values()) or None, sum(second.values()) or None))
    for number, (name, was, now) in enumerate(rows):
        y += ROW
        is_sum = number == len(names)
        if is_sum:
            yield line(0, y - 13, WIDTH, y - 13, "grid")
        else:
            yield rect(0, y - 10, 11, 11, f"part {_colour(number, names)}")
        style = "strong" if is_sum else ""
        yield text(17, y, name, style)
        for column, value in zip(COLUMNS, (was, now), strict=False):
            yield text(column, y, "–" if value is None else _format(value * scale), style, "end")
        if has_change and was and now is not None:
            yield text(COLUMNS[2], y, format_change(now / was, 1), style, "end")


def _colour(number: int, names: list[str]) -> str:
    return "part-rest" if names[number] == REST else f"part-{number % NUM_COLOURS}"


def _format(value: float) -> str:
    """Return a time with a decimal where it is small, so that columns of times can be added up by eye."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
