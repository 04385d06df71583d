"""Show the origin of every number in a report: for each metric the summaries of trials, the pairs and the log lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rlk_repro.report.blocks import Column, Table, TableCell, Tone, make_columns, make_row
from rlk_repro.report.labels import NOT_RECORDED, start_sentence
from rlk_repro.report.sections import make_pair_cells
from rlk_repro.report.view import View, describe_lines, describe_source
from rlk_repro.rundir.results import Series, Summary, TrialResult

MAX_VALUES: Final = 40_000
"""Largest number of per-step values on a page; above this number, each metric lists only its first steps."""


@dataclass(frozen=True, kw_only=True)
class MetricEvidence:
    metric: str
    anchor: str
    title: str
    trials: Table
    pairs: Table


def make_evidence(view: View) -> tuple[MetricEvidence, ...]:
    return tuple(
        MetricEvidence(
            metric=metric,
            anchor=view.metric_anchor(metric),
            title=view.name_with_unit(metric),
            trials=_trial_table(view, metric),
            pairs=_pair_table(view, metric),
        )
        for metric in view.metrics
        if metric in view.recorded
    )


def _trial_table(view: View, metric: str) -> Table:
    numbers = ("n", "mean", "median (p50)", "sd", "min", "max", "p90", "p99", "outliers")
    columns = make_columns("trial", *numbers, "log lines", numbers=numbers)
    rows = tuple(_trial_row(view, metric, trial) for trial in view.analysis.trials)
    note = (
        "A row covers the scored steps of one trial. Percentiles are of type 7 of Hyndman and Fan; p90 needs 20 steps, "
        "p99 needs 200. Outliers are counted and stay in all numbers."
    )
    return Table(title="Trials", columns=columns, rows=rows, note=note)


def _trial_row(view: View, metric: str, trial: TrialResult) -> tuple[TableCell, ...]:
    summary, series = trial.summary(metric), trial.get_series(metric)
    if series is None:
        log = TableCell(text=NOT_RECORDED, tone=Tone.FAINT)
    else:
        log = view.file_cell(series.source, series.source + describe_lines(series))
    name = TableCell(text=trial.name, target=f"#{view.trial_anchor(trial.name)}", is_code=True)
    cells = _summary_cells(view, metric, summary) if summary else ["0", NOT_RECORDED, *[""] * 7]
    return make_row(name, *cells, log)


def _summary_cells(view: View, metric: str, summary: Summary) -> list[str | TableCell]:
    values = (summary.mean, summary.median, summary.stdev, summary.minimum, summary.maximum)
    shown = (_or_na(view, metric, value, summary.n) for value in (*values, summary.p90, summary.p99))
    return [str(summary.n), *shown, str(summary.num_outliers)]


def _or_na(view: View, metric: str, value: float | None, n: int) -> str:
    return f"n/a (n={n})" if value is None else view.numbers.format(metric, value)


def _pair_table(view: View, metric: str) -> Table:
    numbers = ("first", "second", "change")
    columns = make_columns(view.analysis.unit, "kind", "status", *numbers, numbers=numbers)
    rows = tuple(
        make_row(
            pair.pair,
            "control" if pair.is_control else "comparison",
            pair.status.value,
            *make_pair_cells(view, pair, metric),
        )
        for pair in view.analysis.pairs
    )
    return Table(title=f"{start_sentence(view.analysis.unit)}s", columns=columns, rows=rows)


def make_step_table(view: View, metric: str) -> Table:
    found = [(trial, series) for trial in view.analysis.trials if (series := trial.get_series(metric)) is not None]
    num_steps = max((len(series.values) for _, series in found), default=0)
    num_series = sum(len(trial.series) for trial in view.analysis.trials)
    num_listed = min(num_steps, max(1, MAX_VALUES // max(1, num_series)))
    columns = [Column(name="step", is_number=True)]
    columns += [_step_column(view, metric, trial, series) for trial, series in found]
    rows = tuple(tuple(_step_cells(view, metric, step, [series for _, series in found])) for step in range(num_listed))
    files = ", ".join(sorted({describe_source(trial, series) for trial, series in found}))
    note = f"Each cell shows a value and its line number in {files}. The mark w means a warm-up step."
    if num_listed < num_steps:
        note += f" The table has the first {num_listed} of {num_steps} steps; the bundle's analysis file has all steps."
    return Table(title="Steps and log lines", columns=tuple(columns), rows=rows, note=note)


def _step_column(view: View, metric: str, trial: TrialResult, series: Series) -> Column:
    target = view.file_cell(series.source, "").target
    return Column(name=trial.name, target=target, anchor=view.steps_anchor(metric, trial), is_number=True)


def _step_cells(view: View, metric: str, step: int, found: list[Series]) -> Iterator[TableCell]:
    yield TableCell(text=f"{step} w" if step < view.analysis.num_warmup_steps else str(step))
    for series in found:
        value = series.values[step] if step < len(series.values) else None
        line = series.lines[step] if step < len(series.lines) else None
        text = view.numbers.format(metric, value) if value is not None else "–"
        yield TableCell(text=text, note="" if line is None else f":{line}")
