"""The values that an analysis holds for operators measured one by one; other modules compute them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

REFERENCE: Final = "vime"
"""Speedups are relative to this implementation: vime's own function without the entropy metric."""


class OperatorStatus(StrEnum):
    """The outcome of one implementation in one case.  ``oom`` is a result; ``blocked`` and ``failed`` have a reason."""

    PASSED = "pass"
    OOM = "oom"
    BLOCKED = "blocked"
    FAILED = "failed"


class OperatorKind(StrEnum):
    """``vime``: vime's own functions; ``fused`` and ``native``: RL-Kernel's, by class; ``peer``: another project's.

    ``unresolved``: RL-Kernel's, but it resolved to no class.
    """

    TRAINER = "vime"
    FUSED = "fused"
    NATIVE = "native"
    PEER = "peer"
    UNRESOLVED = "unresolved"


@dataclass(frozen=True, kw_only=True)
class OperatorCase:
    """The input of an operator's measurement.  ``density`` is the fraction of rows whose value is wanted.

    ``work`` is forward or forward_backward.  Policy losses build their graph in both, log-probs only in
    forward_backward.
    """

    operator: str
    num_tokens: int
    vocab_size: int
    hidden_size: int | None
    dtype: str
    density: float
    work: str


@dataclass(frozen=True, kw_only=True)
class OperatorTrial:
    """One implementation in one case in one process, over the calls of its scored sweeps; numbers are None unless it
    passed.

    ``speedup`` is the median time of vime's own function in the same case and process, divided by this median time.
    ``floor_fraction`` is the shortest possible time on this device, divided by this median.  ``line`` is its first
    line.
    """

    trial: str
    status: OperatorStatus
    reason: str
    num_calls: int
    median_s: float | None
    minimum_s: float | None
    maximum_s: float | None
    mad_s: float | None
    peak_extra_bytes: int | None
    speedup: float | None
    floor_fraction: float | None
    line: int | None


@dataclass(frozen=True, kw_only=True)
class OperatorResult:
    """One implementation in one case.

    ``error`` is the largest difference from float64 over the checked rows; ``gradient_error`` is the largest difference
    of a gradient, as a fraction of the largest gradient element.  Both are the worst of all processes.
    ``process_spread`` is the range of the processes' medians, as a fraction of the smallest.
    """

    case: OperatorCase
    implementation: str
    kind: OperatorKind
    class_name: str
    version: str
    kernels: tuple[str, ...]
    error: float | None
    gradient_error: float | None
    is_repeatable: bool | None
    process_spread: float | None
    trials: tuple[OperatorTrial, ...]

    @property
    def status(self) -> OperatorStatus:
        """The worst status over all processes."""
        order = (OperatorStatus.FAILED, OperatorStatus.OOM, OperatorStatus.BLOCKED)
        found = {trial.status for trial in self.trials}
        return next((status for status in order if status in found), OperatorStatus.PASSED)

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(trial.reason for trial in self.trials if trial.reason))
