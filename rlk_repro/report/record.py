"""Make the record that ``report --json`` prints for each result."""

from __future__ import annotations

from typing import Any

from rlk_repro.analysis.memory import judge_memory
from rlk_repro.report.answer import describe_answer
from rlk_repro.report.results import measure_saved
from rlk_repro.report.sections import make_cautions
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import Analysis
from rlk_repro.spec.values import BASELINE, ENABLED


def make_record(analysis: Analysis, context: Context, *, source: str, report: str = "") -> dict[str, Any]:
    """An effect's ``n`` counts what ``unit`` names: pairs or sessions; ``report`` is the path of the page, if any.

    A level is the mean of a metric over the trials of each variant; the metric's name ends in its unit.
    """
    view = make_view(analysis, context)
    levels = [
        {"metric": effect.metric, **{name: view.mean(effect.metric, name) for name in (BASELINE, ENABLED)}}
        for effect in analysis.effects
    ]
    return {
        "source": source,
        "bundle_id": context.bundle_id,
        "run": analysis.run,
        "hardware": analysis.hardware,
        "verdict": analysis.verdict.word.value,
        "headline": analysis.verdict.headline,
        "answer": describe_answer(view),
        "memory": judge_memory(analysis).word.value,
        "functions_saved_s": measure_saved(analysis),
        "unit": analysis.unit,
        "effects": analysis.effects,
        "gates": analysis.gates,
        "levels": levels,
        "report": report,
        "cautions": make_cautions(view),
    }
