"""Show the peak memory of each microbatch that fitted, and the first that did not."""

from __future__ import annotations

from typing import Final

from rlk_repro.base.units import format_count
from rlk_repro.report.blocks import Row, Section, TableCell, Text, Tone, make_table
from rlk_repro.report.view import View
from rlk_repro.rundir.microbatch import MicrobatchResult
from rlk_repro.statistics.stats import PEAK_MEMORY

_TEXT: Final = (
    "In each step, the samples have more tokens than in the step before, and one microbatch on each GPU holds all "
    "samples of an optimizer step. A trial ends when a step runs out of memory."
)


def make_microbatches(view: View) -> Section:
    results = view.analysis.microbatches
    names = [result.trial for result in results]
    cells = [_describe(view, result) for result in results]
    rows: list[Row] = []
    for size in sorted(set().union(*cells)):
        rows.append((format_count(size), *(found.get(size, "–") for found in cells)))
    note = f"A number is the step's {view.metric(PEAK_MEMORY).named}."
    table = make_table("tokens of a microbatch", *names, rows=rows, numbers=names, note=note)
    return Section(key="microbatches", title="Largest microbatch", blocks=(Text(text=_TEXT), table), summary=True)


def _describe(view: View, result: MicrobatchResult) -> dict[int, str | TableCell]:
    """Return the cell of each number of tokens that the trial reached."""
    cells: dict[int, str | TableCell] = {}
    for item in result.trained:
        cells[item.tokens] = view.metric(PEAK_MEMORY).format(item.peak_bytes, "–")
    if result.refused is not None:
        cells[result.refused] = TableCell(text="out of memory", tone=Tone.BAD)
    return cells
