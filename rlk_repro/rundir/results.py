"""Define the values of an analysis.

All values are frozen and survive a round trip through JSON. Times are in seconds, memory is in bytes. A missing number
is None, never 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import check_schema, dump_json
from rlk_repro.base.findings import Finding
from rlk_repro.base.units import count, group
from rlk_repro.operators import is_of_other, name_implementations
from rlk_repro.rundir.agreement import AgreementCheck, AgreementResult
from rlk_repro.rundir.microbatch import MicrobatchResult
from rlk_repro.rundir.operator_results import OperatorResult

SCHEMA: Final = 1
NO_CONTROL_BLOCK: Final = "no control block was planned"
NO_SHADOW_STEP: Final = "no shadow step was planned"
NOTHING_PLANNED: Final = frozenset({NO_CONTROL_BLOCK, NO_SHADOW_STEP})


class TrialStatus(StrEnum):
    """How a trial ended; only a trial with status ``ok`` is scored."""

    OK = "ok"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"
    MISSING = "missing"


class PairStatus(StrEnum):
    """Whether a pair is scored. ``dropped``: a trial of the pair did not finish.

    ``void``: no record proves that one agent ran the planned variants in one allocation, or no block can be used.
    """

    SCORED = "scored"
    VOID = "void"
    DROPPED = "dropped"


ALLOCATED_AGAIN: Final = "repeated allocation"
"""In a block's reason: PyTorch freed memory and allocated again, as the GPU's memory was full."""
LESS_MEMORY: Final = "smaller microbatches, fewer layers or more GPUs"


class GateStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"
    NOT_APPLICABLE = "n/a"
    NOT_PLANNED = "not planned"

    @property
    def word(self) -> str:
        return "does not apply" if self is GateStatus.NOT_APPLICABLE else self.value


class VerdictWord(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not comparable"
    NO_COMPARISON = "no comparison"


class ProofStatus(StrEnum):
    """Whether the planned operators ran in a trial, according to its ops files.

    ``native``: RL-Kernel's operator ran as plain PyTorch (on CPU, or ``logp`` on ROCm), which supports no verdict on
    speed.
    """

    PROVED = "proved"
    NATIVE = "native"
    FALLBACK = "fallback"
    MISSING = "missing"
    NOT_REQUESTED = "not requested"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over the training steps of one trial; line ``lines[i]`` of the file ``source`` holds ``values[i]``."""

    metric: str
    source: str
    values: tuple[float | None, ...]
    lines: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One metric of one trial over its scored steps; percentiles are of Hyndman and Fan's type 7."""

    metric: str
    n: int
    mean: float
    median: float
    stdev: float | None
    minimum: float
    maximum: float
    p50: float | None
    p90: float | None
    p99: float | None
    num_outliers: int


@dataclass(frozen=True, kw_only=True)
class DecisionSummary:
    """The implementation that an operator used in one trial, with numbers summed over ranks."""

    op: str
    implementation: str
    reason: str
    is_rl_kernel: bool
    calls: int
    tokens: int
    fallbacks: int

    @property
    def is_served(self) -> bool:
        return self.is_rl_kernel or is_of_other(self.op, self.reason)


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    index: int
    name: str
    pair: str
    variant: str
    seed: int
    status: TrialStatus
    reason: str
    duration_s: float | None
    num_steps_found: int
    num_steps_expected: int
    proof: ProofStatus
    proof_reason: str
    decisions: tuple[DecisionSummary, ...]
    series: tuple[Series, ...]
    summaries: tuple[Summary, ...]
    rejects: dict[str, int]
    throttled_fraction: float | None

    @property
    def folder(self) -> str:
        """The name of the folder with the trial's files; both variants of a session have one folder."""
        return self.name.partition(":")[0]

    def summary(self, metric: str) -> Summary | None:
        return next((item for item in self.summaries if item.metric == metric), None)

    def get_series(self, metric: str) -> Series | None:
        return next((item for item in self.series if item.metric == metric), None)


@dataclass(frozen=True, kw_only=True)
class PairMetric:
    """One metric of one pair; ``log_ratio`` is ln(second / first), or None if a value is missing or not above 0."""

    metric: str
    first: float | None
    second: float | None
    log_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """One comparison: a pair of trials, or the two variants of a session.

    ``first`` is the baseline. In a control pair, ``second`` is a baseline too, or an enabled trial in which RL-Kernel
    served no call.
    """

    pair: str
    is_control: bool
    control_reason: str
    status: PairStatus
    reason: str
    first: str
    second: str
    order: str
    metrics: tuple[PairMetric, ...]

    @property
    def lacks_memory(self) -> bool:
        """Whether the GPU's memory was full, which is why the pair or session is not scored."""
        ended = f": {TrialStatus.OUT_OF_MEMORY}"
        parts = self.reason.split("; ")
        return any(ALLOCATED_AGAIN in part or part.endswith(ended) for part in parts)

    @property
    def is_counted(self) -> bool:
        """Whether the comparison counts in the effects of enabled against baseline."""
        return self.status is PairStatus.SCORED and not self.is_control

    def metric(self, name: str) -> PairMetric | None:
        return next((item for item in self.metrics if item.metric == name), None)


@dataclass(frozen=True, kw_only=True)
class BlockResult:
    """One block of a session; ``reason`` is empty if the block counts.

    ``log_ratio`` is ln(B / A) of the step time over the scored steps; in the lane ``live`` this value is adjusted for
    the number of tokens. ``first_log_ratio`` is ln(B / A) over the first step of each period. In a control block, A and
    B are both the baseline.
    """

    session: str
    number: int
    order: str
    is_control: bool
    reason: str
    log_ratio: float | None
    first_log_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class ShadowResult:
    """The comparison of one case in a session's shadow steps; each difference is the largest over all ranks.

    ``log_prob_max`` and ``log_prob_mean`` describe the absolute difference of log-probs. ``gradient_share`` is the
    largest difference between the two variants' gradients at the logits, divided by the baseline's largest gradient.
    """

    session: str
    case: str
    num_ranks: int
    error: str
    log_prob_max: float | None
    log_prob_mean: float | None
    gradient_share: float | None


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A paired effect over scored comparisons (pairs or sessions), as the ratio enabled / baseline.

    ``low`` and ``high`` bound ``ratio`` at ``confidence`` (paired t on log ratios). ``p_value`` is the exact two-sided
    sign-flip p, and ``p_floor`` is the smallest value that ``p_value`` can have (2 / 2^n). ``p_t`` is the p of the
    paired t test. ``p_holm`` is ``p_t`` after Holm's correction for the number of secondary metrics.
    """

    metric: str
    role: str
    n: int
    ratio: float | None
    low: float | None
    high: float | None
    confidence: float
    sd_log: float | None
    p_value: float | None
    p_floor: float | None
    p_holm: float | None
    note: str
    p_t: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A condition that a verdict on speed needs: ``estimate`` and its one-sided bounds are compared with ``margin``."""

    name: str
    status: GateStatus
    detail: str
    estimate: float | None
    low: float | None
    high: float | None
    margin: float | None
    n: int

    @property
    def shown(self) -> GateStatus:
        """The status; rules 1 call a gate of which nothing was planned n/a too."""
        is_unplanned = self.status is GateStatus.NOT_APPLICABLE and self.detail in NOTHING_PLANNED
        return GateStatus.NOT_PLANNED if is_unplanned else self.status


def count_gates(gates: Sequence[Gate]) -> str:
    """Return a text like ``7 of 10 gates passed, 3 do not apply``, with the names of open gates."""
    names = group((gate.shown, gate.name) for gate in gates)
    parts = [f"{len(names.get(GateStatus.PASSED, ()))} of {count(len(gates), 'gate')} passed"]
    for status in (GateStatus.FAILED, GateStatus.UNDECIDED, GateStatus.NOT_PLANNED):
        if status in names:
            parts.append(f"{len(names[status])} {status} ({', '.join(names[status])})")
    if number := len(names.get(GateStatus.NOT_APPLICABLE, ())):
        parts.append(f"{number} {'does' if number == 1 else 'do'} not apply")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """The noise of control pairs, as a fraction: the larger absolute value of the ends of their confidence interval."""

    is_measured: bool
    fraction: float | None
    n: int
    note: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The conclusion of a run; ``threshold`` is the smallest effect of interest or the noise floor, whichever is
    larger.
    """

    word: VerdictWord
    headline: str
    reasons: tuple[str, ...]
    threshold: float
    smallest_effect: float
    num_pairs: int
    is_exploratory: bool


@dataclass(frozen=True, kw_only=True)
class Analysis:
    run: str
    run_id: str
    lane: str
    workload: str
    hardware: str
    stack: str
    cluster: str
    experiment_hash: str
    plan_hash: str
    num_pairs_planned: int
    num_control_pairs_planned: int
    num_warmup_steps: int
    num_scored_steps: int
    facts: dict[str, str]
    trials: tuple[TrialResult, ...]
    pairs: tuple[PairResult, ...]
    effects: tuple[Effect, ...]
    noise_floor: NoiseFloor
    gates: tuple[Gate, ...]
    verdict: Verdict
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    operators: tuple[OperatorResult, ...] = ()
    blocks: tuple[BlockResult, ...] = ()
    shadows: tuple[ShadowResult, ...] = ()
    pooled: dict[str, Summary] = dataclasses.field(default_factory=dict)
    agreement: tuple[AgreementResult, ...] = ()
    checks: tuple[AgreementCheck, ...] = ()
    switch: str = ""
    microbatches: tuple[MicrobatchResult, ...] = ()

    @property
    def unit(self) -> str:
        return "session" if self.is_crossover else "pair"

    @property
    def serving(self) -> str:
        """What was to serve the trainer's operators, like ``RL-Kernel``."""
        return name_implementations(item.op for trial in self.trials for item in trial.decisions)

    @property
    def is_crossover(self) -> bool:
        return any(trial.name != trial.folder for trial in self.trials)

    def effect(self, metric: str) -> Effect | None:
        return next((item for item in self.effects if item.metric == metric), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; an optional key with an empty value is left out."""
        fields = _reader().dump_python(self)
        for name in ("operators", "blocks", "shadows", "pooled", "agreement", "checks", "switch", "microbatches"):
            if not fields[name]:
                del fields[name]
        return {"schema": SCHEMA, **fields}

    @cached_property
    def content(self) -> bytes:
        """The bytes of ``analysis.json``."""
        return dump_json(self.to_json())

    @classmethod
    def from_json(cls, value: Any, where: str = "analysis.json") -> Analysis:
        """Rebuild an analysis from JSON; raise BundleUnreadable for a newer schema, or a missing or wrong field."""
        from pydantic import ValidationError

        check_schema(where, value, SCHEMA)
        try:
            analysis: Analysis = _reader().validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            raise BundleUnreadable(Problem(f"{where}: {path}", str(first["msg"]).lower())) from None
        return analysis


@cache
def _reader() -> Any:
    """Return what reads an analysis from JSON and writes it; to make it takes long."""
    from pydantic import TypeAdapter

    return TypeAdapter(Analysis)
