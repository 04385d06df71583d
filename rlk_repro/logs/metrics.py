"""The product's metrics: which printed number each one is, and the series per rollout.

Pure data and arithmetic over a ``ParsedLog``; percentiles, warm-up and comparisons belong to the analysis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rlk_repro.logs.vime import ParsedLog, Rows, Sample


class Row(StrEnum):
    """The kind of line a number is printed in.  STEP is one per optimizer step, the others one per rollout."""

    STEP = "step"
    ROLLOUT = "rollout"
    PERF = "perf"


class Better(StrEnum):
    LOWER = "lower"
    HIGHER = "higher"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One reported metric.

    ``sources`` are (row, vime's key).  Without a ``formula`` they are alternatives: the first one that the log holds
    at all serves the whole series, because alternatives are not defined alike.  With a ``formula`` all of them are its
    operands, and the value carries the last operand's line.  Numbers of STEP rows are averaged over the steps of the
    rollout.  ``offset`` is added to the rollout id to find the row.
    """

    name: str
    unit: str
    better: Better
    sources: tuple[tuple[Row, str], ...]
    formula: Callable[..., float | None] | None = None
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric by rollout id 0, 1, …; ``None`` where it is not recorded."""

    metric: Metric
    samples: tuple[Sample | None, ...]


def _end_to_end(train_tokens_per_s: float, actor_train_time_s: float, step_time_s: float) -> float | None:
    """vime divides a rollout's tokens by actor_train_time; this is the same tokens over the whole step."""
    return train_tokens_per_s * actor_train_time_s / step_time_s if step_time_s > 0 else None


def _perf(name: str, unit: str, better: Better, key: str, *, offset: int = 0) -> Metric:
    return Metric(name=name, unit=unit, better=better, sources=((Row.PERF, key),), offset=offset)


def _step(name: str, key: str, better: Better = Better.NONE) -> Metric:
    return Metric(name=name, unit="", better=better, sources=((Row.STEP, key),))


# perf line N is printed at the end of train N, before the weight sync that follows it.  The update_weights_time in it
# is the sync between train N-1 and rollout N: the sync that followed train N is in line N+1, the last one in none.
METRICS: Final[tuple[Metric, ...]] = (
    _perf("step_time_s", "s", Better.LOWER, "perf/step_time"),
    _perf("train_time_s", "s", Better.LOWER, "perf/train_time"),
    _perf("train_wait_time_s", "s", Better.LOWER, "perf/train_wait_time"),
    _perf("actor_train_time_s", "s", Better.LOWER, "perf/actor_train_time"),
    _perf("log_probs_time_s", "s", Better.LOWER, "perf/log_probs_time"),
    _perf("ref_log_probs_time_s", "s", Better.LOWER, "perf/ref_log_probs_time"),
    _perf("rollout_time_s", "s", Better.LOWER, "perf/rollout_time"),
    _perf("weight_sync_time_s", "s", Better.LOWER, "perf/update_weights_time", offset=1),
    _perf("train_tokens_per_s", "tokens/s", Better.HIGHER, "perf/actor_train_tok_per_s"),
    Metric(
        name="tokens_per_s",
        unit="tokens/s",
        better=Better.HIGHER,
        sources=(
            (Row.PERF, "perf/actor_train_tok_per_s"),
            (Row.PERF, "perf/actor_train_time"),
            (Row.PERF, "perf/step_time"),
        ),
        formula=_end_to_end,
    ),
    _perf("rollout_tokens_per_gpu_per_s", "tokens/s/GPU", Better.HIGHER, "perf/tokens_per_gpu_per_sec"),
    Metric(name="raw_reward", unit="", better=Better.HIGHER, sources=((Row.ROLLOUT, "rollout/raw_reward"),)),
    Metric(
        name="response_length_mean",
        unit="tokens",
        better=Better.NONE,
        sources=((Row.ROLLOUT, "rollout/response_lengths"), (Row.PERF, "rollout/response_len/mean")),
    ),
    Metric(
        name="truncated_ratio",
        unit="",
        better=Better.NONE,
        sources=((Row.PERF, "rollout/truncated_ratio"), (Row.ROLLOUT, "rollout/truncated")),
    ),
    _step("train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff", Better.LOWER),
    _step("loss", "train/loss"),
    _step("pg_loss", "train/pg_loss"),
    _step("kl_loss", "train/kl_loss"),
    _step("ppo_kl", "train/ppo_kl"),
    _step("pg_clipfrac", "train/pg_clipfrac"),
    _step("entropy", "train/entropy_loss"),
    _step("grad_norm", "train/grad_norm"),
)


def metric_series(parsed: ParsedLog, *, num_rollouts: int, num_steps_per_rollout: int) -> Mapping[str, Series]:
    """Every metric of ``METRICS`` by name, for rollouts ``0 … num_rollouts - 1``.

    A rollout's step metrics need all its ``num_steps_per_rollout`` steps: the mean of some of them is another quantity.
    The line is that of the last step.  NaN printed by vime stays NaN.
    """

    def make_series(metric: Metric) -> Series:
        columns = [
            tuple(_samples(parsed, row, key, metric.offset, num_rollouts, num_steps_per_rollout))
            for row, key in metric.sources
        ]
        if metric.formula is None:
            chosen = next((column for column in columns if any(column)), columns[0])
        else:
            formula = metric.formula
            chosen = tuple(_apply(formula, operands) for operands in zip(*columns, strict=True))
        return Series(metric=metric, samples=chosen)

    return {metric.name: make_series(metric) for metric in METRICS}


def _samples(
    parsed: ParsedLog, row: Row, key: str, offset: int, num_rollouts: int, num_steps_per_rollout: int
) -> Iterator[Sample | None]:
    rows = _rows(parsed, row)
    num_rows = num_steps_per_rollout if row is Row.STEP else 1
    for rollout_id in range(offset, num_rollouts + offset):
        first = rollout_id * num_rows
        found = [rows[index][key] for index in range(first, first + num_rows) if key in rows.get(index, {})]
        yield _mean(found) if len(found) == num_rows else None


def _rows(parsed: ParsedLog, row: Row) -> Rows:
    return {Row.STEP: parsed.step_rows, Row.ROLLOUT: parsed.rollout_rows, Row.PERF: parsed.perf_rows}[row]


def _mean(samples: list[Sample]) -> Sample:
    values = [sample.value for sample in samples]
    is_tame = max(map(abs, values)) < 1e300  # fsum raises on inf - inf and on overflow; sum says nan or inf
    total = math.fsum(values) if is_tame else sum(values)
    return Sample(total / len(values), samples[-1].line)


def _apply(formula: Callable[..., float | None], operands: tuple[Sample | None, ...]) -> Sample | None:
    present = [sample for sample in operands if sample is not None]
    if len(present) < len(operands):
        return None
    value = formula(*(sample.value for sample in present))
    return None if value is None else Sample(value, present[-1].line)
