"""Define the lines of an ops file: types are strict, sizes are limited, and fields of a newer version are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, FailFast, Field, TypeAdapter
from pydantic.dataclasses import dataclass as record

from rlk_repro.operators import is_of_other
from rlk_repro.rundir.agreement import NUM_CLASSES, NUM_LOG_PROBS, NUM_POSITIONS

NonNegativeInt: TypeAlias = Annotated[int, Field(ge=0)]
Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Rank: TypeAlias = Annotated[int, Field(ge=0, le=10**6)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=1e100)]  # sums of such values stay finite
Timer: TypeAlias = Annotated[str, Field(max_length=100)]
Timers: TypeAlias = Annotated[dict[Timer, Seconds], Field(max_length=64)]
Memory: TypeAlias = Annotated[dict[Timer, Count], Field(max_length=64)]


# Thousands of steps of many ranks are in memory at once; dataclasses take a third of pydantic models' memory.
RECORD: Final[Any] = {
    "config": ConfigDict(strict=True, extra="ignore", allow_inf_nan=False),
    "frozen": True,
    "slots": True,
    "kw_only": True,
}


@record(**RECORD)
class OpCount:
    """Calls that an operator served, the rows of logits in them, and calls that fell back to the trainer's function."""

    calls: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    fallbacks: NonNegativeInt = 0

    def __add__(self, other: OpCount) -> OpCount:
        return OpCount(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            fallbacks=self.fallbacks + other.fallbacks,
        )


@record(**RECORD)
class Install:
    event: Literal["install"]
    schema_: Count = Field(alias="schema")
    mode: str
    is_requested: bool
    ops: tuple[str, ...]
    rank: Rank
    world_size: Rank
    trainer: str
    platform: str


@record(**RECORD)
class Decided:
    event: Literal["decision"]
    op: str
    implementation: str
    version: str
    reason: str
    is_rl_kernel: bool

    @property
    def is_served(self) -> bool:
        """Whether the operator served calls; a fallback has a reason."""
        return self.is_rl_kernel or is_of_other(self.op, self.reason)


Classes: TypeAlias = Annotated[tuple[Count, ...], Field(min_length=NUM_CLASSES, max_length=NUM_CLASSES)]


@record(**RECORD)
class Largest:
    abs: Seconds
    microbatch: Count
    sample: Count
    position: Count
    token: Count


@record(**RECORD)
class Sums:
    """Sums over tokens: of the log-probs' absolute difference (``abs``), and of two KL estimates (``k1``, ``k3``)."""

    abs: Seconds
    k1: Annotated[float, Field(ge=-1e100, le=1e100)]
    k3: Annotated[float, Field(ge=-1e100, le=1e100)]


@record(**RECORD)
class Tokens:
    """How training and rollout log-probs differ in a step on a rank; ``reason`` says why the difference is unknown."""

    reason: Annotated[str, Field(max_length=200)] = ""
    tokens: Count = 0
    not_finite: Count = 0
    by_position: Annotated[tuple[Classes, ...], Field(max_length=NUM_POSITIONS)] = ()
    by_log_prob: Annotated[tuple[Classes, ...], Field(max_length=NUM_LOG_PROBS)] = ()
    abs_by_position: Annotated[tuple[Seconds, ...], Field(max_length=NUM_POSITIONS)] = ()
    sums: Sums | None = None
    largest: Largest | None = None


@record(**RECORD)
class Step:
    """One rollout's training on a rank: seconds, bytes, counts, and invalid results of operators (``odd``).

    ``variant`` (None if the step did not begin) and ``counts`` (torch's counts, such as ``compilations``) are set in
    sessions only.  ``energy_j`` is the energy of the rank's device; None if it is unknown.
    ``gc_frozen`` is the number of Python objects that ``gc.freeze`` left out of garbage collection after this step.
    """

    event: Literal["step"]
    step: Count
    timers: Timers
    memory: Memory
    calls: Annotated[dict[Timer, OpCount], Field(max_length=16)]
    odd: Annotated[dict[Timer, str], Field(max_length=16)] = Field(default_factory=dict)
    variant: Literal["baseline", "enabled"] | None = None
    counts: Annotated[dict[Timer, Count], Field(max_length=16)] = Field(default_factory=dict)
    energy_j: Seconds | None = None
    gc_frozen: Count | None = None
    agreement: Tokens | None = None


@record(**RECORD)
class Gap:
    """The differences between RL-Kernel and the trainer over ``n`` numbers; a value that is not finite is None."""

    max_abs: Seconds | None
    mean_abs: Seconds | None
    max_abs_baseline: Seconds | None
    n: Count


@record(**RECORD)
class Losses:
    name: Timer
    baseline: float | None
    enabled: float | None


@record(**RECORD)
class Shadow:
    """One microbatch that a rank computed with RL-Kernel and without it, or the ``error`` of this comparison.

    ``calls`` counts RL-Kernel's calls in the comparison; if it is empty, the trainer's function computed both sides.
    """

    event: Literal["shadow"]
    step: Count
    case: Timer
    error: Annotated[str, Field(max_length=1000)] = ""
    calls: Annotated[dict[Timer, OpCount], Field(max_length=16)] = Field(default_factory=dict)
    log_probs: Gap | None = None
    log_probs_no_grad: Gap | None = None
    loss: Losses | None = None
    logits_grad: Gap | None = None


@record(**RECORD)
class Kernels:
    event: Literal["kernels"]
    names: Annotated[tuple[str, ...], FailFast()]


@record(**RECORD)
class End:
    event: Literal["end"]


Event: TypeAlias = Install | Decided | Step | Shadow | Kernels | End
EVENTS: Final[TypeAdapter[Event]] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
