"""What an analysis knows of the things that a run measures besides step times.

Each is a module with one function ``read``, listed in ``analyse.MEASURED``; it takes the run's records and returns its
keys of the analysis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlk_repro.analysis.sessions import Session
from rlk_repro.logs.ops_lines import Tokens
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import BlockResult, PairResult, PairStatus, TrialResult, TrialStatus


@dataclass(frozen=True, kw_only=True)
class Records:
    """``tokens`` holds, by trial, the rank, step and record of each step that compares the log-probs of its tokens.

    ``disturbed`` are the pairs during which another run could use the same GPUs, each with a sentence.
    """

    plan: Plan
    run_dir: RunDir
    trials: Sequence[TrialResult]
    pairs: Sequence[PairResult]
    sessions: Sequence[Session]
    blocks: Sequence[BlockResult]
    tokens: Mapping[str, Sequence[tuple[int, int, Tokens]]]
    disturbed: Mapping[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """The trials that ended badly and the pairs that are not scored, each with the reason."""
        bad = [item for item in self.trials if item.status is not TrialStatus.OK]
        lost = [pair for pair in self.pairs if pair.status is not PairStatus.SCORED]
        return [
            *(f"{trial.name}: {trial.status} ({trial.reason})" for trial in bad),
            *(f"pair {pair.pair} {pair.status}: {pair.reason}" for pair in lost),
        ]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one thing adds to an analysis; ``keys`` are those of ``analysis.json``.

    A ``headline`` replaces the verdict on speed, and ``reasons`` explain it.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    headline: str = ""
    reasons: Sequence[str] = ()
