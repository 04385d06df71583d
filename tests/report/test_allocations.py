"""A run in several allocations shows the effect of each one, and the interval with each as one observation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlk_repro.analysis.allocations import Allocation
from rlk_repro.report.allocations import make_allocation_tables
from rlk_repro.report.answer import describe_ground
from rlk_repro.report.view import Context, View, make_view
from rlk_repro.rundir.results import PairStatus
from tests.support.analysis_examples import small


def view_of(*pairs: tuple[str, ...], lost: str = "") -> View:
    analysis = small()
    status = {lost: PairStatus.VOID}
    analysis = replace(
        analysis, pairs=tuple(replace(pair, status=status.get(pair.pair, pair.status)) for pair in analysis.pairs)
    )
    allocations = tuple(
        Allocation(name=str(number), pairs=names, nodes=("a",), gpus=(f"GPU-{number}",))
        for number, names in enumerate(pairs)
    )
    return make_view(analysis, Context(allocations=allocations))


def test_each_allocation_has_its_pairs_its_gpus_and_its_effect() -> None:
    view = view_of(("p1",), ("p2",))
    (table,) = make_allocation_tables(view)
    ratios = [math.exp(pair.metric("step_time_s").log_ratio) for pair in view.analysis.pairs]  # type: ignore[union-attr, arg-type]
    changes = [f"{100 * ratio - 100:+.2f} %" for ratio in ratios]
    assert [[cell.text for cell in row][3:] for row in table.rows] == [
        [changes[0], "p1", "a", "GPU-0"],
        [changes[1], "p2", "a", "GPU-1"],
    ]
    effect = view.analysis.effect("step_time_s")
    assert effect is not None
    assert effect.low is not None
    assert f"the change is {100 * math.sqrt(ratios[0] * ratios[1]) - 100:+.2f} % (95 % interval " in table.note
    assert f"{100 * effect.low - 100:+.2f} % to" in table.note  # one pair each: the interval is that of the verdict
    assert describe_ground(view).endswith(", in 2 allocations")


@pytest.mark.parametrize("view", [view_of(("p1", "p2")), view_of(("p1",), ("p2",), lost="p2"), view_of()])
def test_one_allocation_with_results_needs_no_table(view: View) -> None:
    assert not list(make_allocation_tables(view))
    assert "allocation" not in describe_ground(view)
