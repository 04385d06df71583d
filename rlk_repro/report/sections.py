"""Make a report: one ordered list of sections, of which a pull request and a terminal show those marked as summary."""

from __future__ import annotations

from collections.abc import Iterator

from rlk_repro.report.agreement import make_agreement
from rlk_repro.report.blocks import Figures, Section
from rlk_repro.report.checks import make_checks
from rlk_repro.report.evidence import make_evidence
from rlk_repro.report.head import make_basis, make_verdict
from rlk_repro.report.microbatch import make_microbatches
from rlk_repro.report.operators import make_cells
from rlk_repro.report.plots import make_figures
from rlk_repro.report.records import (
    make_claims,
    make_commands,
    make_differences,
    make_findings,
    make_operators,
    make_setup,
    make_trials,
)
from rlk_repro.report.results import make_effects, make_gates, make_noise, make_pairs
from rlk_repro.report.view import View


def make_sections(view: View) -> tuple[Section, ...]:
    return tuple(_list_sections(view))


def _list_sections(view: View) -> Iterator[Section]:
    analysis = view.analysis
    yield make_verdict(view)
    yield make_basis(view)
    if view.is_comparison:
        yield make_effects(view)
        yield make_gates(view)
    elif analysis.checks:
        yield make_checks(view)
    elif analysis.microbatches:
        yield make_microbatches(view)
    else:
        yield make_cells(view)
    if figures := make_figures(view):
        yield Section(key="plots", title="Plots", blocks=(Figures(figures=figures),))
    yield make_claims(view)
    yield make_findings(view)
    if view.is_comparison:
        yield make_pairs(view)
    if analysis.noise_floor.is_measured or not (analysis.is_crossover or analysis.checks or analysis.microbatches):
        yield make_noise(view)
    yield make_trials(view)
    if view.has_variants:
        yield make_operators(view)
    if analysis.agreement:
        yield make_agreement(view)
    if view.context.differences:
        yield make_differences(view)
    yield make_setup(view)
    yield Section(key="reproduce", title="How to reproduce", blocks=(make_commands(view),))
    yield make_evidence(view)
