"""Make one page over several bundles: a table of runs for each hardware, with verdict, effect and a link."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rlk_repro.base.files import write_text
from rlk_repro.base.findings import has_blocking
from rlk_repro.base.units import count, group
from rlk_repro.report import HTML_NAME, write_report
from rlk_repro.report.answer import describe_baseline, describe_words
from rlk_repro.report.basis import describe_change, describe_interval
from rlk_repro.report.blocks import Row, Section, Table, TableCell, Text, make_table
from rlk_repro.report.html import render_page
from rlk_repro.report.sections import SHOWN_HASH, choose_tone, find_commit, find_date
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import Analysis
from rlk_repro.spec.values import BASELINE
from rlk_repro.workloads import find_words

INDEX_NAME: Final = "index.html"
_PROSE: Final = ("verdict", "what a step is", "change (95 % interval)")
_COLUMNS: Final = ("run", *_PROSE[:2], "step in baseline", *_PROSE[2:], "n", "date", "RL-Kernel", "bundle")

Entry = tuple[Analysis, Context]
"""One row of the page: the analysis of a sealed bundle, so ``bundle_id`` of its context is never empty."""


def write_index(entries: Sequence[Entry], folder: Path) -> Path:
    """Write the page, and each report into a folder named after its bundle's id; return the page's path."""
    for analysis, context in entries:
        write_report(analysis, folder / context.bundle_id, replace(context, run_directory=""))
    page = folder / INDEX_NAME
    write_text(page, render_index(entries))
    return page


def render_index(entries: Sequence[Entry]) -> str:
    ordered = sorted(entries, key=lambda item: (item[0].run, item[0].run_id, item[1].bundle_id))
    about = (
        f"{count(len(ordered), 'bundle')}, analysed again from the logs. An id is the sha256 of a bundle's checksums."
    )
    sections = [Section(key="results", title="Results", blocks=(Text(text=about),))]
    by_hardware = group((_name_hardware(item[0]), item) for item in ordered)
    for number, (hardware, found) in enumerate(sorted(by_hardware.items())):
        sections.append(Section(key=f"hardware-{number}", title=hardware, blocks=(_make_table(found),)))
    by_experiment = group(((item[0].experiment_hash, _name_hardware(item[0])), item) for item in ordered)
    for number, found in enumerate(found for found in by_experiment.values() if len(found) > 1):
        title = f"{found[0][0].run} over time"
        sections.append(Section(key=f"trend-{number}", title=title, blocks=(_make_table(found),)))
    return render_page(sections)


def _name_hardware(analysis: Analysis) -> str:
    return analysis.facts.get("GPU") or analysis.hardware


def _make_table(entries: Iterable[Entry]) -> Table:
    return make_table(*_COLUMNS, rows=[_make_row(*entry) for entry in entries], prose=_PROSE)


def _list_doubts(context: Context) -> Iterator[str]:
    if context.rule_changes:
        yield "other measurement rules than the shipped run's"
    if has_blocking(context.findings):
        yield "records contradict each other"


def _make_row(analysis: Analysis, context: Context) -> Row:
    view = make_view(analysis, context)
    effect = analysis.effect(view.primary)
    figures = ["", "not compared", ""]
    step = find_words(analysis.workload).step
    enabled = f", with {analysis.switch}" if analysis.switch else ""
    baseline = f", against {describe_baseline(view)}" if view.has_variants else ""
    commit = find_commit(analysis, "RL-Kernel") if "RL-Kernel" in analysis.serving else ""
    if effect is not None and effect.ratio is not None:
        change = f"{describe_change(effect)} ({describe_interval(effect)})"
        before = view.metric(effect.metric).show(view.mean(effect.metric, BASELINE), "")
        figures = [before, change, count(effect.n, analysis.unit)]
    return (
        TableCell(text=analysis.run, target=f"{context.bundle_id}/{HTML_NAME}"),
        TableCell(text="; ".join([describe_words(analysis), *_list_doubts(context)]), tone=choose_tone(analysis)),
        f"{step}{enabled}{baseline}; stack {analysis.stack}",
        *figures,
        find_date(analysis),
        TableCell(text=commit, is_code=True),
        TableCell(text=context.bundle_id[:SHOWN_HASH], is_code=True),
    )
