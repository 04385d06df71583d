"""Define each reported metric: the number in the log that it comes from, and its series of values over rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from rlk_repro.base.units import group
from rlk_repro.logs.vime import LogSample, ParsedLog, Rows

CLOCKED: Final = "perf/"
"""Prefix of the keys under which vime prints times and rates."""


class LogRow(StrEnum):
    """The kind of a log line.  vime prints STEP lines once per optimizer step, and other kinds once per rollout."""

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

    Each of ``sources`` is the kind of a log line and vime's key in that line.  A ``formula`` computes the metric from
    all sources.  Without a formula, the whole series comes from the first source that the log has, because the sources
    define the metric differently.  ``offset`` is added to the rollout id to find the row.

    No value can be below ``lowest``.  With ``is_positive``, 0 is refused too: a skipped phase may take 0 s, but a whole
    step never does.
    """

    name: str
    unit: str
    better: Better
    sources: tuple[tuple[LogRow, str], ...]
    formula: Callable[..., float | None] | None = None
    offset: int = 0
    lowest: float = -math.inf
    is_positive: bool = False

    def is_impossible(self, key: str, value: float) -> bool:
        """Whether this number is impossible: a time is never NaN, but vime may print a NaN loss for a skipped step."""
        if key.startswith(CLOCKED) and not math.isfinite(value):
            return True
        return value < self.lowest or (self.is_positive and value <= 0)


Samples: TypeAlias = tuple[LogSample | None, ...]
"""One metric's values for rollouts 0, 1, …; None for a rollout without a value."""


def _end_to_end(train_tokens_per_s: float, actor_train_time_s: float, step_time_s: float) -> float | None:
    """Return the tokens per second of the whole step; vime's own figure counts only actor_train_time."""
    return train_tokens_per_s * actor_train_time_s / step_time_s if step_time_s > 0 else None


def _perf(name: str, unit: str, better: Better, key: str, *, offset: int = 0, is_positive: bool = False) -> Metric:
    sources = ((LogRow.PERF, key),)
    return Metric(
        name=name, unit=unit, better=better, sources=sources, offset=offset, lowest=0, is_positive=is_positive
    )


def _step(name: str, key: str, better: Better = Better.NONE, *, lowest: float = -math.inf) -> Metric:
    return Metric(name=name, unit="", better=better, sources=((LogRow.STEP, key),), lowest=lowest)


# vime prints line ``perf N`` after train N, before the next weight sync.  Its update_weights_time is that of the weight
# sync before rollout N.  So line N+1 has the time of the sync after train N, and no line has the time of the last sync.
METRICS: Final[tuple[Metric, ...]] = (
    _perf("step_time_s", "s", Better.LOWER, "perf/step_time", is_positive=True),
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
            (LogRow.PERF, "perf/actor_train_tok_per_s"),
            (LogRow.PERF, "perf/actor_train_time"),
            (LogRow.PERF, "perf/step_time"),
        ),
        formula=_end_to_end,
    ),
    _perf("rollout_tokens_per_gpu_per_s", "tokens/s/GPU", Better.HIGHER, "perf/tokens_per_gpu_per_sec"),
    Metric(name="raw_reward", unit="", better=Better.HIGHER, sources=((LogRow.ROLLOUT, "rollout/raw_reward"),)),
    Metric(
        name="response_length_mean",
        unit="tokens",
        better=Better.NONE,
        sources=((LogRow.ROLLOUT, "rollout/response_lengths"), (LogRow.PERF, "rollout/response_len/mean")),
        lowest=0,
    ),
    Metric(
        name="truncated_ratio",
        unit="",
        better=Better.NONE,
        sources=((LogRow.PERF, "rollout/truncated_ratio"), (LogRow.ROLLOUT, "rollout/truncated")),
        lowest=0,
    ),
    _step("train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff", Better.LOWER, lowest=0),
    _step("loss", "train/loss"),
    _step("pg_loss", "train/pg_loss"),
    _step("kl_loss", "train/kl_loss"),
    _step("ppo_kl", "train/ppo_kl"),
    _step("pg_clipfrac", "train/pg_clipfrac"),
    _step("entropy", "train/entropy_loss"),
    _step("grad_norm", "train/grad_norm"),
)


def metric_series(
    parsed: ParsedLog, num_rollouts: int, num_steps_per_rollout: int, void: Collection[int] = ()
) -> Mapping[str, Samples]:
    """Compute every metric of ``METRICS``, for rollouts ``0 … num_rollouts - 1``.

    A rollout's step metrics need all its ``num_steps_per_rollout`` steps, because a mean over some of the steps is
    another quantity.  A rollout in ``void`` has no metrics.
    """

    def make_series(metric: Metric) -> Samples:
        columns = []
        for row, key in metric.sources:
            found = _find_samples(parsed.rows[row], key, _num_rows(row, num_steps_per_rollout))
            rollout_ids = range(metric.offset, num_rollouts + metric.offset)
            columns.append(tuple(None if item in void else found.get(item) for item in rollout_ids))
        formula = metric.formula
        if formula is None:
            return next((column for column in columns if any(column)), columns[0])
        return tuple(_apply(formula, operands) for operands in zip(*columns, strict=True))

    return {metric.name: make_series(metric) for metric in METRICS}


def find_void_rollouts(parsed: ParsedLog, *, num_steps_per_rollout: int) -> dict[int, str]:
    """Map each rollout with an impossible value to the first such value, which means a wrong clock or a wrong log."""
    found: dict[int, str] = {}
    for metric in METRICS:
        for row, key in metric.sources:
            for index, numbers in parsed.rows[row].items():
                sample = numbers.get(key)
                if sample is not None and metric.is_impossible(key, sample.value):
                    rollout_id = index // _num_rows(row, num_steps_per_rollout)
                    found.setdefault(rollout_id, f"{key} {sample.value:g} on line {sample.line}")
    return dict(sorted(found.items()))


def _find_samples(rows: Rows, key: str, num_rows: int) -> dict[int, LogSample]:
    found = group((index // num_rows, rows[index][key]) for index in sorted(rows) if key in rows[index])
    return {rollout_id: _mean(samples) for rollout_id, samples in found.items() if len(samples) == num_rows}


def _num_rows(row: LogRow, num_steps_per_rollout: int) -> int:
    return num_steps_per_rollout if row is LogRow.STEP else 1


def _mean(samples: list[LogSample]) -> LogSample:
    values = [sample.value for sample in samples]
    is_tame = max(map(abs, values)) < 1e300  # fsum raises on inf - inf and on overflow; sum returns nan or inf
    total = math.fsum(values) if is_tame else sum(values)
    return LogSample(total / len(values), samples[-1].line)


def _apply(formula: Callable[..., float | None], operands: tuple[LogSample | None, ...]) -> LogSample | None:
    present = [sample for sample in operands if sample is not None]
    if len(present) < len(operands):
        return None
    value = formula(*(sample.value for sample in present))
    return None if value is None else LogSample(value, present[-1].line)
