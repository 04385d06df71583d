"""Measure the noise of blocks, below which no interval of a run with the present rules is narrower.

A t interval from a few sessions is too narrow whenever their effects agree by luck.  Reports on bundles of older rules
show the noise beside the sealed interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlk_repro.analysis.sessions import Session, find_slopes, list_effects, make_session
from rlk_repro.plan import Plan
from rlk_repro.rundir.results import Analysis, TrialResult
from rlk_repro.schedule import make_schedule
from rlk_repro.statistics.crossover import BlockNoise, measure_noise


def find_noise(sessions: Sequence[Session], pairs: Sequence[str]) -> dict[str, BlockNoise]:
    """Return, by metric, the noise of the blocks of the sessions that count, which ``pairs`` names."""
    slopes = find_slopes(sessions)
    found: dict[str, list[list[float]]] = {}
    for session in sessions:
        for metric, effects in list_effects(session, slopes).items() if session.trial.pair in pairs else ():
            found.setdefault(metric, []).append(effects)
    noise = {metric: measure_noise(effects) for metric, effects in found.items()}
    return {metric: item for metric, item in noise.items() if item is not None}


def restore_noise(plan: Plan, analysis: Analysis) -> dict[str, BlockNoise]:
    """Return the noise of the blocks of a sealed analysis; it is empty for a run without sessions."""
    arms = {trial.name: trial for trial in analysis.trials}
    pairs = {pair.pair: pair for pair in analysis.pairs}
    sessions = []
    for trial in plan.trials if analysis.blocks else ():
        pair = pairs[trial.pair]
        faults = {block.number: block.reason for block in analysis.blocks if block.session == trial.pair}
        sessions.append(
            make_session(
                trial,
                _merge(arms[pair.first], arms[pair.second]),
                make_schedule(plan.run.measure, trial.seed),
                {number: reason for number, reason in faults.items() if reason},
                lane=plan.run.lane,
                rules=plan.run.measure.rules,
            )
        )
    return find_noise(sessions, [pair.pair for pair in analysis.pairs if pair.is_counted])


def _merge(first: TrialResult, second: TrialResult) -> TrialResult:
    """Return the whole session, of whose steps each arm has those of one variant."""
    others = {item.metric: item.values for item in second.series}
    series = []
    for item in first.series:
        pairs = zip(item.values, others.get(item.metric, item.values), strict=True)
        series.append(replace(item, values=tuple(one if other is None else other for one, other in pairs)))
    return replace(first, name=first.folder, series=tuple(series))
