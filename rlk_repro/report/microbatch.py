"""Show the peak memory of each microbatch that fitted, and the first that did not."""

from __future__ import annotations

from typing import Final

from rlk_repro.base.units import format_count
from rlk_repro.report.blocks import Section, Table, TableCell, Text, Tone, make_columns, make_row
from rlk_repro.report.view import View
from rlk_repro.rundir.microbatch import MicrobatchResult

_PEAK: Final = "peak_memory_bytes"
_TEXT: Final = (
    "In each step, the samples have more tokens than in the step before, and one microbatch on each GPU holds all "
    "samples of an optimizer step. A trial ends when a step runs out of memory."
)


def make_microbatches(view: View) -> Section:
    results = view.analysis.microbatches
    names = tuple(result.trial for result in results)
    sizes = {item.tokens for result in results for item in result.trained}
    sizes |= {result.refused for result in results if result.refused is not None}
    peak = view.name_with_unit(_PEAK)
    columns = make_columns("tokens of a microbatch", *names, numbers=names)
    rows = tuple(
        make_row(format_count(size), *(_describe(view, result, size) for result in results)) for size in sorted(sizes)
    )
    note = f"A number is the step's {peak}."
    table = Table(columns=columns, rows=rows, note=note)
    return Section(key="microbatches", title="Largest microbatch", blocks=(Text(text=_TEXT), table))


def _describe(view: View, result: MicrobatchResult, size: int) -> TableCell:
    if size == result.refused:
        return TableCell(text="out of memory", tone=Tone.BAD)
    peak = {item.tokens: item.peak_bytes for item in result.trained}.get(size)
    return TableCell(text="–" if peak is None else view.numbers.format(_PEAK, peak))
