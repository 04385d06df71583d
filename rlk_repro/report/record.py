"""Define the record that ``report --json`` prints for each result."""

from __future__ import annotations

from dataclasses import dataclass

from rlk_repro.analysis.memory import judge_memory
from rlk_repro.report.answer import describe_answer
from rlk_repro.report.sections import make_cautions
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import Analysis, Effect, Gate
from rlk_repro.spec.values import BASELINE, ENABLED


@dataclass(frozen=True, kw_only=True)
class LevelRecord:
    """The mean of a metric over the trials of each variant; the metric's name ends in its unit."""

    metric: str
    baseline: float | None
    enabled: float | None


@dataclass(frozen=True, kw_only=True)
class ReportRecord:
    """An effect's ``n`` counts what ``unit`` names: pairs or sessions; ``report`` is the path of the page, if any."""

    source: str
    bundle_id: str
    run: str
    hardware: str
    verdict: str
    headline: str
    answer: str
    memory: str
    unit: str
    effects: tuple[Effect, ...]
    gates: tuple[Gate, ...]
    levels: tuple[LevelRecord, ...]
    report: str
    cautions: tuple[str, ...]


def make_record(analysis: Analysis, context: Context, *, source: str, report: str = "") -> ReportRecord:
    view = make_view(analysis, context)
    levels = [
        LevelRecord(metric=name, baseline=view.mean(name, BASELINE), enabled=view.mean(name, ENABLED))
        for name in (effect.metric for effect in analysis.effects)
    ]
    return ReportRecord(
        source=source,
        bundle_id=context.bundle_id,
        run=analysis.run,
        hardware=analysis.hardware,
        verdict=analysis.verdict.word.value,
        headline=analysis.verdict.headline,
        answer=describe_answer(view),
        memory=judge_memory(analysis).word.value,
        unit=analysis.unit,
        effects=analysis.effects,
        gates=analysis.gates,
        levels=tuple(levels),
        report=report,
        cautions=make_cautions(view),
    )
