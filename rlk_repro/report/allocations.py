"""Show how the effect differs between the allocations of a run."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from rlk_repro.base.units import format_percent, name_some
from rlk_repro.report.basis import describe_confidence, describe_interval
from rlk_repro.report.blocks import Table, make_columns, make_row
from rlk_repro.report.view import View
from rlk_repro.statistics.stats import paired_effect, to_ratio


def make_allocation_tables(view: View) -> Iterator[Table]:
    """Yield a table with the effect of each allocation if pairs of more than one allocation count."""
    found, effect = view.allocations, view.analysis.effect(view.primary)
    if len(found) < 2 or effect is None:
        return
    unit = view.analysis.unit
    numbers = (f"{unit}s", f"baseline ({view.label(view.primary).unit})", "change")
    columns = make_columns("allocation", *numbers, "which", "nodes", "GPUs", numbers=numbers, prose=("which", "GPUs"))
    means = [mean(item.log_ratio or 0.0 for item in counted.values()) for _, counted in found]
    rows = tuple(
        make_row(
            str(number),
            str(len(counted)),
            view.numbers.format(view.primary, mean(item.first or 0.0 for item in counted.values())),
            format_percent(to_ratio(log_ratio)),
            name_some(counted, 12),
            name_some(allocation.nodes) or "unknown",
            name_some(allocation.gpus, 8) or "unknown",
        )
        for number, ((allocation, counted), log_ratio) in enumerate(zip(found, means, strict=True), start=1)
    )
    whole = paired_effect(view.primary, means, role="primary", alpha=1 - effect.confidence)
    note = (
        f"The verdict's interval counts each {unit} as one observation. If the effect differs more between allocations "
        "than within them, that interval is too narrow for other machines. With each allocation as one observation, "
        f"the change is {format_percent(to_ratio(mean(means)))} ({describe_confidence(whole)} interval "
        f"{describe_interval(whole)}, n = {len(found)})."
    )
    yield Table(title="Allocation by allocation", columns=columns, rows=rows, note=note)
