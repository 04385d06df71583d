"""Make one page over several bundles: what was measured, how the effects compare, and a link to each report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rlk_repro.base.files import write_text
from rlk_repro.base.findings import has_blocking
from rlk_repro.base.units import count, group
from rlk_repro.report import HTML_NAME
from rlk_repro.report.answer import describe_words
from rlk_repro.report.basis import describe_change, describe_confidence, describe_interval
from rlk_repro.report.blocks import Row, Section, Table, TableCell, Text, make_table
from rlk_repro.report.checks import describe_agreement
from rlk_repro.report.drawing import Scale
from rlk_repro.report.forest import draw_cell, make_cell_scale
from rlk_repro.report.html import render_html, render_page
from rlk_repro.report.sections import SHOWN_HASH, choose_tone, find_commit, find_date
from rlk_repro.report.view import Context, View, make_view
from rlk_repro.rundir.agreement import choose_word
from rlk_repro.rundir.results import Analysis, Effect
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.workloads import find_words

INDEX_NAME: Final = "index.html"
ABOUT: Final = (
    "A row compares vime's GRPO training without RL-Kernel (baseline) and with it (enabled); a change below zero means "
    "less time. Every figure was computed again from the logs of its bundle. An interval is that of its machines; "
    "rlk-repro combine says from three machines on what to expect of another one."
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the page: a sealed bundle's analysis and its report, so ``context.bundle_id`` is never empty."""

    analysis: Analysis
    context: Context
    report: str


def make_entry(analysis: Analysis, context: Context) -> Entry:
    """Render the report of one bundle; its commands name the bundle's file without its folder."""
    bare = replace(context, bundle=Path(context.bundle).name, run_directory="")
    return Entry(analysis=analysis, context=context, report=render_html(analysis, bare))


@dataclass(frozen=True, kw_only=True)
class _Item:
    view: View
    label: str

    @property
    def effect(self) -> Effect | None:
        effect = self.view.analysis.effect(self.view.primary)
        return None if effect is None or effect.ratio is None else effect


def write_index(entries: Sequence[Entry], folder: Path) -> Path:
    """Write the page, and each report into a folder named by its run and its bundle's id; return the page's path."""
    for entry in entries:
        write_text(folder / _link(entry.analysis, entry.context), entry.report)
    page = folder / INDEX_NAME
    write_text(page, render_index(entries))
    return page


def render_index(entries: Sequence[Entry]) -> str:
    ordered = sorted(entries, key=lambda item: (item.analysis.run, item.analysis.run_id, item.context.bundle_id))
    items = list(_label([make_view(entry.analysis, entry.context) for entry in ordered]))
    about = f"{count(len(items), 'bundle')}. {ABOUT}"
    sections = [Section(key="results", title="Results", blocks=(Text(text=about),))]
    by_hardware = group((_name_hardware(item.view.analysis), item) for item in items)
    for number, (hardware, found) in enumerate(sorted(by_hardware.items())):
        timed = group((find_words(item.view.analysis.workload).step, item) for item in found if item.effect is not None)
        for step, alike in timed.items():
            key, title = f"hardware-{number}-{len(sections)}", f"{hardware}: {step}"
            sections.append(Section(key=key, title=title, blocks=(_make_table(alike),)))
        rest = [item for item in found if item.effect is None]
        if rest:
            title = f"{hardware}: other results"
            sections.append(Section(key=f"rest-{number}", title=title, blocks=(_make_rest(rest),)))
    return render_page(sections, script="index.js")


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
    effects = [item.effect for item in items if item.effect is not None]
    interval = f"{describe_confidence(*effects)} interval"
    names = ("what", "baseline", "enabled", "change", interval, "n", "machines", "verdict", "date", "bundle")
    x = make_cell_scale(effects)
    return make_table(
        *names, rows=[_make_row(item, x) for item in items], numbers=names[1:5], prose=("what", "verdict")
    )


def _make_row(item: _Item, x: Scale) -> Row:
    view, effect = item.view, item.effect
    assert effect is not None
    analysis, metric = view.analysis, view.metric(view.primary)
    words = "; ".join([describe_words(analysis), *_list_doubts(view.context)])
    return (
        TableCell(text=item.label, target=_link(analysis, view.context)),
        *(metric.show(view.mean(view.primary, variant), "–") for variant in (BASELINE, ENABLED)),
        describe_change(effect),
        TableCell(text=describe_interval(effect), svg=draw_cell(effect, x)),
        count(effect.n, analysis.unit),
        _count_machines(view),
        TableCell(text=words, tone=choose_tone(analysis)),
        find_date(analysis),
        TableCell(text=view.context.bundle_id[:SHOWN_HASH], is_code=True),
    )


def _count_machines(view: View) -> str:
    machines, plan = max(1, len(view.allocations)), view.context.plan
    return str(machines) if plan is None or not plan.num_gpus else f"{machines} × {count(plan.num_gpus, 'GPU')}"


def _make_rest(items: Sequence[_Item]) -> Table:
    rows = []
    for item in items:
        analysis = item.view.analysis
        result, tone = describe_words(analysis), choose_tone(analysis)
        if analysis.checks:
            result = f"{choose_word(analysis.checks).value}: {describe_agreement(item.view)}"
        doubts = "".join(f"; {doubt}" for doubt in _list_doubts(item.view.context))
        bundle = TableCell(text=item.view.context.bundle_id[:SHOWN_HASH], is_code=True)
        what = TableCell(text=item.label, target=_link(analysis, item.view.context))
        rows.append((what, TableCell(text=f"{result}{doubts}", tone=tone), find_date(analysis), bundle))
    return make_table("what", "result", "date", "bundle", rows=rows, prose=("what", "result"))


def _link(analysis: Analysis, context: Context) -> str:
    return f"{analysis.run}-{context.bundle_id[:SHOWN_HASH]}/{HTML_NAME}"


def _list_doubts(context: Context) -> Iterator[str]:
    if context.rule_changes:
        yield "other measurement rules than the shipped run's"
    if has_blocking(context.findings):
        yield "records contradict each other"
