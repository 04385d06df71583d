"""Decide whether enabled has a smaller peak of allocated memory in a step than baseline.

Reports compute this verdict from the analysis, so reports on older bundles show it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rlk_repro.analysis.gates import ACTIVE, BLOCKS, MANIFESTS, PAIRS, SESSIONS
from rlk_repro.base.units import format_change, format_interval, format_number, name_some
from rlk_repro.rundir.results import Analysis, GateStatus, TrialStatus, VerdictWord
from rlk_repro.statistics.stats import PEAK_MEMORY, Place, place_interval


class MemoryWord(StrEnum):
    SMALLER = "smaller"
    LARGER = "larger"
    SAME = "same memory"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class MemoryVerdict:
    word: MemoryWord
    sentence: str


WORDS: Final = {
    Place.BELOW: (MemoryWord.SMALLER, "enabled's peak is lower by more than"),
    Place.ABOVE: (MemoryWord.LARGER, "enabled's peak is higher by more than"),
    Place.WITHIN: (MemoryWord.SAME, "the variants differ by less than"),
    Place.ACROSS: (MemoryWord.INCONCLUSIVE, "too noisy to tell whether the change is within or beyond"),
}
NEEDED: Final = frozenset({PAIRS, SESSIONS, BLOCKS, MANIFESTS, PEAK_MEMORY})
"""Gates without whose decision memory is not judged either."""
NOT_RESERVED: Final = "; to compare reserved memory too, use --set measure.design=parallel"


def judge_memory(analysis: Analysis) -> MemoryVerdict:
    effect = analysis.effect(PEAK_MEMORY)
    if effect is None or effect.ratio is None or effect.low is None or effect.high is None:
        return MemoryVerdict(word=MemoryWord.INCONCLUSIVE, sentence="inconclusive: peak memory has no interval")
    size = f"peak memory {format_change(effect.ratio)} ({format_interval(effect.low, effect.high)})"
    if reason := _find_obstacle(analysis):
        return MemoryVerdict(word=MemoryWord.INCONCLUSIVE, sentence=f"inconclusive: {reason}; {size}")
    smallest = analysis.verdict.smallest_effect
    word, meaning = WORDS[place_interval(effect, beyond=smallest, within=smallest)]
    sentence = f"{word}: {meaning} {format_number(100 * smallest, 3)} %; {size}"
    return MemoryVerdict(word=word, sentence=sentence + (NOT_RESERVED if analysis.is_crossover else ""))


def _find_obstacle(analysis: Analysis) -> str:
    failed = {gate.name for gate in analysis.gates if gate.status is GateStatus.FAILED}
    if analysis.verdict.word is VerdictWord.NOT_COMPARABLE and failed != {PEAK_MEMORY}:
        return "the variants are not comparable"
    active = next((gate for gate in analysis.gates if gate.name == ACTIVE), None)
    if active is None or active.status not in {GateStatus.PASSED, GateStatus.NOT_APPLICABLE}:
        return f"{analysis.serving} is not proved to have run"
    if full := [trial.name for trial in analysis.trials if trial.status is TrialStatus.OUT_OF_MEMORY]:
        return f"{name_some(full)} ran out of memory"
    undecided = [gate.name for gate in analysis.gates if gate.name in NEEDED and gate.status is GateStatus.UNDECIDED]
    return f"undecided gates: {name_some(undecided)}" if undecided else ""
