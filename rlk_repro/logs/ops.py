"""Read the files in a trial's ``ops`` folder, which ``integration.measure.ledger`` writes."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, Literal, NamedTuple

from pydantic import ValidationError

from rlk_repro.base.files import check_schema, decode_json
from rlk_repro.logs.lines import open_log, read_lines
from rlk_repro.logs.ops_lines import EVENTS, Decided, End, Event, Install, Kernels, OpCount, Shadow, Step, Tokens
from rlk_repro.operators import OPS_SCHEMA
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import DecisionSummary

MAX_LINE_BYTES: Final = 64 << 10
MAX_KERNELS_BYTES: Final = 1 << 20
MAX_DECISIONS: Final = 100
MAX_METRICS: Final = 40
MAX_SHADOWS: Final = 64
MAX_DETAIL: Final = 200

_KERNELS: Final = b'{"event":"kernels",'


@dataclass(frozen=True, kw_only=True)
class RankOps:
    rank: int
    source: str
    install: Install | None
    decisions: tuple[Decided, ...]
    steps: Mapping[int, tuple[int, Step]]
    shadows: tuple[Shadow, ...]
    kernels: Kernels | None
    first_reject: str
    num_rejects: Mapping[str, int]


class TimerSample(NamedTuple):
    """The largest value over all ranks of one timer or one memory metric, with this value's file and line."""

    value: float
    source: str
    line: int


@dataclass(frozen=True, kw_only=True)
class OpsLog:
    """``timers`` and ``memory`` map metric -> step -> the largest value over ranks.

    ``energy`` maps step -> joules of all ranks together; a step is absent if the energy of any rank is missing.
    """

    ranks: tuple[RankOps, ...]
    missing_ranks: tuple[int, ...] = ()
    timers: Mapping[str, Mapping[int, TimerSample]] = field(default_factory=dict)
    memory: Mapping[str, Mapping[int, TimerSample]] = field(default_factory=dict)
    calls: Mapping[str, OpCount] = field(default_factory=dict)
    energy: Mapping[int, TimerSample] = field(default_factory=dict)

    @property
    def num_rejects(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for rank in self.ranks:
            total.update(rank.num_rejects)
        return dict(sorted(total.items()))

    def steps(self) -> list[int]:
        return sorted({step for rank in self.ranks for step in rank.steps})

    def calls_in(self, op: str, step: int) -> OpCount:
        found = (rank.steps[step][1].calls.get(op, OpCount()) for rank in self.ranks if step in rank.steps)
        return sum(found, OpCount())

    def count_callers(self, op: str, step: int) -> int:
        """Count the ranks that called an operator in a step."""
        steps = [rank.steps[step][1] for rank in self.ranks if step in rank.steps]
        return sum(record.calls.get(op, OpCount()).calls > 0 for record in steps)

    def tokens(self) -> Iterator[tuple[int, int, Tokens]]:
        """Yield rank, step and record of each step that compares the log-probs of its tokens."""
        for rank in self.ranks:
            for _, step in rank.steps.values():
                if step.agreement is not None:
                    yield rank.rank, step.step, step.agreement

    def variant_of(self, step: int) -> str | None:
        found = {rank.steps[step][1].variant for rank in self.ranks if step in rank.steps}
        return found.pop() if len(found) == 1 else None

    def counts_in(self, step: int) -> dict[str, int]:
        """Return torch's counts in a session's step, such as ``compilations``: each count is the largest over ranks."""
        found: dict[str, int] = {}
        for rank in self.ranks:
            for name, count in rank.steps[step][1].counts.items() if step in rank.steps else ():
                found[name] = max(found.get(name, 0), count)
        return found

    def decisions(self) -> tuple[DecisionSummary, ...]:
        distinct = {
            (item.op, not item.is_served, item.implementation, item.reason): item.is_rl_kernel
            for rank in self.ranks
            for item in rank.decisions
        }
        return tuple(
            DecisionSummary(
                op=op,
                implementation=implementation,
                reason=reason,
                is_rl_kernel=distinct[op, is_own, implementation, reason],
                calls=0 if is_own else self._total(op).calls,
                tokens=0 if is_own else self._total(op).tokens,
                fallbacks=self._total(op).fallbacks if is_own else 0,
            )
            for op, is_own, implementation, reason in sorted(distinct)[:MAX_DECISIONS]
        )

    def _total(self, op: str) -> OpCount:
        return self.calls.get(op, OpCount())


def read_ops(trial_dir: TrialDir, num_steps: int = sys.maxsize) -> OpsLog:
    """Read every rank's ops file; without files the log is empty.

    ``timers`` and ``memory`` have only the ``num_steps`` steps of the plan, because a stranger may write far more.

    Raises:
        BundleUnreadable: a file was written by a newer version.
    """
    metrics: set[str] = set()
    ranks = tuple(_read_rank(rank, path, metrics) for rank, path in trial_dir.ops_files().items())
    world_size = max((rank.install.world_size for rank in ranks if rank.install), default=0)
    present = {rank.rank for rank in ranks}
    missing = tuple(rank for rank in range(world_size) if rank not in present)
    return OpsLog(
        ranks=ranks,
        missing_ranks=missing,
        timers=_find_largest(ranks, "timers", num_steps),
        memory=_find_largest(ranks, "memory", num_steps),
        calls=_add_calls(ranks),
        energy={} if missing else _add_energy(ranks),
    )


def read_decisions(trial_dir: TrialDir) -> Iterator[Decided]:
    """Yield the decisions of every rank without parsing other lines."""
    for path in trial_dir.ops_files().values():
        events = (event for _, event in _read_events(path, path.name, _Rejects(), b'"decision"'))
        yield from islice((event for event in events if isinstance(event, Decided)), MAX_DECISIONS)


class _Rejects:
    def __init__(self) -> None:
        self.first = ""
        self.counts: Counter[str] = Counter()

    def add(self, line: int, reason: str, detail: str) -> None:
        self.first = self.first or f"line {line}: {reason}: {detail[:MAX_DETAIL]}"
        self.counts[reason] += 1


def _read_rank(rank: int, path: Path, metrics: set[str]) -> RankOps:
    source, rejects = f"{path.parent.name}/{path.name}", _Rejects()
    install: Install | None = None
    decisions: list[Decided] = []
    steps: dict[int, tuple[int, Step]] = {}
    shadows: list[Shadow] = []
    kernels: Kernels | None = None
    for line, event in _read_events(path, source, rejects):
        match event:
            case Install() if install is None and event.rank == rank:
                install = event
            case Install():
                rejects.add(line, "another process's line", f"rank {event.rank}")
            case Decided() if len(decisions) < MAX_DECISIONS:
                decisions.append(event)
            case Decided():
                rejects.add(line, "too many decisions", event.op)
            case Step() if (reason := _find_step_problem(event, steps, metrics)) is not None:
                rejects.add(line, reason, f"step {event.step}")
            case Step():
                metrics.update(event.timers, event.memory)
                steps[event.step] = (line, event)
            case Shadow():
                shadows = [*shadows, event][:MAX_SHADOWS]
            case Kernels() | End():
                kernels = event if isinstance(event, Kernels) else kernels
    return RankOps(
        rank=rank,
        source=source,
        install=install,
        decisions=tuple(decisions),
        steps=steps,
        shadows=tuple(shadows),
        kernels=kernels,
        first_reject=rejects.first,
        num_rejects=rejects.counts,
    )


def _find_step_problem(event: Step, steps: Collection[int], metrics: Set[str]) -> str | None:
    if event.step in steps:
        return "step written twice"
    is_full = len(metrics | event.timers.keys() | event.memory.keys()) > MAX_METRICS
    return "too many metrics" if is_full else None


def _read_events(path: Path, source: str, rejects: _Rejects, needle: bytes = b"") -> Iterator[tuple[int, Event]]:
    with open_log(path) as stream:
        for number, text in read_lines(stream, MAX_KERNELS_BYTES):
            if needle not in text:
                continue
            try:
                limit = MAX_KERNELS_BYTES if text.startswith(_KERNELS) else MAX_LINE_BYTES
                event = EVENTS.validate_json(text[:limit])
                decode_json(text, limit)  # pydantic accepts duplicate keys
            except ValueError as error:
                rejects.add(number, "not an event" if text.endswith(b"\n") else "torn line", _describe(error))
                continue
            if isinstance(event, Install):
                check_schema(f"{source}:{number}", {"schema": event.schema_}, OPS_SCHEMA)
            yield number, event


def _describe(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def _find_largest(
    ranks: Sequence[RankOps], kind: Literal["timers", "memory"], num_steps: int
) -> dict[str, dict[int, TimerSample]]:
    largest: dict[str, dict[int, TimerSample]] = {}
    for rank in ranks:
        for number, (line, step) in rank.steps.items():
            if number >= num_steps:
                continue
            values: Mapping[str, float] = step.timers if kind == "timers" else step.memory
            for metric, value in values.items():
                series = largest.setdefault(metric, {})
                if number not in series or value > series[number].value:
                    series[number] = TimerSample(value=value, source=rank.source, line=line)
    return {metric: dict(sorted(series.items())) for metric, series in sorted(largest.items())}


def _add_calls(ranks: Sequence[RankOps]) -> dict[str, OpCount]:
    total: dict[str, list[int]] = {}
    for rank in ranks:
        for _, step in rank.steps.values():
            for op, count in step.calls.items():  # plain numbers: a record for each sum takes most of the reader's time
                sums = total.setdefault(op, [0, 0, 0])
                sums[0] += count.calls
                sums[1] += count.tokens
                sums[2] += count.fallbacks
    return {op: OpCount(calls=sums[0], tokens=sums[1], fallbacks=sums[2]) for op, sums in sorted(total.items())}


def _add_energy(ranks: Sequence[RankOps]) -> dict[int, TimerSample]:
    total: dict[int, TimerSample] = {}
    for number, (line, _) in sorted(ranks[0].steps.items()) if ranks else ():
        parts = [rank.steps[number][1].energy_j for rank in ranks if number in rank.steps]
        known = [part for part in parts if part is not None]
        if len(known) == len(ranks):
            total[number] = TimerSample(math.fsum(known), ranks[0].source, line)
    return total
