"""Show the origin of every number: for each metric the summaries of trials and every step's log line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rlk_repro.report.blocks import Column, Details, Row, Section, Table, TableCell, Text, Tone, make_table
from rlk_repro.report.labels import NOT_RECORDED
from rlk_repro.report.view import View, describe_lines, describe_source
from rlk_repro.rundir.results import Series, TrialResult

MAX_VALUES: Final = 40_000
"""Largest number of per-step values on a page; above this number, each metric lists only its first steps."""
ABOUT: Final = "On the page, every metric has the trials' summaries, and every step with its log line."


def make_evidence(view: View) -> Section:
    blocks = [
        Details(
            title=view.metric(metric).named,
            anchor=view.metric_anchor(metric),
            blocks=(_trial_table(view, metric), _step_table(view, metric)),
        )
        for metric in view.metrics
        if metric in view.recorded
    ]
    return Section(key="evidence", title="Evidence", blocks=(Text(text=ABOUT), *blocks))


def _trial_table(view: View, metric: str) -> Table:
    numbers = ("n", "mean", "median (p50)", "sd", "min", "max", "p90", "p99", "outliers")
    note = (
        "A row covers the scored steps of one trial. Percentiles are of type 7 of Hyndman and Fan; p90 needs 20 steps, "
        "p99 needs 200. Outliers are counted and stay in all numbers."
    )
    rows = [_trial_row(view, metric, trial) for trial in view.analysis.trials]
    return make_table("trial", *numbers, "log lines", rows=rows, numbers=numbers, title="Trials", note=note)


def _trial_row(view: View, metric: str, trial: TrialResult) -> Row:
    item, series = trial.summary(metric), trial.get_series(metric)
    log = TableCell(text=NOT_RECORDED, tone=Tone.FAINT)
    if series is not None:
        log = view.file_cell(series.source, series.source + describe_lines(series))
    cells = ["0", NOT_RECORDED, *[""] * 7]
    if item is not None:
        values = (item.mean, item.median, item.stdev, item.minimum, item.maximum, item.p90, item.p99)
        shown = [view.metric(metric).format(value, f"n/a (n={item.n})") for value in values]
        cells = [str(item.n), *shown, str(item.num_outliers)]
    return TableCell(text=trial.name, target=f"#{view.trial_anchor(trial.name)}", is_code=True), *cells, log


def _step_table(view: View, metric: str) -> Table:
    found = [(trial, series) for trial in view.analysis.trials if (series := trial.get_series(metric)) is not None]
    num_steps = max((len(series.values) for _, series in found), default=0)
    num_series = sum(len(trial.series) for trial in view.analysis.trials)
    num_listed = min(num_steps, max(1, MAX_VALUES // max(1, num_series)))
    columns = [Column(name="step", is_number=True)]
    for trial, series in found:
        target, anchor = view.file_cell(series.source, "").target, view.steps_anchor(metric, trial)
        columns.append(Column(name=trial.name, target=target, anchor=anchor, is_number=True))
    rows = tuple(tuple(_step_cells(view, metric, step, [series for _, series in found])) for step in range(num_listed))
    files = ", ".join(sorted({describe_source(trial, series) for trial, series in found}))
    note = f"Each cell shows a value and its line number in {files}. The mark w means a warm-up step."
    if num_listed < num_steps:
        note += f" The table has the first {num_listed} of {num_steps} steps; the bundle's analysis file has all steps."
    return Table(title="Steps and log lines", columns=tuple(columns), rows=rows, note=note)


def _step_cells(view: View, metric: str, step: int, found: list[Series]) -> Iterator[TableCell]:
    yield TableCell(text=f"{step} w" if step < view.analysis.num_warmup_steps else str(step))
    for series in found:
        value = series.values[step] if step < len(series.values) else None
        line = series.lines[step] if step < len(series.lines) else None
        yield TableCell(text=view.metric(metric).format(value, "–"), note="" if line is None else f":{line}")
