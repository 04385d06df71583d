"""Add up, for each variant, how the log-probs of training and rollout differ token by token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rlk_repro.analysis.measured import Measured, Records
from rlk_repro.logs.ops_lines import Tokens
from rlk_repro.rundir.agreement import LADDER, NUM_CLASSES, NUM_LOG_PROBS, AgreementResult, LargestDifference
from rlk_repro.spec.values import BASELINE, ENABLED

Table = tuple[tuple[int, ...], ...]


class _Found(NamedTuple):
    place: str
    step: tuple[str, int]
    tokens: Tokens


def read(records: Records) -> Measured:
    """Summarise, for each variant, the tokens of the scored steps of the trials that count."""
    plan = records.plan
    scored = {pair.pair for pair in records.pairs if pair.is_counted}
    sessions = {session.trial.name: session for session in records.sessions}
    by_variant: dict[str, list[_Found]] = {BASELINE: [], ENABLED: []}
    for trial in plan.trials if plan.run.workload.has_variants else ():
        if trial.pair not in scored:
            continue
        session = sessions.get(trial.name)
        if session is None:
            steps = set(range(plan.run.measure.warmup_steps, plan.num_steps))
        else:
            steps = set(session.schedule.list_compared(session.faults))
        for rank, step, tokens in records.tokens[trial.name]:
            if step in steps:
                variant: str = trial.variant if session is None else session.schedule.variant_of(step)
                place = f"{trial.name}, step {step}, rank {rank}"
                by_variant[variant].append(_Found(place, (trial.name, step), tokens))
    results = [_add_up(variant, items) for variant, items in by_variant.items() if items]
    return Measured(keys={"agreement": tuple(results)})


def _add_up(variant: str, found: Sequence[_Found]) -> AgreementResult:
    known = [item for item in found if not item.tokens.reason]
    tables = [item.tokens for item in known]
    number = sum(item.tokens for item in tables)
    by_position = _add_tables([item.by_position for item in tables], 0)
    by_log_prob = _add_tables([item.by_log_prob for item in tables], NUM_LOG_PROBS if tables else 0)
    totals = [sum(column) for column in zip(*by_log_prob, strict=True)] or [0] * NUM_CLASSES
    sums = [item.sums for item in tables if item.sums is not None]
    reasons = sorted({item.tokens.reason for item in found} - {""})
    return AgreementResult(
        variant=variant,
        num_steps=len({item.step for item in known}),
        num_tokens=number,
        num_not_finite=sum(item.not_finite for item in tables),
        beyond=tuple(sum(totals[index:]) for index in range(1, NUM_CLASSES)),
        mean_abs=_mean([item.abs for item in sums], number),
        k1=_mean([item.k1 for item in sums], number),
        k3=_mean([item.k3 for item in sums], number),
        largest=_find_largest(known),
        by_position=by_position,
        mean_by_position=tuple(_find_means([item.abs_by_position for item in tables], by_position)),
        by_log_prob=by_log_prob,
        reason="; ".join(reasons),
    )


def _mean(values: Iterable[float], number: int) -> float | None:
    return math.fsum(values) / number if number else None


def _add_tables(tables: Sequence[Table], num_rows: int) -> Table:
    num_rows = max([num_rows, *map(len, tables)])
    rows = ([table[index] for table in tables if index < len(table)] for index in range(num_rows))
    return tuple(tuple(map(sum, zip(*row, strict=True))) if row else (0,) * NUM_CLASSES for row in rows)


def _find_means(sums: Sequence[Sequence[float]], table: Table) -> Iterator[float | None]:
    for index, row in enumerate(table):
        yield _mean([part[index] for part in sums if index < len(part)], sum(row))


def _find_largest(found: Sequence[_Found]) -> LargestDifference | None:
    best = max(
        (item for item in found if item.tokens.largest is not None),
        key=lambda item: item.tokens.largest.abs if item.tokens.largest else 0.0,
        default=None,
    )
    if best is None or best.tokens.largest is None or best.tokens.largest.abs <= LADDER[0]:
        return None
    largest = best.tokens.largest
    return LargestDifference(
        abs_difference=largest.abs,
        place=f"{best.place}, microbatch {largest.microbatch}, sample {largest.sample}",
        position=largest.position,
        token=largest.token,
    )
