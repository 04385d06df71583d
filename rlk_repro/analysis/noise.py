"""Measure the noise of blocks, below which no interval of a run with the present rules is narrower.

A t interval from a few sessions is too narrow whenever their effects agree by luck.  Reports on bundles of older rules
show the noise beside the sealed interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rlk_repro.analysis.sessions import Session, find_slopes, list_effects, make_session
from rlk_repro.plan import Plan
from rlk_repro.rundir.results import Analysis, Effect, Series
from rlk_repro.schedule import make_schedule
from rlk_repro.statistics.crossover import BlockNoise, measure_noise
from rlk_repro.statistics.stats import to_ratio, two_sided_p


def find_noise(sessions: Sequence[Session], pairs: Sequence[str]) -> dict[str, BlockNoise]:
    """Return, by metric, the noise of the blocks of the sessions that count, which ``pairs`` names."""
    slopes = find_slopes(sessions)
    found: dict[str, list[list[float]]] = {}
    for session in sessions:
        if session.trial.pair not in pairs:
            continue
        for metric, effects in list_effects(session, slopes).items():
            found.setdefault(metric, []).append(effects)
    noise = {metric: measure_noise(effects) for metric, effects in found.items()}
    return {metric: item for metric, item in noise.items() if item is not None}


def restore_noise(plan: Plan, analysis: Analysis) -> dict[str, BlockNoise]:
    """Return the noise of the blocks of a sealed analysis; it is empty for a run without sessions."""
    arms = {trial.name: trial for trial in analysis.trials}
    pairs = {pair.pair: pair for pair in analysis.pairs}
    sessions = []
    for trial in plan.trials if analysis.blocks else ():
        first, second = (arms[name] for name in (pairs[trial.pair].first, pairs[trial.pair].second))
        whole = replace(first, series=tuple(map(_merge, first.series, second.series)))
        schedule = make_schedule(plan.run.measure, trial.seed)
        faults = {item.number: item.reason for item in analysis.blocks if item.session == trial.pair and item.reason}
        rules = plan.run.measure.rules
        sessions.append(make_session(trial, whole, schedule, faults, lane=plan.run.lane, rules=rules))
    return find_noise(sessions, [pair.pair for pair in analysis.pairs if pair.is_counted])


def _merge(first: Series, second: Series) -> Series:
    """Return a whole session's series, of whose steps each arm has those of one variant."""
    pairs = zip(first.values, second.values, strict=True)
    return replace(first, values=tuple(one if other is None else other for one, other in pairs))


def widen(effect: Effect, noise: BlockNoise | None) -> Effect | None:
    """Return the effect with the interval that the noise of blocks alone gives, if it is wider than its own."""
    if noise is None or not effect.ratio or not effect.low or not effect.high:
        return None
    center, half = math.log(effect.ratio), noise.half_width(effect.confidence)
    if 2 * half <= math.log(effect.high / effect.low) + 1e-9:  # an analysis file holds 12 digits of each number
        return None
    return replace(
        effect,
        low=to_ratio(center - half),
        high=to_ratio(center + half),
        sd_log=noise.error * math.sqrt(effect.n),
        p_t=two_sided_p(abs(center) / noise.error, noise.df),
    )
