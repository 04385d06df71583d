"""Give every part of a report one view of an analysis: with its context, its number formats and its links."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import quote

from rlk_repro.base.findings import Finding
from rlk_repro.report.blocks import TableCell, Tone
from rlk_repro.report.labels import (
    NOT_RECORDED,
    MetricLabel,
    Numbers,
    find_label,
    headline_value,
    list_metrics,
    measured_metric,
    recorded_metrics,
    start_sentence,
)
from rlk_repro.rundir.manifest import Manifest
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, Effect, Series, TrialResult, TrialStatus, VerdictWord
from rlk_repro.statistics.stats import STEP_TIME
from rlk_repro.workloads.differences import Difference

GRPO_LOSS: Final = "grpo_loss"
INSIDE_GRPO_LOSS: Final = ("module_log_probs_", "module_clip_kl_", "module_ratio_kl_")


@dataclass(frozen=True, kw_only=True)
class Context:
    """The context of an analysis, all of it optional.

    ``bundle`` is the path in commands; ``bundle_id`` is the sha256 of its seal, empty without a seal; ``is_folder``
    says that ``bundle`` is a run directory.  ``run_directory`` leads from the report's folder to the unpacked run
    directory; ``""`` gives no links.  ``findings`` come from verify, diff or replay.  ``may_claim`` and
    ``may_not_claim`` are the run's own sentences.  ``setting`` distinguishes the run from others of its name;
    ``rule_changes`` says how its rules differ from the shipped rules.  ``differences`` lists how the start of its
    variants differed, as planned if no trial recorded it. ``own_work`` names enabled's gain beyond RL-Kernel.
    """

    bundle: str = RunDir(Path()).bundle.name
    bundle_id: str = ""
    run_directory: str = ""
    manifests: tuple[Manifest, ...] = ()
    findings: tuple[Finding, ...] = ()
    may_claim: tuple[str, ...] = ()
    may_not_claim: tuple[str, ...] = ()
    setting: tuple[tuple[str, str], ...] = ()
    rule_changes: str = ""
    differences: tuple[Difference, ...] = ()
    is_as_planned: bool = False
    is_sealed: bool = True
    own_work: tuple[str, ...] = ()
    is_folder: bool = False


@dataclass(frozen=True)
class View:
    """Anchors consist of positions, never of names, so a name can neither collide nor break out of the markup."""

    analysis: Analysis
    context: Context

    @cached_property
    def numbers(self) -> Numbers:
        return Numbers(self.analysis)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return list_metrics(self.analysis)

    @cached_property
    def recorded(self) -> frozenset[str]:
        """The metrics that any trial has."""
        return recorded_metrics(self.analysis)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {metric: place for place, metric in enumerate(self.metrics)}

    @cached_property
    def _trials(self) -> dict[str, tuple[int, TrialResult]]:
        return {trial.name: (place, trial) for place, trial in enumerate(self.analysis.trials)}

    @property
    def primary(self) -> str:
        """The metric the verdict is about."""
        return next((effect.metric for effect in self.analysis.effects if effect.role == "primary"), STEP_TIME)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """The effects of the metrics that a report of this workload shows."""
        return tuple(item for item in self.analysis.effects if measured_metric(item.metric) in self._places)

    def label(self, metric: str) -> MetricLabel:
        """Return the metric's label in a run of this workload, and the unit of its numbers."""
        found = find_label(metric, self.analysis.workload)
        return replace(found, unit=self.numbers.unit(metric) or found.unit)

    def title(self, metric: str) -> str:
        """Return the label as the beginning of a sentence; a label that is the name itself stays unchanged."""
        label = self.label(metric).label
        return label if label == metric else start_sentence(label)

    def mean(self, metric: str, variant: str) -> float | None:
        """Return the mean over a variant's successful trials; None where none of them has the metric."""
        trials = [
            trial for trial in self.analysis.trials if trial.variant == variant and trial.status is TrialStatus.OK
        ]
        summaries = [summary for trial in trials if (summary := trial.summary(metric)) is not None]
        values = [headline_value(metric, summary) for summary in summaries]
        return math.fsum(values) / len(values) if values else None

    def name_with_unit(self, metric: str) -> str:
        found = self.label(metric)
        return f"{found.label} ({found.unit})" if found.unit else found.label

    @cached_property
    def _has_grpo_loss(self) -> bool:
        decisions = (item for trial in self.analysis.trials for item in trial.decisions)
        return any(item.op == GRPO_LOSS and item.is_rl_kernel and item.calls for item in decisions)

    def is_comparable(self, metric: str) -> bool:
        """Tell whether a metric covers the same work in both variants.

        RL-Kernel's whole loss calls the trainer's own functions once more, without gradient.
        """
        return not (self._has_grpo_loss and metric.startswith(INSIDE_GRPO_LOSS))

    @property
    def is_comparison(self) -> bool:
        """Whether the run was meant to compare variants; a run of operators alone was not."""
        return self.analysis.verdict.word is not VerdictWord.NO_COMPARISON

    def metric_rank(self, metric: str) -> tuple[int, bool]:
        """Return a sort key for the report's order; a derived metric follows the metric that it is derived from."""
        measured = measured_metric(metric)
        return self._places.get(measured, len(self._places)), metric != measured

    def metric_anchor(self, metric: str) -> str:
        return f"metric-{self._places[measured_metric(metric)]}"

    def trial_anchor(self, name: str) -> str:
        return f"trial-{self._trials[name][0]}" if name in self._trials else "trials"

    def steps_anchor(self, metric: str, trial: TrialResult) -> str:
        return f"{self.metric_anchor(metric)}-{self.trial_anchor(trial.name)}"

    def metric_cell(self, metric: str, text: str) -> TableCell:
        """Return ``text``, linked to the evidence of the metric where there is any."""
        is_recorded = measured_metric(metric) in self.recorded
        return TableCell(text=text, target=f"#{self.metric_anchor(metric)}" if is_recorded else "")

    def value_cell(self, metric: str, trial: TrialResult | None, value: float | None) -> TableCell:
        """Return a number of a trial, linked to its steps and log lines."""
        text = self.numbers.format(metric, value)
        if value is None or trial is None or trial.get_series(measured_metric(metric)) is None:
            return TableCell(text=text, tone=Tone.FAINT if value is None else Tone.PLAIN)
        return TableCell(text=text, target=f"#{self.steps_anchor(metric, trial)}")

    def trial_cell(self, name: str) -> TableCell:
        return TableCell(text=name, target=f"#{self.trial_anchor(name)}", is_code=True)

    def find_trial(self, name: str) -> TrialResult | None:
        return self._trials[name][1] if name in self._trials else None

    def file_cell(self, path: str, text: str) -> TableCell:
        """Return ``text``, linked to a file of the run directory where a link is possible."""
        root = self.context.run_directory
        return TableCell(text=text, target=_link(root, path) if root else "", is_code=True)


def _link(*parts: str) -> str:
    return "/".join(quote(part, errors="replace") for part in parts)


def log_path(trial: str) -> str:
    """Return a trial's log, relative to the root of the run directory."""
    return RunDir(Path()).trial(trial).stdout.as_posix()


def describe_source(trial: TrialResult, series: Series) -> str:
    """Return the file of a series for any trial: ``trials/<trial>/stdout.log``."""
    return series.source.replace(trial.folder, "<trial>", 1)


def describe_lines(series: Series | None) -> str:
    """Return the first and last line that printed a value, like ``:120-412``."""
    lines = [line for line in series.lines if line is not None] if series else []
    return f":{min(lines)}-{max(lines)}" if lines else f" ({NOT_RECORDED})"


def make_view(analysis: Analysis, context: Context | None = None) -> View:
    return View(analysis, context or Context())
