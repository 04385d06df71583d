"""Make one page over several bundles: what was measured, how the effects compare, and a link to each report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rlk_repro.base.files import write_text
from rlk_repro.base.findings import has_blocking
from rlk_repro.base.units import count, group
from rlk_repro.report import HTML_NAME, write_report
from rlk_repro.report.answer import describe_words
from rlk_repro.report.basis import describe_change, describe_interval
from rlk_repro.report.blocks import Figure, Figures, Row, Section, Table, TableCell, Text, make_table
from rlk_repro.report.checks import describe_agreement
from rlk_repro.report.drawing import WIDTH, Scale, format_ticks, is_drawable, line, make_figure, marker, text
from rlk_repro.report.html import render_page
from rlk_repro.report.sections import SHOWN_HASH, choose_tone, find_commit, find_date
from rlk_repro.report.view import Context, View, make_view
from rlk_repro.rundir.agreement import choose_word
from rlk_repro.rundir.results import Analysis, Effect
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.workloads import find_words

INDEX_NAME: Final = "index.html"
ABOUT: Final = (
    "A row compares vime's GRPO training without RL-Kernel (baseline) and with it (enabled); a change below zero means "
    "less time. Every figure was computed again from the logs of its bundle."
)
LEFT: Final = 210
ROW: Final = 20
TOP: Final = 8
MAX_LABEL: Final = 27

Entry = tuple[Analysis, Context]
"""One row of the page: the analysis of a sealed bundle, so ``bundle_id`` of its context is never empty."""


@dataclass(frozen=True, kw_only=True)
class _Item:
    view: View
    label: str

    @property
    def effect(self) -> Effect | None:
        effect = self.view.analysis.effect(self.view.primary)
        return None if effect is None or effect.ratio is None else effect


def write_index(entries: Sequence[Entry], folder: Path) -> Path:
    """Write the page, and each report into a folder named after its bundle's id; return the page's path."""
    for analysis, context in entries:
        write_report(analysis, folder / context.bundle_id, replace(context, run_directory=""))
    page = folder / INDEX_NAME
    write_text(page, render_index(entries))
    return page


def render_index(entries: Sequence[Entry]) -> str:
    ordered = sorted(entries, key=lambda item: (item[0].run, item[0].run_id, item[1].bundle_id))
    items = list(_label([make_view(*entry) for entry in ordered]))
    about = f"{count(len(items), 'bundle')}. {ABOUT}"
    sections = [Section(key="results", title="Results", blocks=(Text(text=about),))]
    by_hardware = group((_name_hardware(item.view.analysis), item) for item in items)
    for number, (hardware, found) in enumerate(sorted(by_hardware.items())):
        timed = group((find_words(item.view.analysis.workload).step, item) for item in found if item.effect is not None)
        for step, alike in timed.items():
            key = f"{number}-{len(sections)}"
            blocks = (Figures(figures=(_draw(alike, f"forest-{key}"),)), _make_table(alike))
            sections.append(Section(key=f"hardware-{key}", title=f"{hardware}: {step}", blocks=blocks))
        rest = [item for item in found if item.effect is None]
        if rest:
            title = f"{hardware}: what compares no times"
            sections.append(Section(key=f"rest-{number}", title=title, blocks=(_make_rest(rest),)))
    return render_page(sections)


def _name_hardware(analysis: Analysis) -> str:
    return analysis.facts.get("GPU") or analysis.hardware


def _label(views: Sequence[View]) -> Iterator[_Item]:
    """Name each bundle by its run and by what tells it apart from the other bundles of that run."""
    by_run = group((view.analysis.run, view) for view in views)
    for run, found in by_run.items():
        traits = [_list_traits(view) for view in found]
        for view, own in zip(found, traits, strict=True):
            shown: list[str] = []
            for name in own:
                alike = [other for other in traits if all(other[key] == own[key] for key in shown)]
                if len({other[name] for other in alike}) > 1:
                    shown.append(name)
            words = [own[name] for name in shown if own[name]]
            yield _Item(view=view, label=f"{run}: {', '.join(words)}" if words else run)


def _list_traits(view: View) -> dict[str, str]:
    """Return what may tell two bundles of one run apart, the most telling first."""
    analysis, plan = view.analysis, view.context.plan
    run = None if plan is None else plan.run
    has_entropy = run is not None and run.workload.kind in {"vime", "module"} and run.entropy_metric
    collects = run is not None and run.workload.kind == "vime" and not run.gc_freeze
    commit = find_commit(analysis, "RL-Kernel")[:7] if "RL-Kernel" in analysis.serving else ""
    baseline = "" if run is None else run.rl_kernel.baseline_implementation
    return {
        "arm": f"with {analysis.switch}" if analysis.switch else "",
        "baseline": "against torch.compile" if baseline == "torch-compile" else "",
        "commit": commit,
        "lane": analysis.lane,
        "entropy": "entropy metric on" if has_entropy else "",
        "collection": "garbage collection on" if collects else "",
        "n": count(analysis.num_pairs_planned, analysis.unit),
        "date": find_date(analysis),
        "id": view.context.bundle_id[:SHOWN_HASH],
    }


def _make_table(items: Sequence[_Item]) -> Table:
    names = ("what", "baseline", "enabled", "change", "95 % interval", "n", "machines", "verdict", "date", "bundle")
    return make_table(*names, rows=[_make_row(item) for item in items], numbers=names[1:5], prose=("what", "verdict"))


def _make_row(item: _Item) -> Row:
    view, effect = item.view, item.effect
    assert effect is not None
    analysis, metric = view.analysis, view.metric(view.primary)
    words = "; ".join([describe_words(analysis), *_list_doubts(view.context)])
    return (
        TableCell(text=item.label, target=_link(view)),
        *(metric.show(view.mean(view.primary, variant), "–") for variant in (BASELINE, ENABLED)),
        describe_change(effect),
        describe_interval(effect),
        count(effect.n, analysis.unit),
        str(max(1, len(view.allocations))),
        TableCell(text=words, tone=choose_tone(analysis)),
        find_date(analysis),
        TableCell(text=view.context.bundle_id[:SHOWN_HASH], is_code=True),
    )


def _make_rest(items: Sequence[_Item]) -> Table:
    rows = []
    for item in items:
        analysis = item.view.analysis
        result, tone = describe_words(analysis), choose_tone(analysis)
        if analysis.checks:
            result = f"{choose_word(analysis.checks).value}: {describe_agreement(item.view)}"
        doubts = "".join(f"; {doubt}" for doubt in _list_doubts(item.view.context))
        bundle = TableCell(text=item.view.context.bundle_id[:SHOWN_HASH], is_code=True)
        what = TableCell(text=item.label, target=_link(item.view))
        rows.append((what, TableCell(text=f"{result}{doubts}", tone=tone), find_date(analysis), bundle))
    return make_table("what", "result", "date", "bundle", rows=rows, prose=("what", "result"))


def _link(view: View) -> str:
    return f"{view.context.bundle_id}/{HTML_NAME}"


def _list_doubts(context: Context) -> Iterator[str]:
    if context.rule_changes:
        yield "other measurement rules than the shipped run's"
    if has_blocking(context.findings):
        yield "records contradict each other"


def _draw(items: Sequence[_Item], key: str) -> Figure:
    """Draw the effects with their intervals, one below the other."""
    effects = [(item, item.effect) for item in items]
    ends = [0.0]
    for _, effect in effects:
        if effect is not None:
            ends += [_change(value) for value in (effect.low, effect.ratio, effect.high) if is_drawable(value)]
    air = 0.06 * (max(ends) - min(ends)) or 1.0
    x = Scale(min(ends) - air, max(ends) + air, LEFT, WIDTH - 8)
    bottom = TOP + ROW * len(items) + 6
    ticks = x.ticks(5)
    body = []
    for tick, shown in zip(ticks, format_ticks(ticks), strict=True):
        body.append(line(x(tick), TOP, x(tick), bottom, "zero" if abs(tick) < 1e-9 else "grid"))
        body.append(text(x(tick), bottom + 17, shown, "tick", "middle"))
    for number, (item, effect) in enumerate(effects):
        y = TOP + ROW * (number + 0.5)
        label = item.label if len(item.label) <= MAX_LABEL else f"{item.label[: MAX_LABEL - 1]}…"
        body.append(text(LEFT - 8, y + 4, label, "tick", "end"))
        if effect is None or not is_drawable(effect.ratio):
            continue
        if is_drawable(effect.low) and is_drawable(effect.high):
            body.append(line(x(_change(effect.low)), y, x(_change(effect.high)), y, "interval"))
        body.append(marker("diamond", x(_change(effect.ratio)), y, 4, "dot neutral", describe_change(effect)))
    caption = "Change of the time of a step, enabled / baseline, in percent, with its 95 % interval. Rows are as below."
    return make_figure(key, "Effects", caption, bottom + 24, body)


def _change(ratio: float | None) -> float:
    return 0.0 if ratio is None else 100 * (ratio - 1)
