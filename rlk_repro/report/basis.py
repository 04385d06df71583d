"""Describe the facts behind a verdict: the effect, the threshold, what could be seen, and what RL-Kernel ran."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from rlk_repro.analysis.memory import judge_memory
from rlk_repro.base.units import find_decimals, format_change, format_interval
from rlk_repro.report.blocks import Facts, make_facts
from rlk_repro.report.operators import describe_operators
from rlk_repro.report.view import View
from rlk_repro.rundir.results import Analysis, Effect, ProofStatus
from rlk_repro.statistics.crossover import MIN_SESSIONS
from rlk_repro.statistics.power import MIN_PAIRS, smallest_effect
from rlk_repro.workloads.differences import describe_differences


def describe_basis(view: View) -> Facts:
    analysis, differences = view.analysis, view.context.differences
    if not view.has_variants:
        return make_facts(*describe_operators(view))
    as_planned = "planned, but not recorded: " if view.context.is_as_planned else ""
    found = [("variants differ in", f"{as_planned}{describe_differences(differences)}")] if differences else []
    found += _describe_speed(view) if view.is_comparison else ()
    return make_facts(*found, (analysis.serving, _describe_proof(analysis)))


def _describe_speed(view: View) -> Iterator[tuple[str, str]]:
    analysis = view.analysis
    effect, noise = analysis.effect(view.primary), view.noise.get(view.primary)
    if effect is not None and noise is not None and effect.sd_log is not None:
        # the noise of blocks sets the least spread of sessions, also where it does not set the interval
        effect = replace(effect, sd_log=max(effect.sd_log, noise.error * math.sqrt(effect.n)))
    if seen := describe_sensitivity(analysis, effect):
        yield "sensitivity", seen
    yield "memory", judge_memory(analysis).sentence


def describe_change(effect: Effect) -> str:
    if effect.ratio is None:
        return "no comparison"
    return format_change(effect.ratio, find_decimals(effect.low, effect.high))


def describe_interval(effect: Effect) -> str:
    return format_interval(effect.low, effect.high)


def describe_confidence(*effects: Effect) -> str:
    return " or ".join(dict.fromkeys(f"{effect.confidence * 100:g} %" for effect in effects))


def describe_sensitivity(analysis: Analysis, effect: Effect | None) -> str:
    least = MIN_SESSIONS if analysis.is_crossover else MIN_PAIRS
    if effect is None or not effect.sd_log or effect.n < least:
        return ""
    spread_pct, threshold_pct = effect.sd_log * 100, analysis.verdict.threshold * 100
    seen = smallest_effect(effect.n, spread_pct, threshold_pct, 1 - effect.confidence, least=least)
    if seen is None:
        return f"no speed-up can be detected: {analysis.unit} effects have a standard deviation of {spread_pct:.3g} %"
    noise = f"with this noise (standard deviation {spread_pct:.3g} %)"
    return f"{noise}, {effect.n} {analysis.unit}s detect a speed-up of {seen * 100:.3g} % in 9 of 10 runs"


def _describe_proof(analysis: Analysis) -> str:
    if analysis.switch and all(trial.proof is ProofStatus.NOT_REQUESTED for trial in analysis.trials):
        return f"off in both variants; they differ in {analysis.switch}"
    found = [trial for trial in analysis.trials if trial.proof is not ProofStatus.NOT_REQUESTED]
    counts = Counter(trial.proof for trial in found)
    parts = [f"{status} in {counts[status]} of {len(found)}" for status in ProofStatus if counts[status]]
    if not parts:
        return "no enabled trial"
    decisions = (decision for trial in found for decision in trial.decisions)
    ran = dict.fromkeys(f"{item.op} by {item.implementation}" for item in decisions if item.is_served and item.calls)
    what = "sessions" if analysis.is_crossover else "enabled trials"
    return f"{', '.join(parts)} {what}{': ' if ran else ''}{', '.join(ran)}"
