"""Make a report's sections on what was recorded: trials, operators, facts, findings, what may be claimed, commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Final

from rlk_repro.base.errors import shorten
from rlk_repro.base.findings import Level, sort_findings
from rlk_repro.base.units import format_count, format_duration, group, name_some
from rlk_repro.logs.vime import ACTORS, LogReject
from rlk_repro.operators import OPERATORS
from rlk_repro.report.answer import describe_baseline, describe_machines
from rlk_repro.report.blocks import (
    Block,
    Bullets,
    Commands,
    Row,
    Section,
    Table,
    TableCell,
    Text,
    Tone,
    make_facts,
    make_table,
)
from rlk_repro.report.labels import NOT_RECORDED
from rlk_repro.report.view import View, log_path
from rlk_repro.rundir.differences import Kind
from rlk_repro.rundir.results import DecisionSummary, ProofStatus, TrialResult, TrialStatus

PROOF_TONES: Final = {
    ProofStatus.PROVED: Tone.GOOD,
    ProofStatus.NATIVE: Tone.OPEN,
    ProofStatus.FALLBACK: Tone.BAD,
    ProofStatus.MISSING: Tone.BAD,
    ProofStatus.NOT_REQUESTED: Tone.FAINT,
}
LEVEL_TONES: Final = {Level.BLOCKING: Tone.BAD, Level.WARNING: Tone.OPEN, Level.INFO: Tone.FAINT}
MAX_FACT_ROWS: Final = 10_000
MAX_NAMED_NODES: Final = 16
VARIANTS: Final = "What differs between the variants"
CITATION: Final = "When you cite this, include the bundle's id, the interval and the hardware."
ELSEWHERE: Final = "This result says nothing about hardware, stacks, models, lanes or layouts that are not named here."


def make_trials(view: View) -> Section:
    label = view.metric(view.primary)
    names = ("seed", "status", "steps", "duration", f"mean ({label.unit})")
    note = (
        f"Trials are in the order that they ran. The mean is that of {label.label} over the scored steps; "
        "'steps' counts all, also those of the warm-up and of control blocks, and a session's first steps of a period. "
        "Throttled is the share of telemetry samples in which heat or a fault slowed a device down; the power limit "
        f"does not count. The log of a trial is {log_path('<trial>')}."
    )
    table = make_table(
        "trial", *names, view.analysis.serving, "throttled", "log", "why", prose=("why",), note=note,
        rows=[_trial_row(view, trial) for trial in view.analysis.trials], numbers={*names, "throttled"} - {"status"},
    )  # fmt: skip
    blocks: list[Block] = [table]
    if rejects := tuple(_describe_rejects(view.analysis.trials)):
        blocks += [Text(text="Log lines that looked like metrics but were refused:"), Bullets(items=rejects)]
    return Section(key="trials", title="Trials", blocks=tuple(blocks))


def _trial_row(view: View, trial: TrialResult) -> Row:
    summary = trial.summary(view.primary)
    proof = TableCell(text=trial.proof.value, tone=PROOF_TONES[trial.proof])
    return (
        TableCell(text=trial.name, anchor=view.trial_anchor(trial.name), is_code=True),
        str(trial.seed),
        TableCell(text=trial.status.value, tone=Tone.PLAIN if trial.status is TrialStatus.OK else Tone.BAD),
        f"{trial.num_steps_found} of {trial.num_steps_expected}",
        NOT_RECORDED if trial.duration_s is None else format_duration(trial.duration_s),
        view.value_cell(view.primary, trial, None if summary is None else summary.mean),
        proof if view.has_variants else "",
        NOT_RECORDED if trial.throttled_fraction is None else f"{trial.throttled_fraction * 100:.1f} %",
        view.file_cell(log_path(trial.folder), "log" if view.context.run_directory else ""),
        "; ".join(part for part in (trial.reason, trial.proof_reason) if part),
    )


def _describe_rejects(trials: Iterable[TrialResult]) -> Iterator[str]:
    for trial in trials:
        for reason, count in sorted(trial.rejects.items()):
            known = f" than {' and '.join(ACTORS)}" if reason == LogReject.OTHER_ACTOR else ""
            yield f"{trial.name}: {count} × {reason}{known}"


def make_operators(view: View) -> Section:
    found = ((trial, item) for trial in view.analysis.trials for item in trial.decisions)
    groups = group(
        ((item.op, item.implementation, item.reason, item.is_rl_kernel), (trial, item)) for trial, item in found
    )
    numbers = ("calls", "tokens", "fallbacks")
    table = make_table(
        "operator", "implementation", "RL-Kernel", "why", "trials", *numbers, rows=map(_operator_row, groups.values()),
        numbers=numbers, prose=("why", "trials"),
        note="Calls, tokens and fallbacks are sums over all ranks; a range goes from the lowest to the highest trial.",
    )  # fmt: skip
    blocks = (table if groups else Text(text=f"Decisions: {NOT_RECORDED}."),)
    return Section(key="operators", title="Operators: what ran", blocks=blocks)


def _operator_row(found: list[tuple[TrialResult, DecisionSummary]]) -> Row:
    decisions = [item for _, item in found]
    first = decisions[0]
    return (
        TableCell(text=first.op, is_code=True),
        TableCell(text=first.implementation, is_code=True),
        _make_rl_kernel_cell(first),
        first.reason,
        ", ".join(f"{trial.index:02d}" for trial, _ in found),
        _count_range(item.calls for item in decisions),
        _count_range(item.tokens for item in decisions),
        _count_range(item.fallbacks for item in decisions),
    )


def _make_rl_kernel_cell(decision: DecisionSummary) -> TableCell:
    if not decision.is_rl_kernel:
        return TableCell(text="no")
    accepted = OPERATORS[decision.op].implementations.values() if decision.op in OPERATORS else ()
    found = [item for items in accepted for item in items if item.class_name == decision.implementation]
    is_native = any(item.is_native for item in found)
    return TableCell(text="native", tone=Tone.OPEN) if is_native else TableCell(text="yes", tone=Tone.GOOD)


def _count_range(values: Iterable[int]) -> str:
    ordered = sorted(values)
    return " – ".join(dict.fromkeys(map(format_count, (ordered[0], ordered[-1]))))


def make_setup(view: View) -> Section:
    analysis, context = view.analysis, view.context
    plan = [
        *context.setting,
        ("workload", analysis.workload),
        ("lane", analysis.lane),
        ("hardware", analysis.hardware),
        ("stack", analysis.stack),
        ("cluster", analysis.cluster),
        ("run id", analysis.run_id),
        ("steps per trial", f"{analysis.num_warmup_steps} warm-up, {analysis.num_scored_steps} scored"),
        ("version of the rules", "" if context.plan is None else str(context.plan.run.measure.rules)),
        ("exploratory", "yes" if analysis.verdict.is_exploratory else "no"),
        ("experiment hash", analysis.experiment_hash),
        ("plan hash", analysis.plan_hash),
        ("bundle's id", context.bundle_id),
    ]
    blocks: list[Block] = [make_facts(*plan)]
    if analysis.facts:
        facts = sorted(analysis.facts.items(), key=lambda fact: fact[0].casefold())
        blocks.append(_fact_table("Hardware and software", facts))
    if context.manifests:
        blocks.append(_fact_table("Manifests of the nodes", _merge_manifests(view)))
    return Section(key="setup", title="What ran", blocks=tuple(blocks))


def _fact_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    rows = [(name, TableCell(text=value, is_code=True)) for name, value in facts]
    return make_table("fact", "value", rows=rows, prose=("fact", "value"), title=title, is_folded=True)


def _merge_manifests(view: View) -> Iterator[tuple[str, str]]:
    """Yield each fact once; a fact that not all nodes share names its nodes."""
    manifests = view.context.manifests
    facts = ((path, shorten(str(fact)), manifest.node) for manifest in manifests for path, fact in manifest.facts())
    rows = group(((path, value), node) for path, value, node in facts)
    for (path, value), nodes in sorted(rows.items(), key=lambda item: item[0][0])[:MAX_FACT_ROWS]:
        yield path if len(nodes) == len(manifests) else f"{path} ({name_some(nodes, MAX_NAMED_NODES)})", value
    if len(rows) > MAX_FACT_ROWS:
        yield "more", f"{len(rows) - MAX_FACT_ROWS} more facts are in the manifests of the bundle"


def make_differences(view: View) -> Section:
    rows = []
    for item in view.context.differences:
        cells = [TableCell(text=text, is_code=True) for text in (item.name, item.baseline, item.enabled)]
        tone = Tone.BAD if item.kind is Kind.UNDECLARED else Tone.PLAIN
        rows.append((*cells, TableCell(text=item.kind.value, tone=tone)))
    note, title = "The arguments and the environment of all pairs were compared one by one.", VARIANTS
    if view.context.is_as_planned:
        note = "No record shows how the trials were started, so the table shows what the plan requested."
        title = f"{VARIANTS}, as planned"
    names = ("variable or flag", "baseline", "enabled", "what")
    table = make_table(*names, rows=rows, prose=("baseline", "enabled"), note=note, is_folded=True)
    return Section(key="variants", title=title, blocks=(table,))


def make_findings(view: View) -> Section:
    findings = sort_findings((*view.analysis.findings, *view.context.findings))
    told = tuple(str(item) for item in findings if item.level is not Level.INFO) + view.analysis.notes
    rows = []
    for item in findings:
        level = TableCell(text=item.level.value, tone=LEVEL_TONES[item.level])
        rows.append((item.where, level, item.expected, item.found))
    names = ("where", "level", "expected", "found")
    table = make_table(*names, rows=rows, prose=names, title="Every finding", is_folded=True)
    first = Bullets(items=told) if told else Text(text="No finding needs attention.")
    blocks = (first, table) if findings else (first,)
    return Section(key="findings", title="Findings and notes", blocks=blocks, summary=bool(told))


def make_claims(view: View) -> Section:
    """Say what may be claimed according to the run's definition."""
    analysis, context = view.analysis, view.context
    machines = describe_machines(view)
    scope = f"against {describe_baseline(view)}, on {machines}, " if machines else ""
    scope += f"hardware {analysis.hardware}, stack {analysis.stack}, lane {analysis.lane}, run {analysis.run}"
    blocks: list[Block] = [Text(text=f"It may be cited for: {analysis.verdict.headline} ({scope}). {CITATION}")]
    if context.may_claim:
        blocks += [Text(text="The author of the run says what it measures:"), Bullets(items=context.may_claim)]
    blocks += [Text(text="What this result does not show:"), Bullets(items=(*context.may_not_claim, ELSEWHERE))]
    title = "What this report may and may not claim"
    return Section(key="claims", title=title, blocks=tuple(blocks), summary=True)


def make_commands(view: View) -> Commands:
    bundle = shlex.quote(view.context.bundle)
    again = (f"rlk-repro report {bundle}", "write this report again")
    if not view.context.is_sealed:
        return Commands(lines=(again,))
    folder, lines = bundle, []
    if not view.context.is_folder:
        folder = "check"
        lines.append((f"mkdir check && tar xzf {bundle} -C check", "unpack it; works without rlk-repro"))
    lines += [
        (f"(cd {folder} && sha256sum -c --quiet SHA256SUMS)", "check every file; works without rlk-repro"),
        (
            f"rlk-repro replay {bundle} --analyze-only",
            "check it, and compute this analysis again from its logs",
        ),
        (f"rlk-repro replay {bundle}", "run the same experiment again and compare"),
        again,
    ]
    return Commands(lines=tuple(lines))
