"""Make a report: one ordered list of sections, which begins with the verdict and what it rests on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from rlk_repro.analysis.verdict import OVERRIDDEN
from rlk_repro.base.findings import Level, has_blocking
from rlk_repro.report.agreement import make_agreement
from rlk_repro.report.answer import (
    VERDICT_TONES,
    describe_answer,
    describe_ground,
    describe_words,
    did_not_run,
    is_decided,
    list_suspects,
    suggest_next,
)
from rlk_repro.report.basis import describe_basis
from rlk_repro.report.blocks import Block, Bullets, Facts, Figures, Section, TableCell, Text, Tone, make_facts
from rlk_repro.report.checks import TONES, make_checks
from rlk_repro.report.evidence import make_evidence
from rlk_repro.report.forest import plot_pairs
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
from rlk_repro.report.results import describe_functions, make_effects, make_gates, make_pairs
from rlk_repro.report.view import View
from rlk_repro.rundir.agreement import CheckWord, choose_word
from rlk_repro.rundir.results import Analysis
from rlk_repro.sources import CITED, MEGATRON, OURSELVES, VIME, CodeSource
from rlk_repro.spec.stack import Pin
from rlk_repro.workloads import find_words

SHOWN_HASH: Final = 12
UNSEALED: Final = "The run is not sealed, so its files may have changed."
CONTRADICTION: Final = (
    "Records of the bundle contradict each other: see the findings. This report is computed from the logs."
)
_TOLD: Final = re.compile(
    f"^every gate|^[0-9]+ of [0-9]+ gates passed| does not apply: | was not planned: |^{OVERRIDDEN.partition(':')[0]}"
)
"""Reasons that the gates or a caution tell."""


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
    if view.is_comparison or analysis.noise_floor.is_measured:
        yield make_pairs(view)
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


def choose_tone(analysis: Analysis) -> Tone:
    """Choose the verdict's colour; a run in which no kernel of RL-Kernel ran gets the colour of `inconclusive`."""
    word = choose_word(analysis.checks)
    if did_not_run(analysis) and word is not CheckWord.FAIL:
        return Tone.OPEN
    return TONES[word] if analysis.checks else VERDICT_TONES[analysis.verdict.word]


def make_verdict(view: View) -> Section:
    analysis = view.analysis
    blocks: list[Block] = [Text(text=describe_answer(view), is_strong=True)]
    blocks += [Text(text=found)] if (found := describe_functions(view)) else []
    blocks += [Text(text=caution, is_strong=True) for caution in make_cautions(view)]
    obstacles = tuple(reason for reason in analysis.verdict.reasons if not _TOLD.search(reason))
    blocks += [Bullets(items=obstacles)] if obstacles and not is_decided(analysis) else []
    blocks += [make_facts(*_list_origin(view), is_inline=True), _make_next(view)]
    blocks.append(Text(text=_count_findings(view), target="#findings"))
    if view.is_comparison:
        blocks.append(Figures(figures=(plot_pairs(view),)))
    return Section(
        key="verdict",
        title=describe_words(analysis),
        subject=analysis.run,
        tone=choose_tone(analysis),
        blocks=tuple(blocks),
        summary=True,
    )


def _make_next(view: View) -> Facts:
    context = view.context
    bundle_id = context.bundle_id[:SHOWN_HASH]
    command = context.next_command or suggest_next(view, context.bundle)
    return make_facts(
        ("suspects", list_suspects(view)),
        ("replay", context.replay),
        ("bundle", TableCell(text=context.bundle, note=f"id {bundle_id}" if bundle_id else "not sealed", is_code=True)),
        ("report", TableCell(text=context.report, is_code=True)),
        ("what now", TableCell(text=command, is_code=True)),
    )


def _count_findings(view: View) -> str:
    found = Counter(item.level for item in (*view.analysis.findings, *view.context.findings))
    parts = [f"{found[level]} {level.value}" for level in Level if found[level]]
    return f"Findings about the machine and the records: {', '.join(parts) or 'none'}"


def _list_origin(view: View) -> Iterator[tuple[str, TableCell]]:
    yield "on", TableCell(text=describe_ground(view))
    yield "date", TableCell(text=find_date(view.analysis))
    for source in (VIME, MEGATRON, *CITED[1:]):
        yield source.title, _describe_commit(view, source)


def find_date(analysis: Analysis) -> str:
    """Return the date in the run's id, or an empty text if the id holds none."""
    day = analysis.run_id[:8]
    return f"{day[:4]}-{day[4:6]}-{day[6:]}" if day.isdecimal() and len(day) == 8 else ""


def find_commit(analysis: Analysis, name: str) -> str:
    return analysis.facts.get(f"{name} commit", "")[:SHOWN_HASH]


def _describe_commit(view: View, source: CodeSource) -> TableCell:
    """Return a code base's commit and whether it is the pinned one; a pin that this version ships is linked."""
    plan = view.context.plan
    pins = {} if plan is None else plan.stack.pins
    if plan is not None and source.variable in plan.switches:
        return TableCell(text="two checkouts", note=f"the variants differ in {source.variable}", target="#variants")
    pin = next((pin for name, pin in pins.items() if name == source.pin), None)
    recorded = view.analysis.facts.get(f"{source.title} commit", "")
    if pin is None or source is OURSELVES:
        return TableCell(text=recorded[:SHOWN_HASH])
    sections = [manifest.sections.get("code", {}).get(source.section, {}) for manifest in view.context.manifests]
    words = [_compare(pin, section) for section in sections if isinstance(section, dict)]
    word = min(words, key=list(_COMPARED).index, default="pinned, not verified")
    if word == "not the pinned one":
        return TableCell(text=recorded[:SHOWN_HASH] or "unknown", note=word, tone=Tone.BAD)
    is_shipped = source.pin in view.context.shipped_pins
    target = f"{pin.repository}/tree/{pin.commit}" if is_shipped else ""
    return TableCell(text=pin.commit[:SHOWN_HASH], note=word, target=target)


_COMPARED: Final = ("not the pinned one", "pinned, not verified", "pinned, checkout clean", "pinned, tree verified")
"""What a node's record says about a pin, the worst first."""


def _compare(pin: Pin, section: dict[str, Any]) -> str:
    tree, commit = section.get("tree"), section.get("commit")
    if isinstance(tree, str) and pin.tree is not None:
        return "pinned, tree verified" if pin.holds_tree(tree) else "not the pinned one"
    if isinstance(commit, str):
        is_clean = section.get("is_dirty") is False
        return "not the pinned one" if commit != pin.commit else _COMPARED[2 if is_clean else 1]
    return "pinned, not verified"


def make_cautions(view: View) -> tuple[str, ...]:
    """Return the sentences that a reader must know before the verdict."""
    analysis = view.analysis
    cautions = [] if view.context.is_sealed else [UNSEALED]
    if scope := find_words(analysis.workload).scope:
        cautions.append(scope.replace("RL-Kernel", analysis.switch or "RL-Kernel"))
    # ``own_work`` names the part of the gain that does not come from RL-Kernel; without a scored pair there is no gain.
    if view.is_comparison and analysis.verdict.num_pairs:
        cautions += view.context.own_work
    if analysis.verdict.is_exploratory:
        cautions.append(_describe_exploration(view))
    if view.context.rule_changes:
        cautions.append(view.context.rule_changes)
    if has_blocking(view.context.findings):
        cautions.append(CONTRADICTION)
    return tuple(cautions)


def _describe_exploration(view: View) -> str:
    """Name the overrides; they were given before the start, so the sentence accuses nobody."""
    changes = dict(view.context.setting).get("overrides", "").split(", ")
    rules = [change.removesuffix(" (--set)") for change in changes if change.startswith("measure.")]
    named = f": {', '.join(rules)}" if rules and not view.context.rule_changes else ""
    return f"Exploratory: this run overrides the shipped measurement rules{named}."


def make_basis(view: View) -> Section:
    return Section(key="basis", title="What the verdict rests on", blocks=(describe_basis(view),))
