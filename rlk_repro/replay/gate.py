"""Decide ``diff --gate``, for continuous integration: whether a later result is worse than a reference.

Unlike a replay, the later result may come from other commits of vime, RL-Kernel or this tool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.answer import Answer
from rlk_repro.base.findings import Level, diff_values, has_blocking
from rlk_repro.base.units import format_number
from rlk_repro.bundle.seal import open_bundle
from rlk_repro.plan import Plan
from rlk_repro.replay.compare import MOST_MARGIN, changes_nothing, compare_speed, find_other_hardware
from rlk_repro.replay.recorded import CONTRADICTS, read_result, require_intact
from rlk_repro.rundir.results import Analysis
from rlk_repro.spec.values import dump_model

SAME: Final = (
    *("run", "lane", "design", "period_steps", "layout", "entropy_metric", "gc_freeze", "rl_kernel", "switch"),
    "workload",
)
"""Keys that must be equal in both runs."""
MOST_SHOWN: Final = 3


@dataclass(frozen=True, kw_only=True)
class DiffGate(Answer):
    """The gate is open if the later result is comparable with the reference and not shown to be worse."""

    is_open: bool
    line: str
    reference_verdict: str
    later_verdict: str


def judge_gate(reference: Path, later: Path) -> DiffGate:
    """Compare the later result's step time ratio (enabled / baseline) with the reference's.

    The later result is worse if its ratio is higher, the 95 % interval of the difference excludes 0, and the difference
    exceeds the replay margin of the reference.
    """
    sources = (reference, later)
    ids = [require_intact(source) for source in sources]
    with open_bundle(reference, ids[0]) as first, open_bundle(later, ids[1]) as second:
        plans = [Plan.load(run_dir.plan) for run_dir in (first, second)]
        (was, left), (now, right) = map(read_result, (first, second), sources, ids)
    doubts = [
        f"{source} {doubt}"
        for source, context in ((reference, left), (later, right))
        for doubt, is_so in (("is not sealed", not context.is_sealed), (CONTRADICTS, has_blocking(context.findings)))
        if is_so
    ]
    obstacles = [*doubts, *_find_obstacles(plans, was, now)]
    return judge_analyses(was, now, plans[0].run.measure.replay_margin, obstacles)


def judge_analyses(was: Analysis, now: Analysis, margin: float, obstacles: Sequence[str] = ()) -> DiffGate:
    margin = min(margin, MOST_MARGIN)
    if obstacles:
        is_open, text = False, f"the results cannot be judged: {'; '.join(obstacles[:MOST_SHOWN])}"
    else:
        is_open, text = _judge(was, now, margin)
    return DiffGate(
        is_open=is_open,
        line=f"gate {'open' if is_open else 'closed'}: {text}",
        reference_verdict=was.verdict.word.value,
        later_verdict=now.verdict.word.value,
    )


def _judge(was: Analysis, now: Analysis, margin: float) -> tuple[bool, str]:
    speed = compare_speed(was, now)
    if speed is None:
        return False, "the results cannot be judged: a step time ratio has no interval"
    difference, old, new = speed
    figures = f"step time ratio {old} in the reference, {new} in the later result; {difference}"
    limit = f"{format_number(100 * margin)} %"
    if difference.estimate > 0 and difference.is_beyond(margin):
        return False, f"the later result is worse by more than {limit}: {figures}"
    if difference.estimate + difference.half_width > math.log1p(margin):
        return True, f"it is undecided whether the later result is worse by more than {limit}: {figures}"
    return True, f"the later result is not worse by more than {limit}: {figures}"


def _find_obstacles(plans: Sequence[Plan], was: Analysis, now: Analysis) -> Iterator[str]:
    old, new = (_list_same(plan) for plan in plans)
    for item in diff_values("run", old, new, Level.BLOCKING):
        if not changes_nothing(item, *plans):
            yield f"{item.where}: {item.expected} in the reference, {item.found} in the later result"
    yield from find_other_hardware(was, now)
    for which, result in (("reference", was), ("later result", now)):
        if not result.verdict.word.is_of_speed:
            yield f"the {which} has the verdict {result.verdict.word}"


def _list_same(plan: Plan) -> dict[str, Any]:
    run = dump_model(plan.run)
    run["layout"] = dump_model(plan.run.layouts[plan.hardware.hardware])
    run["design"] = plan.run.measure.design
    run["period_steps"] = plan.run.measure.period_steps if plan.is_crossover else None
    return {key: run.get(key) for key in SAME}
