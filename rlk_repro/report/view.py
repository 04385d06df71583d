"""Define ``View``: an analysis with the context, number formats and links that all parts of a report share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Final
from urllib.parse import quote

from rlk_repro.analysis.allocations import Allocation
from rlk_repro.analysis.gates import OWN_GPUS
from rlk_repro.analysis.noise import restore_noise, widen
from rlk_repro.base.findings import Finding
from rlk_repro.plan import Plan
from rlk_repro.report.blocks import TableCell, Tone
from rlk_repro.report.labels import (
    NOT_RECORDED,
    Metric,
    headline_value,
    list_metrics,
    make_metric,
    measured_metric,
    recorded_metrics,
)
from rlk_repro.rundir.differences import Difference
from rlk_repro.rundir.manifest import Manifest
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, Effect, PairMetric, PairStatus, Series, TrialResult, VerdictWord
from rlk_repro.statistics.crossover import BlockNoise
from rlk_repro.statistics.stats import STEP_TIME, paired_effect

GRPO_LOSS: Final = "grpo_loss"
INSIDE_GRPO_LOSS: Final = ("module_log_probs_", "module_clip_kl_", "module_ratio_kl_")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a report shows in addition to the analysis; every field is optional.

    Attributes:
        bundle: the path that the printed commands name: a bundle, or a run directory if ``is_folder`` is set.
        bundle_id: the sha256 of the bundle's checksums; empty for a run that is not sealed.
        run_directory: the path from the report's folder to the unpacked run directory; without it there are no links.
        findings: the findings of verify, diff or replay.
        may_claim: what the run definition allows a reader to claim; ``may_not_claim`` is what it forbids.
        setting: the settings in which runs with the same name may differ.
        flags: the flags of ``submit`` that plan a run like this one; None if no flags do.
        rule_changes: how the rules of the run differ from those of the shipped run.
        differences: how the arguments and environments of variants differ: planned if ``is_as_planned``, else recorded.
        plan: the plan of the run, from which the report measures the noise of blocks.
        own_work: sentences that name the part of the enabled variant's gain that comes from rlk-repro's own code.
        shipped_pins: the pins of the plan's stack that this version ships too; only their repositories are linked.
        report: the path of the report's page; ``replay`` is the result of a replay.
        next_command: replaces the command that the verdict suggests.
    """

    bundle: str = RunDir(Path()).bundle.name
    bundle_id: str = ""
    run_directory: str = ""
    manifests: tuple[Manifest, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    findings: tuple[Finding, ...] = ()
    may_claim: tuple[str, ...] = ()
    may_not_claim: tuple[str, ...] = ()
    setting: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] | None = ()
    rule_changes: str = ""
    differences: tuple[Difference, ...] = ()
    is_as_planned: bool = False
    is_sealed: bool = True
    plan: Plan | None = None
    own_work: tuple[str, ...] = ()
    is_folder: bool = False
    shipped_pins: tuple[str, ...] = ()
    report: str = ""
    replay: str = ""
    next_command: str = ""


@dataclass(frozen=True)
class View:
    """HTML ids contain numbers, never names, because a run's names may contain markup."""

    analysis: Analysis
    context: Context

    @cached_property
    def _made(self) -> dict[str, Metric]:
        return {}

    def metric(self, name: str) -> Metric:
        if name not in self._made:
            self._made[name] = make_metric(name, self.analysis)
        return self._made[name]

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return list_metrics(self.analysis)

    @cached_property
    def recorded(self) -> frozenset[str]:
        return recorded_metrics(self.analysis)

    @cached_property
    def _trials(self) -> dict[str, tuple[int, TrialResult]]:
        return {trial.name: (place, trial) for place, trial in enumerate(self.analysis.trials)}

    @property
    def primary(self) -> str:
        return next((effect.metric for effect in self.analysis.effects if effect.role == "primary"), STEP_TIME)

    @cached_property
    def allocations(self) -> list[tuple[Allocation, dict[str, PairMetric]]]:
        """The allocations in which pairs count, each with the primary metric of these pairs."""
        pairs = {pair.pair: pair.metric(self.primary) for pair in self.analysis.pairs if pair.is_counted}
        metrics = {name: item for name, item in pairs.items() if item is not None and item.log_ratio is not None}
        found = []
        for item in self.context.allocations:
            counted = {name: metrics[name] for name in item.pairs if name in metrics}
            if counted:
                found.append((item, counted))
        return found

    @cached_property
    def noise(self) -> dict[str, BlockNoise]:
        """The noise of a run's blocks, by metric."""
        return {} if self.context.plan is None else restore_noise(self.context.plan, self.analysis)

    def widen(self, effect: Effect) -> Effect | None:
        return widen(effect, self.noise.get(effect.metric))

    @property
    def effects(self) -> list[Effect]:
        """The effects on known metrics, in the order of the metrics."""
        places = {metric: place for place, metric in enumerate(self.metrics)}
        found = [item for item in self.analysis.effects if measured_metric(item.metric) in places]
        return sorted(found, key=lambda item: (places[measured_metric(item.metric)], item.metric not in places))

    def mean(self, metric: str, variant: str) -> float | None:
        """Return the mean over a variant's trials in pairs that count, or, where none does, in scored pairs."""
        scored = [pair for pair in self.analysis.pairs if pair.status is PairStatus.SCORED]
        scored = [pair for pair in scored if pair.is_counted] or scored
        names = {name for pair in scored for name in (pair.first, pair.second)}
        trials = [trial for trial in self.analysis.trials if trial.variant == variant and trial.name in names]
        summaries = [summary for trial in trials if (summary := trial.summary(metric)) is not None]
        values = [headline_value(metric, summary) for summary in summaries]
        return math.fsum(values) / len(values) if values else None

    @cached_property
    def by_allocation(self) -> Effect | None:
        """The primary effect with each allocation as one observation, if pairs of more than one allocation count."""
        effect = self.analysis.effect(self.primary)
        if effect is None or len(self.allocations) < 2:
            return None
        means = [mean(item.log_ratio or 0.0 for item in counted.values()) for _, counted in self.allocations]
        return paired_effect(self.primary, means, role="primary", alpha=1 - effect.confidence)

    @cached_property
    def _has_grpo_loss(self) -> bool:
        decisions = (item for trial in self.analysis.trials for item in trial.decisions)
        return any(item.op == GRPO_LOSS and item.is_rl_kernel and item.calls for item in decisions)

    def is_comparable(self, metric: str) -> bool:
        """Tell whether a metric measures the same work in both variants.

        RL-Kernel's operator ``grpo_loss`` calls the trainer's functions once more, so their timers measure more work.
        """
        return not (self._has_grpo_loss and metric.startswith(INSIDE_GRPO_LOSS))

    @property
    def has_shared_gpus(self) -> bool:
        """Whether other runs could use the same GPUs, so that times do not count."""
        return any(gate.name == OWN_GPUS for gate in self.analysis.gates)

    @property
    def is_comparison(self) -> bool:
        return self.analysis.verdict.word is not VerdictWord.NO_COMPARISON

    @property
    def has_variants(self) -> bool:
        return self.is_comparison or bool(self.analysis.checks or self.analysis.microbatches)

    def metric_anchor(self, metric: str) -> str:
        return f"metric-{self.metrics.index(measured_metric(metric))}"

    def trial_anchor(self, name: str) -> str:
        return f"trial-{self._trials[name][0]}" if name in self._trials else "trials"

    def steps_anchor(self, metric: str, trial: TrialResult) -> str:
        return f"{self.metric_anchor(metric)}-{self.trial_anchor(trial.name)}"

    def metric_cell(self, metric: str, text: str) -> TableCell:
        is_recorded = measured_metric(metric) in self.recorded
        return TableCell(text=text, target=f"#{self.metric_anchor(metric)}" if is_recorded else "")

    def value_cell(self, metric: str, trial: TrialResult | None, value: float | None) -> TableCell:
        text = self.metric(metric).format(value)
        if value is None or trial is None or trial.get_series(measured_metric(metric)) is None:
            return TableCell(text=text, tone=Tone.FAINT if value is None else Tone.PLAIN)
        return TableCell(text=text, target=f"#{self.steps_anchor(metric, trial)}")

    def find_trial(self, name: str) -> TrialResult | None:
        return self._trials[name][1] if name in self._trials else None

    def file_cell(self, path: str, text: str) -> TableCell:
        """Return ``text`` with a link to a file of the run directory, if the report lies beside that directory."""
        root = self.context.run_directory
        target = "/".join(quote(part, errors="replace") for part in (root, path)) if root else ""
        return TableCell(text=text, target=target, is_code=True)


def log_path(trial: str) -> str:
    return RunDir(Path()).trial(trial).stdout.as_posix()


def describe_source(trial: TrialResult, series: Series) -> str:
    """Return the path of a series' file, with ``<trial>`` for the trial's name: ``trials/<trial>/stdout.log``."""
    return series.source.replace(trial.folder, "<trial>", 1)


def describe_lines(series: Series) -> str:
    """Return the numbers of the first and the last line that printed a value of the series, like ``:120-412``."""
    lines = [line for line in series.lines if line is not None]
    return f":{min(lines)}-{max(lines)}" if lines else f" ({NOT_RECORDED})"


def make_view(analysis: Analysis, context: Context | None = None) -> View:
    return View(analysis, context or Context())
