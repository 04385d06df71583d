"""Reads the ops files of a trial: module timers, peak memory, decisions, call counts; and judges whether RL-Kernel ran.

Damaged lines are rejected with their number and never stop the reading.  No torch here: the files are written by
``integration.decisions``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rlk_repro.files import check_schema
from rlk_repro.logs.rejects import Reject, RejectLog
from rlk_repro.operators import OPERATORS, OPS_SCHEMA, Implementation
from rlk_repro.results import DecisionSummary, ProofStatus
from rlk_repro.rundir import TrialDir

BASELINE: Final = "baseline"

Count: TypeAlias = Annotated[int, Field(ge=0)]
Seconds: TypeAlias = Annotated[float, Field(ge=0)]


class _Event(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class OpCount(_Event):
    """Calls that RL-Kernel served and rows of logits in them; calls it should have served and did not."""

    calls: Count = 0
    tokens: Count = 0
    fallbacks: Count = 0

    def __add__(self, other: OpCount) -> OpCount:
        return OpCount(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            fallbacks=self.fallbacks + other.fallbacks,
        )


class Install(_Event):
    """How a rank was set up."""

    event: Literal["install"]
    schema_: Count = Field(alias="schema")
    mode: str
    is_requested: bool
    ops: tuple[str, ...]
    rank: Count
    world_size: Count
    trainer: str
    platform: str


class Dispatch(_Event):
    """What RL-Kernel said of a dispatch of its own."""

    requested_backend: str
    actual_backend: str
    backend_enum: str
    platform: str
    fallback: bool
    prior_rejections: tuple[str, ...]


class Decided(_Event):
    """What an operator resolved to on a rank."""

    event: Literal["decision"]
    op: str
    implementation: str
    version: str
    reason: str
    is_rl_kernel: bool
    provenance: Dispatch | None = None


class Step(_Event):
    """One rollout's training on a rank: seconds, bytes, counts, and what was odd about an operator's answers."""

    event: Literal["step"]
    step: Count
    timers: dict[str, Seconds]
    memory: dict[str, Count]
    calls: dict[str, OpCount]
    odd: dict[str, str] = {}


class Kernels(_Event):
    """Names of the kernels that a profiler saw, after the last step."""

    event: Literal["kernels"]
    names: tuple[str, ...]


class End(_Event):
    event: Literal["end"]


Event: TypeAlias = Install | Decided | Step | Kernels | End
_EVENTS: Final[TypeAdapter[Event]] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


@dataclass(frozen=True, kw_only=True)
class RankOps:
    """One rank's file.  Each entry of ``decisions`` and ``steps`` comes with its 1-based line."""

    rank: int
    source: str
    install: Install | None
    decisions: tuple[tuple[int, Decided], ...]
    steps: Mapping[int, tuple[int, Step]]
    kernels: Kernels | None
    is_ended: bool
    rejects: tuple[Reject, ...]
    num_rejects: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The value of the rank that had the largest, and where it stands."""

    value: float
    rank: int
    source: str
    line: int


@dataclass(frozen=True, kw_only=True)
class OpsLog:
    """All ranks of a trial.

    ``timers`` and ``memory`` are metric -> step -> the largest value over ranks: a step is as slow as its slowest rank
    and fails where memory is scarcest.  A step that no rank wrote is absent.
    """

    ranks: tuple[RankOps, ...]
    missing_ranks: tuple[int, ...] = ()
    timers: Mapping[str, Mapping[int, Sample]] = field(default_factory=dict)
    memory: Mapping[str, Mapping[int, Sample]] = field(default_factory=dict)
    calls: Mapping[str, OpCount] = field(default_factory=dict)

    @property
    def num_rejects(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for rank in self.ranks:
            total.update(rank.num_rejects)
        return dict(sorted(total.items()))

    def steps(self) -> list[int]:
        return sorted({step for rank in self.ranks for step in rank.steps})

    def calls_in(self, op: str, step: int) -> OpCount:
        """Counts of one operator in one step, over ranks."""
        found = (rank.steps[step][1].calls.get(op, OpCount()) for rank in self.ranks if step in rank.steps)
        return sum(found, OpCount())

    def decisions(self) -> tuple[DecisionSummary, ...]:
        """Every distinct decision with totals over ranks: calls to what RL-Kernel served, fallbacks to the rest."""
        distinct = {
            (item.op, not item.is_rl_kernel, item.implementation, item.reason): None
            for rank in self.ranks
            for _, item in rank.decisions
        }
        return tuple(
            _summarize(op, implementation, reason, is_rl_kernel=not is_own, total=self.calls.get(op, OpCount()))
            for op, is_own, implementation, reason in sorted(distinct)
        )


def _summarize(op: str, implementation: str, reason: str, *, is_rl_kernel: bool, total: OpCount) -> DecisionSummary:
    return DecisionSummary(
        op=op,
        implementation=implementation,
        reason=reason,
        is_rl_kernel=is_rl_kernel,
        calls=total.calls if is_rl_kernel else 0,
        tokens=total.tokens if is_rl_kernel else 0,
        fallbacks=0 if is_rl_kernel else total.fallbacks,
    )


def read_ops(trial_dir: TrialDir) -> OpsLog:
    """Read every rank's ops file; no file at all is an empty log.

    Raises:
        BundleUnreadable: a file was written by a newer version.
    """
    ranks = tuple(_read_rank(rank, path) for rank, path in trial_dir.ops_files().items())
    world_size = max((rank.install.world_size for rank in ranks if rank.install), default=0)
    present = {rank.rank for rank in ranks}
    return OpsLog(
        ranks=ranks,
        missing_ranks=tuple(rank for rank in range(world_size) if rank not in present),
        timers=_find_largest(ranks, "timers"),
        memory=_find_largest(ranks, "memory"),
        calls=_add_calls(ranks),
    )


def _read_rank(rank: int, path: Path) -> RankOps:
    source, rejects = f"{path.parent.name}/{path.name}", RejectLog()
    install: Install | None = None
    decisions: list[tuple[int, Decided]] = []
    steps: dict[int, tuple[int, Step]] = {}
    kernels: Kernels | None = None
    is_ended = False
    for line, event in _read_events(path, source, rejects):
        match event:
            case Install() if install is None and event.rank == rank:
                install = event
            case Install():
                rejects.add(line, "another process's line", f"rank {event.rank}")
            case Decided():
                decisions.append((line, event))
            case Step() if event.step not in steps:
                steps[event.step] = (line, event)
            case Step():
                rejects.add(line, "step written twice", f"step {event.step}")
            case Kernels():
                kernels = event
            case End():
                is_ended = True
    return RankOps(
        rank=rank,
        source=source,
        install=install,
        decisions=tuple(decisions),
        steps=steps,
        kernels=kernels,
        is_ended=is_ended,
        rejects=rejects.kept,
        num_rejects=rejects.totals,
    )


def _read_events(path: Path, source: str, rejects: RejectLog) -> Iterator[tuple[int, Event]]:
    with path.open("rb") as stream:
        for number, text in enumerate(stream, start=1):
            try:
                event = _EVENTS.validate_json(text)
            except ValidationError as error:
                first: Any = error.errors(include_url=False, include_input=False)[0]
                rejects.add(number, "not an event" if text.endswith(b"\n") else "torn line", _describe(first))
                continue
            if isinstance(event, Install):
                check_schema(f"{source}:{number}", {"schema": event.schema_}, OPS_SCHEMA)
            yield number, event


def _describe(error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {error['msg']}" if where else str(error["msg"])


def _find_largest(ranks: Sequence[RankOps], kind: Literal["timers", "memory"]) -> dict[str, dict[int, Sample]]:
    largest: dict[str, dict[int, Sample]] = {}
    for rank in ranks:
        for number, (line, step) in rank.steps.items():
            values: Mapping[str, float] = step.timers if kind == "timers" else step.memory
            for metric, value in values.items():
                series = largest.setdefault(metric, {})
                if number not in series or value > series[number].value:
                    series[number] = Sample(value=value, rank=rank.rank, source=rank.source, line=line)
    return {metric: dict(sorted(series.items())) for metric, series in sorted(largest.items())}


def _add_calls(ranks: Sequence[RankOps]) -> dict[str, OpCount]:
    total: dict[str, OpCount] = {}
    for rank in ranks:
        for _, step in rank.steps.values():
            for op, count in step.calls.items():
                total[op] = total.get(op, OpCount()) + count
    return dict(sorted(total.items()))


@dataclass(frozen=True, kw_only=True)
class OpProof:
    status: ProofStatus
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Whether RL-Kernel ran in a trial: the worst of its operators.  Only ``proved`` may carry a speed verdict.

    ``num_calls`` is what RL-Kernel served in all: 0 in a trial that fell back everywhere.
    """

    status: ProofStatus
    reason: str
    num_calls: int = 0
    by_op: Mapping[str, OpProof] = field(default_factory=dict)


# worst first
_SEVERITY: Final = (ProofStatus.MISSING, ProofStatus.FALLBACK, ProofStatus.NATIVE, ProofStatus.PROVED)


def prove(ops_log: OpsLog, *, variant: str, requested_ops: Sequence[str], platform: str) -> Proof:
    """Judge a trial by its ops files.

    A baseline is ``not requested`` as long as nothing of RL-Kernel is in its files; if there is, it is judged like an
    enabled trial, and any other status says that the baseline is none.
    """
    is_touched = any(rank.install is not None and rank.install.is_requested for rank in ops_log.ranks)
    if variant == BASELINE and not is_touched and not ops_log.decisions():
        foreign = _find_foreign_kernel(ops_log)
        return Proof(status=ProofStatus.MISSING if foreign else ProofStatus.NOT_REQUESTED, reason=foreign)
    gap = _find_gap(ops_log)
    if gap:
        return Proof(status=ProofStatus.MISSING, reason=gap)
    by_op = {op: _prove_op(ops_log, op, platform) for op in requested_ops}
    status = min((item.status for item in by_op.values()), key=_SEVERITY.index, default=ProofStatus.MISSING)
    reasons = [f"{op}: {item.reason}" for op, item in by_op.items() if item.status is status and item.reason]
    num_calls = sum(count.calls for count in ops_log.calls.values())
    return Proof(status=status, reason="; ".join(reasons), num_calls=num_calls, by_op=by_op)


def _find_gap(ops_log: OpsLog) -> str:
    """Why the files as a whole prove nothing; empty where they may."""
    if not ops_log.ranks:
        return "the trainer wrote no ops file"
    if ops_log.missing_ranks:
        return f"no ops file of rank {', '.join(str(rank) for rank in ops_log.missing_ranks)}"
    steps = set(ops_log.steps())
    for rank in ops_log.ranks:
        if rank.rejects:
            return f"{rank.source}: {rank.rejects[0]}"
        if rank.install is None:
            return f"{rank.source}: does not say how the trainer was set up"
        if not rank.install.is_requested:
            return f"{rank.source}: the trainer was started with RL-Kernel off"
        if lacking := steps - set(rank.steps):
            return f"{rank.source}: says nothing of step {min(lacking)}"
    return "" if steps else "no step was recorded"


def _prove_op(ops_log: OpsLog, op: str, platform: str) -> OpProof:
    decisions = [item for rank in ops_log.ranks for _, item in rank.decisions if item.op == op]
    undecided = [rank.rank for rank in ops_log.ranks if all(item.op != op for _, item in rank.decisions)]
    if undecided:
        return OpProof(status=ProofStatus.MISSING, reason=f"no decision on rank {undecided[0]}")
    own = next((item for item in decisions if not item.is_rl_kernel), None)
    if own is not None:
        return OpProof(status=ProofStatus.FALLBACK, reason=own.reason)
    found = {
        item.implementation: OPERATORS[op].find_implementation(platform, item.implementation) for item in decisions
    }
    refused = next((name for name, implementation in found.items() if implementation is None), None)
    if refused is not None:
        return OpProof(status=ProofStatus.FALLBACK, reason=f"{refused} does not count on {platform}")
    if ops_log.calls.get(op, OpCount()).fallbacks:
        return OpProof(status=ProofStatus.FALLBACK, reason=f"{ops_log.calls[op].fallbacks} calls fell back")
    odd = next((f"{rank.source}:{line}: {step.odd[op]}" for rank in ops_log.ranks
                for line, step in rank.steps.values() if op in step.odd), None)  # fmt: skip
    if odd is not None:
        return OpProof(status=ProofStatus.MISSING, reason=odd)
    idle = next((step for step in ops_log.steps() if not ops_log.calls_in(op, step).tokens), None)
    if idle is not None:
        return OpProof(status=ProofStatus.MISSING, reason=f"never called in step {idle}")
    unseen = _find_unseen_kernel(ops_log, found.values())
    if unseen:
        return OpProof(status=ProofStatus.MISSING, reason=unseen)
    is_native = any(implementation is not None and implementation.is_native for implementation in found.values())
    reason = "plain PyTorch, as everywhere on a CPU" if is_native else ""
    return OpProof(status=ProofStatus.NATIVE if is_native else ProofStatus.PROVED, reason=reason)


def _find_foreign_kernel(ops_log: OpsLog) -> str:
    """A kernel of RL-Kernel that a profiler saw in a trial that asked for none; empty if it saw none."""
    known = {
        part for operator in OPERATORS.values() for items in operator.implementations.values()
        for item in items for part in item.kernels
    }  # fmt: skip
    for rank in ops_log.ranks:
        names = rank.kernels.names if rank.kernels is not None else ()
        found = next((name for name in names if any(part in name for part in known)), None)
        if found is not None:
            return f"{rank.source}: RL-Kernel's {found} ran, though it was off"
    return ""


def _find_unseen_kernel(ops_log: OpsLog, implementations: Iterable[Implementation | None]) -> str:
    """Where a profiler looked, it must have seen every kernel of what is said to have run; empty if it did."""
    wanted = [part for item in implementations if item is not None for part in item.kernels]
    for rank in ops_log.ranks:
        names = rank.kernels.names if rank.kernels is not None else None
        absent = [part for part in wanted if names is not None and not any(part in name for name in names)]
        if absent:
            return f"{rank.source}: the profiler saw no {', '.join(absent)}"
    return ""
