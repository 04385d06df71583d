"""Choose the label, unit and number of decimals of each metric, and escape invisible characters."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from rlk_repro.base.escapes import printable
from rlk_repro.base.units import GIB, format_number
from rlk_repro.logs.metrics import METRICS
from rlk_repro.rundir.results import Analysis, Summary

NOT_RECORDED: Final = "not recorded"
SIGNIFICANT: Final = 4
NBSP: Final = "\N{NO-BREAK SPACE}"
_SHORT_S: Final = 1.0
_UNITS: Final = re.compile(r"(?<=\d) (?=(?:%|µs|ms|s|GiB|MiB|J)(?!\w))|(?<=\bn) (?== )|(?<=\bn =) ")

_LABELS: Final[dict[str, str]] = {
    "step_time_s": "step time",
    "train_time_s": "train time",
    "train_wait_time_s": "train wait time",
    "actor_train_time_s": "actor train time",
    "log_probs_time_s": "log-prob pass time",
    "ref_log_probs_time_s": "reference log-prob pass time",
    "rollout_time_s": "rollout time",
    "weight_sync_time_s": "weight sync time",
    "train_tokens_per_s": "training throughput",
    "tokens_per_s": "throughput",
    "rollout_tokens_per_gpu_per_s": "rollout throughput",
    "response_length_mean": "mean response length",
    "truncated_ratio": "truncated ratio",
    "pg_loss": "policy loss",
    "kl_loss": "KL loss",
    "pg_clipfrac": "clipped fraction",
    "grad_norm": "gradient norm",
    "peak_memory_bytes": "peak memory",
    "peak_memory_in_forward_only_bytes": "peak memory, passes without gradient",
    "peak_memory_in_update_bytes": "peak memory, update",
    "energy_j": "energy of a step",
    "module_log_probs_forward_s": "log-prob, forward",
    "module_log_probs_backward_s": "log-prob, backward",
    "module_log_probs_no_grad_s": "log-prob, no grad",
    "module_clip_kl_forward_s": "clip and KL, forward",
    "module_clip_kl_backward_s": "clip and KL, backward",
    "module_grpo_loss_forward_s": "GRPO loss, forward",
    "module_grpo_loss_backward_s": "GRPO loss, backward",
    "module_optimizer_s": "optimizer",
    "module_step_s": "whole step, by the host's clock",
}
# Older sealed analyses call these metrics by an earlier name, which is the key; the value is the present name.
_TODAY: Final[dict[str, str]] = {
    "module_ratio_kl_forward_s": "module_clip_kl_forward_s",
    "module_ratio_kl_backward_s": "module_clip_kl_backward_s",
}
# Labels of pass times in runs that call only the loss functions; there a pass computes less than in a training step.
_LABELS_OF: Final[dict[str, dict[str, str]]] = {
    "module": {
        "actor_train_time_s": "GRPO loss, forward and backward",
        "log_probs_time_s": "old-policy pass",
        "ref_log_probs_time_s": "reference pass",
    }
}
# Metrics that a workload does not have, or has under another name.  A run of loss functions has no training
# throughput, and its train time is its step time.
_ABSENT_FROM: Final[dict[str, frozenset[str]]] = {
    "module": frozenset(
        {
            *("train_time_s", "train_wait_time_s", "rollout_time_s", "weight_sync_time_s", "train_tokens_per_s"),
            *("tokens_per_s", "rollout_tokens_per_gpu_per_s", "raw_reward", "truncated_ratio"),
            *("module_optimizer_s", "module_step_s"),
        }
    )
}
# Metrics computed only for pairs, each with the measured metric that it derives from and with its label.
_OF_PAIRS: Final[dict[str, tuple[str, str]]] = {
    "mean_step_time_s": ("step_time_s", "mean step time"),
    "unadjusted_step_time_s": ("step_time_s", "step time, not adjusted for tokens"),
    "carry_over_step_time_s": ("step_time_s", "carry-over: first steps after variant change, relative to scored steps"),
}
_PRINTED: Final = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """How a report names and writes one metric; all its values have the same unit and number of decimals.

    ``factor`` converts seconds, bytes or joules to the unit.
    """

    label: str
    unit: str
    factor: float
    decimals: int

    @property
    def title(self) -> str:
        return start_sentence(self.label)

    @property
    def named(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def scale(self, value: float) -> float:
        return value * self.factor

    def format(self, value: float | None, absent: str = NOT_RECORDED) -> str:
        return absent if value is None else format_fixed(self.scale(value), self.decimals)

    def show(self, value: float | None, absent: str = NOT_RECORDED) -> str:
        """Return a value with its unit, like ``2.415 s``."""
        return absent if value is None else f"{self.format(value)} {self.unit}".rstrip()


def clean(text: str) -> str:
    """Return one line without invisible characters: control and direction marks are escaped."""
    return printable(" ".join(text.split()))


def prose(text: str) -> str:
    """Return one clean line in which no unit is separated from its number."""
    if text.isascii() and text.isprintable() and " " not in text:  # a number, as nearly all cells of a page
        return text
    return _UNITS.sub(NBSP, clean(text))


def number_or_dash(value: float | None) -> str:
    return "–" if value is None else format_number(value)


def start_sentence(text: str) -> str:
    """Return the text with a capital letter; the name of a gate or metric, such as ``raw_reward``, stays as it is."""
    is_name = "_" in text.partition(" ")[0]
    return text if is_name else f"{text[:1].upper()}{text[1:]}"


def make_metric(name: str, analysis: Analysis) -> Metric:
    """Choose label, unit and decimals of a metric from the largest mean of its trials."""
    measured, printed = measured_metric(name), _PRINTED.get(name)
    label = _OF_PAIRS[name][1] if name in _OF_PAIRS else _LABELS.get(_TODAY.get(name, name), name)
    summaries = (trial.summary(measured) for trial in analysis.trials)
    largest = max((abs(summary.mean) for summary in summaries if summary is not None), default=None)
    unit, factor = _choose_unit(measured, 1.0 if largest is None else largest)
    if printed is not None:
        unit = unit or printed.unit
    return Metric(
        label=_LABELS_OF.get(analysis.workload, {}).get(name, label),
        unit=unit,
        factor=factor,
        decimals=SIGNIFICANT if largest is None else _decimals(largest * factor),
    )


def recorded_metrics(analysis: Analysis) -> frozenset[str]:
    return frozenset(
        series.metric
        for trial in analysis.trials
        for series in trial.series
        if any(value is not None for value in series.values)
    )


def measured_metric(metric: str) -> str:
    """Return the metric that ``metric`` is computed from: for example, ``step_time_s`` for ``mean_step_time_s``."""
    return _OF_PAIRS[metric][0] if metric in _OF_PAIRS else metric


def list_metrics(analysis: Analysis) -> tuple[str, ...]:
    recorded = recorded_metrics(analysis)
    earlier = {name: old for old, name in _TODAY.items() if old in recorded}
    known = tuple(dict.fromkeys(earlier.get(name, name) for name in (*_PRINTED, *_LABELS)))
    absent = _ABSENT_FROM.get(analysis.workload, frozenset())
    return tuple(name for name in (*known, *sorted(recorded - set(known))) if name not in absent)


def format_fixed(value: float, decimals: int) -> str:
    """Format a number with separated thousands, or in scientific form where rounding would give 0."""
    text = f"{value:,.{decimals}f}"
    if value and math.isfinite(value) and not any(digit in text for digit in "123456789"):
        return f"{value:.{SIGNIFICANT - 1}e}"
    return text


def headline_value(metric: str, summary: Summary) -> float:
    """Return the value of a trial: for a peak the highest of its scored steps, otherwise their mean."""
    return summary.maximum if metric.startswith("peak_") else summary.mean


def _choose_unit(metric: str, size: float) -> tuple[str, float]:
    if metric.endswith("_bytes"):
        return "GiB", 1 / GIB
    if metric.endswith("_j"):
        return "J", 1.0
    if not metric.endswith("_s") or metric.endswith("_per_s"):
        return "", 1.0
    if 0 < size < _SHORT_S:
        return ("ms", 1e3) if size >= _SHORT_S / 1e3 else ("µs", 1e6)
    return "s", 1.0


def _decimals(size: float) -> int:
    if not 0 < size < math.inf:
        return SIGNIFICANT
    return min(6, max(0, SIGNIFICANT - 1 - math.floor(math.log10(size))))
