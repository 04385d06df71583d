"""Define the answers that ``replay`` prints with ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlk_repro.base.answer import Answer
from rlk_repro.base.errors import Problem
from rlk_repro.base.findings import Finding
from rlk_repro.replay.compare import Comparison
from rlk_repro.submit.show import DryRun


@dataclass(frozen=True, kw_only=True)
class Reanalysis(Answer):
    level: str
    is_ok: bool
    is_reworded: bool
    bundle_id: str
    verdict: str
    headline: str


@dataclass(frozen=True, kw_only=True)
class Need(Answer):
    where: str
    problem: str
    next: str


@dataclass(frozen=True, kw_only=True)
class Rerun(Answer):
    is_done: bool
    needs: tuple[Need, ...] = ()

    @classmethod
    def stopped(cls, problems: Sequence[Problem]) -> Rerun:
        needs = (Need(where=item.where, problem=str(item).splitlines()[0], next=item.hint or "") for item in problems)
        return cls(is_done=False, needs=tuple(needs))


@dataclass(frozen=True, kw_only=True)
class ReplayStopped(Answer):
    """The answer if the re-analysis gives the sealed result, but the errors that ``rerun`` lists stop the new run."""

    reanalysis: Reanalysis
    rerun: Rerun


@dataclass(frozen=True, kw_only=True)
class Replayed(Comparison):
    reanalysis: Reanalysis
    rerun: Rerun


@dataclass(frozen=True, kw_only=True)
class ReplayDryRun(DryRun):
    drift: tuple[Finding, ...] | None
    parts: tuple[Finding, ...]
    missing: tuple[Finding, ...]
    what_runs: dict[str, str]
    replay_of: str
    reanalysis: Reanalysis
    rerun: Rerun
