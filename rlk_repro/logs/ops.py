"""Reads the ops files of a trial: module timers, peak memory, decisions, call counts.

Damaged lines are rejected with their number and never stop the reading.  No torch here: the files are written by
``integration.decisions``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as record

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import check_schema, decode_json
from rlk_repro.logs.rejects import Reject, RejectLog
from rlk_repro.operators import OPS_SCHEMA
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import DecisionSummary

BASELINE: Final = "baseline"
MAX_LINE_BYTES: Final = 64 << 10
MAX_KERNELS_BYTES: Final = 1 << 20
"""Of the one line that is long: compilers give kernels long names."""
MAX_DECISIONS: Final = 100
MAX_METRICS: Final = 40
"""Names of timers and of memory in a trial.  Each becomes a series over all of its steps."""
MAX_SHOWN_RANKS: Final = 100

Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Rank: TypeAlias = Annotated[int, Field(ge=0, le=10**6)]
Seconds: TypeAlias = Annotated[float, Field(ge=0)]
Timer: TypeAlias = Annotated[str, Field(max_length=100)]
Timers: TypeAlias = Annotated[dict[Timer, Seconds], Field(max_length=64)]
Memory: TypeAlias = Annotated[dict[Timer, Count], Field(max_length=64)]

_DECISION: Final = b'"decision"'
_KERNELS: Final = b'{"event":"kernels",'
# Thousands of steps of many ranks are held at once: slots take a third of a model's memory.
_CONFIG: Final = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
_RECORD: Final[Any] = {"config": _CONFIG, "frozen": True, "slots": True, "kw_only": True}


@record(**_RECORD)
class OpCount:
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


@record(**_RECORD)
class Install:
    """How a rank was set up."""

    event: Literal["install"]
    schema_: Count = Field(alias="schema")
    mode: str
    is_requested: bool
    ops: tuple[str, ...]
    rank: Rank
    world_size: Rank
    trainer: str
    platform: str


@record(**_RECORD)
class Dispatch:
    """What RL-Kernel said of a dispatch of its own."""

    requested_backend: str
    actual_backend: str
    backend_enum: str
    platform: str
    fallback: bool
    prior_rejections: tuple[str, ...]


@record(**_RECORD)
class Decided:
    """What an operator resolved to on a rank."""

    event: Literal["decision"]
    op: str
    implementation: str
    version: str
    reason: str
    is_rl_kernel: bool
    provenance: Dispatch | None = None


@record(**_RECORD)
class Step:
    """One rollout's training on a rank: seconds, bytes, counts, and what was odd about an operator's answers.

    Only a session says ``variant``, None where the step did not begin as one, and ``counts``, torch's own.
    """

    event: Literal["step"]
    step: Count
    timers: Timers
    memory: Memory
    calls: Annotated[dict[Timer, OpCount], Field(max_length=16)]
    odd: Annotated[dict[Timer, str], Field(max_length=16)] = Field(default_factory=dict)
    variant: Literal["baseline", "enabled"] | None = None
    counts: Annotated[dict[Timer, Count], Field(max_length=16)] = Field(default_factory=dict)


@record(**_RECORD)
class Kernels:
    """Names of the kernels that a profiler saw, after the last step."""

    event: Literal["kernels"]
    names: Annotated[tuple[str, ...], FailFast()]


@record(**_RECORD)
class End:
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


class TimerSample(NamedTuple):
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
    timers: Mapping[str, Mapping[int, TimerSample]] = field(default_factory=dict)
    memory: Mapping[str, Mapping[int, TimerSample]] = field(default_factory=dict)
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

    def variant_of(self, step: int) -> str | None:
        """The variant of a session's step; None where the ranks that wrote it do not say the same one."""
        found = {rank.steps[step][1].variant for rank in self.ranks if step in rank.steps}
        return found.pop() if len(found) == 1 else None

    def counts_in(self, step: int) -> dict[str, int]:
        """What torch counted during a session's step: the largest of any rank."""
        found: dict[str, int] = {}
        for rank in self.ranks:
            for name, count in rank.steps[step][1].counts.items() if step in rank.steps else ():
                found[name] = max(found.get(name, 0), count)
        return found

    def decisions(self) -> tuple[DecisionSummary, ...]:
        """Every distinct decision with totals over ranks: calls to what RL-Kernel served, fallbacks to the rest."""
        distinct = {
            (item.op, not item.is_rl_kernel, item.implementation, item.reason): None
            for rank in self.ranks
            for _, item in rank.decisions
        }
        return tuple(
            _summarize(op, implementation, reason, is_rl_kernel=not is_own, total=self.calls.get(op, OpCount()))
            for op, is_own, implementation, reason in sorted(distinct)[:MAX_DECISIONS]
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
    metrics: set[str] = set()
    ranks = tuple(_read_rank(rank, path, metrics) for rank, path in trial_dir.ops_files().items())
    world_size = max((rank.install.world_size for rank in ranks if rank.install), default=0)
    present = {rank.rank for rank in ranks}
    return OpsLog(
        ranks=ranks,
        missing_ranks=tuple(rank for rank in range(world_size) if rank not in present),
        timers=_find_largest(ranks, "timers"),
        memory=_find_largest(ranks, "memory"),
        calls=_add_calls(ranks),
    )


def read_decisions(trial_dir: TrialDir) -> Iterator[Decided]:
    """What operators resolved to, rank by rank; nothing else of the files is looked at.

    Raises:
        BundleUnreadable: a file cannot be read.
    """
    for path in trial_dir.ops_files().values():
        for _, event in islice(_read_events(path, "", RejectLog(), needle=_DECISION), MAX_DECISIONS):
            if isinstance(event, Decided):
                yield event


def _read_rank(rank: int, path: Path, metrics: set[str]) -> RankOps:
    """One file.  ``metrics`` are the names met so far, in this rank and those before."""
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
            case Decided() if len(decisions) < MAX_DECISIONS:
                decisions.append((line, event))
            case Decided():
                rejects.add(line, "more decisions than are read", event.op)
            case Step() if (reason := _find_step_problem(event, steps, metrics)) is not None:
                rejects.add(line, reason, f"step {event.step}")
            case Step():
                metrics.update(event.timers, event.memory)
                steps[event.step] = (line, event)
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


def _find_step_problem(event: Step, steps: Collection[int], metrics: Set[str]) -> str | None:
    if event.step in steps:
        return "step written twice"
    is_full = len(metrics | event.timers.keys() | event.memory.keys()) > MAX_METRICS
    return "more metrics than are read" if is_full else None


def _read_events(path: Path, source: str, rejects: RejectLog, needle: bytes = b"") -> Iterator[tuple[int, Event]]:
    for number, text in _read_lines(path):
        if needle not in text:
            continue
        try:
            limit = MAX_KERNELS_BYTES if text.startswith(_KERNELS) else MAX_LINE_BYTES
            event = _EVENTS.validate_json(text[:limit])
            decode_json(text, limit)  # pydantic does not see a key that is given twice
        except ValueError as error:
            rejects.add(number, "not an event" if text.endswith(b"\n") else "torn line", _describe(error))
            continue
        if isinstance(event, Install):
            check_schema(f"{source}:{number}", {"schema": event.schema_}, OPS_SCHEMA)
        yield number, event


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """With their numbers; of a line that is too long only so much that it can be seen."""
    try:
        with path.open("rb") as stream:
            number = 0
            while text := stream.readline(MAX_KERNELS_BYTES + 1):
                number += 1
                yield number, text
                while len(text) > MAX_KERNELS_BYTES and not text.endswith(b"\n"):
                    text = stream.readline(MAX_KERNELS_BYTES + 1)
    except OSError as error:
        raise BundleUnreadable(Problem(str(path), f"not readable ({error.strerror})")) from error


def _describe(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first: Any = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def _find_largest(ranks: Sequence[RankOps], kind: Literal["timers", "memory"]) -> dict[str, dict[int, TimerSample]]:
    largest: dict[str, dict[int, TimerSample]] = {}
    for rank in ranks:
        for number, (line, step) in rank.steps.items():
            values: Mapping[str, float] = step.timers if kind == "timers" else step.memory
            for metric, value in values.items():
                series = largest.setdefault(metric, {})
                if number not in series or value > series[number].value:
                    series[number] = TimerSample(value=value, rank=rank.rank, source=rank.source, line=line)
    return {metric: dict(sorted(series.items())) for metric, series in sorted(largest.items())}


def _add_calls(ranks: Sequence[RankOps]) -> dict[str, OpCount]:
    total: dict[str, OpCount] = {}
    for rank in ranks:
        for _, step in rank.steps.values():
            for op, count in step.calls.items():
                total[op] = total.get(op, OpCount()) + count
    return dict(sorted(total.items()))
