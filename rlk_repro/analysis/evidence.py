"""The values of a run from which gates and verdict are decided."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlk_repro.base.findings import Finding
from rlk_repro.operators import RL_KERNEL, TITLES
from rlk_repro.rundir.results import (
    BlockResult,
    Gate,
    GateStatus,
    PairResult,
    PairStatus,
    ProofStatus,
    ShadowResult,
    TrialResult,
)
from rlk_repro.spec import Lane, Measure
from rlk_repro.spec.values import CROSSOVER, ENABLED
from rlk_repro.statistics.crossover import BlockNoise


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The values of a run from which gates and verdict are decided.

    Attributes:
        differences: differences of the variants outside the declared switches.
        missing: absent records of scored pairs; without these records the variants cannot be compared.
        disturbed: the pairs during which another run could use the same GPUs.
        switch: the setting in which the variants differ, if it is not RL-Kernel; else empty.
        title: the plan's ``implementation_title``.
        serving: what must be proved to have run.
        noise: the noise of blocks by metric, which limits the intervals; empty under rules 1.
    """

    measure: Measure
    lane: Lane
    workload: str = ""
    pairs: Sequence[PairResult]
    trials: Mapping[str, TrialResult]
    differences: Sequence[Finding]
    missing: Sequence[str] = ()
    disturbed: Collection[str] = ()
    blocks: Sequence[BlockResult] = ()
    shadows: Sequence[ShadowResult] = ()
    switch: str = ""
    title: str = ""
    serving: str = TITLES[RL_KERNEL]
    has_rollout_log_probs: bool = True
    noise: Mapping[str, BlockNoise] = field(default_factory=dict)

    @property
    def is_crossover(self) -> bool:
        return self.measure.design == CROSSOVER

    @property
    def not_planned(self) -> GateStatus:
        """The status of a gate of which the run planned nothing."""
        return GateStatus.NOT_PLANNED if self.measure.rules > 1 else GateStatus.NOT_APPLICABLE

    @property
    def unit(self) -> str:
        return "session" if self.is_crossover else "pair"

    @property
    def scored(self) -> list[PairResult]:
        return [pair for pair in self.pairs if pair.is_counted]

    @property
    def scored_trials(self) -> list[str]:
        return [name for pair in self.scored for name in (pair.first, pair.second)]

    @property
    def controls(self) -> list[PairResult]:
        return [pair for pair in self.pairs if pair.status is PairStatus.SCORED and pair.is_control]

    @property
    def comparisons(self) -> list[PairResult]:
        """The pairs that were planned to compare the variants, with any status."""
        enabled = {trial.name for trial in self.trials.values() if trial.variant == ENABLED}
        return [pair for pair in self.pairs if not pair.is_control or pair.second in enabled]

    @property
    def fallen_back(self) -> list[PairResult]:
        """The comparisons whose enabled trial used the trainer's own functions: they count as control pairs."""
        return [pair for pair in self.comparisons if pair.status is PairStatus.SCORED and pair.is_control]

    @property
    def num_planned(self) -> int:
        planned = self.measure.sessions if self.is_crossover else self.measure.pairs
        return max(planned, len(self.comparisons)) if self.comparisons else 0

    def proof(self, pair: PairResult) -> ProofStatus:
        return self.trials[pair.second].proof if pair.second in self.trials else ProofStatus.MISSING

    def blocks_of(self, *, is_control: bool) -> list[BlockResult]:
        names = {pair.pair for pair in self.scored}
        return [block for block in self.blocks if block.session in names and block.is_control is is_control]


def list_log_ratios(pairs: Sequence[PairResult], metric: str) -> list[float]:
    """Return this metric's log ratios of the pairs that have one."""
    items = [pair.metric(metric) for pair in pairs]
    return [item.log_ratio for item in items if item is not None and item.log_ratio is not None]


def plain_gate(name: str, status: GateStatus, detail: str, n: int) -> Gate:
    return Gate(name=name, status=status, detail=detail, estimate=None, low=None, high=None, margin=None, n=n)
