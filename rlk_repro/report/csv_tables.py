"""Write an analysis as two CSV tables for other tools: one row per step, and one row per effect."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rlk_repro.base.files import write_text
from rlk_repro.report.labels import clean
from rlk_repro.rundir.results import Analysis

EFFECTS = ("metric", "role", "n", "unit", "ratio", "low", "high", "confidence", "p_value")


def write_tables(analysis: Analysis, folder: Path) -> None:
    """Write ``steps.csv`` and ``effects.csv``; the name of a metric ends in its unit, and an empty cell is no value."""
    metrics = sorted({series.metric for trial in analysis.trials for series in trial.series})
    write_text(folder / "steps.csv", _format(("trial", "variant", "step", *metrics), _list_steps(analysis, metrics)))
    effects = (
        (item.metric, item.role, item.n, analysis.unit, item.ratio, item.low, item.high, item.confidence, item.p_value)
        for item in analysis.effects
    )
    write_text(folder / "effects.csv", _format(EFFECTS, effects))


def _list_steps(analysis: Analysis, metrics: Sequence[str]) -> Iterator[Sequence[object]]:
    for trial in analysis.trials:
        columns = {series.metric: series.values for series in trial.series}
        for step in range(max(map(len, columns.values()), default=0)):
            row = [columns[name][step] if step < len(columns.get(name, ())) else None for name in metrics]
            if any(value is not None for value in row):
                yield trial.folder, trial.variant, step, *row


def _format(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([_guard(item) if isinstance(item, str) else item for item in row])
    return stream.getvalue()


def _guard(text: str) -> str:
    """Return a text that no spreadsheet reads as a formula."""
    shown = clean(text)
    return f"'{shown}" if shown[:1] in {"=", "+", "-", "@"} else shown
