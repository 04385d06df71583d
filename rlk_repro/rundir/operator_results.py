"""Define the analysis's results for operators measured one by one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

REFERENCE: Final = "vime"
"""The implementation that speedups are relative to: vime's own function without the entropy metric."""


class OperatorStatus(StrEnum):
    """The outcome of one implementation in one case; ``oom`` is out of memory."""

    PASSED = "pass"
    OOM = "oom"
    BLOCKED = "blocked"
    FAILED = "failed"


class OperatorKind(StrEnum):
    """The origin of an implementation: vime, RL-Kernel (``fused``, ``native``) or another project (``peer``).

    ``unresolved``: RL-Kernel named no class for the operator.
    """

    TRAINER = "vime"
    FUSED = "fused"
    NATIVE = "native"
    PEER = "peer"
    UNRESOLVED = "unresolved"


@dataclass(frozen=True, kw_only=True)
class OperatorCase:
    """The input of an operator's measurement; ``work`` is ``forward`` or ``forward_backward``.

    ``density`` is the fraction of rows whose value the trainer uses.
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
    """The results of one implementation in one case and one process, from its timed calls without warm-up.

    Measured values are None unless the implementation passed. ``speedup`` is the median time of vime's own function in
    the same case and process, divided by ``median_s``. ``floor_fraction`` is the shortest possible time on this device,
    divided by ``median_s``.
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
    """The results of one implementation in one case, from all processes.

    ``error`` is the largest difference from float64 over the checked rows. ``gradient_error`` is the largest difference
    of a gradient, divided by the largest gradient element. ``process_spread`` is the range of the processes' medians,
    divided by the smallest median.
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
        order = (OperatorStatus.FAILED, OperatorStatus.OOM, OperatorStatus.BLOCKED)
        found = {trial.status for trial in self.trials}
        return next((status for status in order if status in found), OperatorStatus.PASSED)

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(trial.reason for trial in self.trials if trial.reason))
