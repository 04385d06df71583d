"""Make a report's sections on what was measured, where it ran, what a reader may claim and how to reproduce it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.analysis.verdict import OVERRIDDEN
from rlk_repro.base.errors import shorten
from rlk_repro.base.findings import Level, has_blocking, sort_findings
from rlk_repro.base.units import name_some
from rlk_repro.report.agreement import make_agreement
from rlk_repro.report.answer import describe_baseline, describe_machines
from rlk_repro.report.basis import make_identity
from rlk_repro.report.blocks import (
    Block,
    Bullets,
    Commands,
    Section,
    Table,
    TableCell,
    Text,
    Tone,
    make_columns,
    make_row,
)
from rlk_repro.report.checks import make_checks
from rlk_repro.report.labels import NOT_RECORDED, headline_value, start_sentence
from rlk_repro.report.microbatch import make_microbatches
from rlk_repro.report.operators import make_cells
from rlk_repro.report.sections import (
    INSIDE_NOTE,
    make_effects,
    make_gates,
    make_noise,
    make_operators,
    make_pairs,
    make_trials,
)
from rlk_repro.report.view import View, describe_source
from rlk_repro.rundir.differences import Kind
from rlk_repro.workloads import find_words

RANGES: Final = (
    "A range goes from the lowest to the highest of n trials. The value of a trial is the mean of its scored steps; "
    "for peak memory it is the maximum of these steps."
)
MAX_FACT_ROWS: Final = 10_000
MAX_NAMED_NODES: Final = 16
MODULE_PREFIX: Final = "module_"
WHOLE_STEP: Final = "module_step_s"
FRAME_OF_MODULES: Final = "actor_train_time_s"
LEVEL_TONES: Final = {Level.BLOCKING: Tone.BAD, Level.WARNING: Tone.OPEN, Level.INFO: Tone.FAINT}

NESTING: Final = (
    "A timer measures one function. The GRPO loss contains log-prob, clip and KL, so the rows overlap: do not sum them."
)
RATIO_KL: Final = (
    " RL-Kernel's ratio_kl belongs to the log-prob rows; clip and KL are always the trainer's own functions."
)
UNSEALED: Final = "The run is not sealed, so its files may have changed."
VARIANTS: Final = "What differs between the variants"
PLANNED_VARIANTS: Final = f"{VARIANTS}, as planned"
ELSEWHERE: Final = "This result says nothing about hardware, stacks, models, lanes or layouts that are not named here."


def make_modules(view: View) -> Section:
    metrics = [metric for metric in view.metrics if metric.startswith(MODULE_PREFIX)]
    note = f"{RANGES} {NESTING}"
    if "RL-Kernel" in view.analysis.serving:
        note += RATIO_KL
    if not all(view.is_comparable(metric) for metric in metrics if metric in view.recorded):
        note += f" {INSIDE_NOTE}"
    table = _metric_table(view, [*metrics, FRAME_OF_MODULES], note)
    return Section(key="modules", title="Module times", blocks=(table,))


def make_metrics(view: View) -> Section:
    metrics = [metric for metric in view.metrics if not metric.startswith(MODULE_PREFIX)]
    return Section(key="metrics", title="Every metric", blocks=(_metric_table(view, metrics, RANGES),))


def _metric_table(view: View, metrics: Sequence[str], note: str) -> Table:
    columns = make_columns(
        "metric", "better", "baseline", "n", "enabled", "n", "source",
        numbers=("baseline", "n", "enabled"), prose=("source",),
    )  # fmt: skip
    rows = tuple(_metric_row(view, metric) for metric in metrics)
    return Table(columns=columns, rows=rows, note=note, is_folded=True)


def _metric_row(view: View, metric: str) -> tuple[TableCell, ...]:
    label = view.label(metric)
    cells: list[str | TableCell] = []
    for variant in ("baseline", "enabled"):
        text, n = describe_range(view, metric, variant)
        cells += [TableCell(text=text, tone=Tone.PLAIN if n else Tone.FAINT), str(n)]
    sources = label.sources or ", ".join(sorted(_find_sources(view, metric))) or "–"
    return make_row(
        view.metric_cell(metric, f"{view.name_with_unit(metric)}{'' if view.is_comparable(metric) else ' †'}"),
        label.better or "neither",
        *cells,
        TableCell(text=sources, is_code=sources != "–"),
    )


def describe_range(view: View, metric: str, variant: str) -> tuple[str, int]:
    summaries = [trial.summary(metric) for trial in view.analysis.trials if trial.variant == variant]
    values = [headline_value(metric, summary) for summary in summaries if summary is not None]
    return view.numbers.format_range(metric, values), len(values)


def _find_sources(view: View, metric: str) -> set[str]:
    found = ((trial, trial.get_series(metric)) for trial in view.analysis.trials)
    return {describe_source(trial, series) for trial, series in found if series is not None}


def make_setup(view: View) -> Section:
    analysis = view.analysis
    plan = [
        *make_identity(analysis),
        ("steps per trial", f"{analysis.num_warmup_steps} warm-up, {analysis.num_scored_steps} scored"),
    ]
    if view.context.plan is not None:
        plan.append(("version of the rules", str(view.context.plan.run.measure.rules)))
    plan += [
        ("exploratory", "yes" if analysis.verdict.is_exploratory else "no"),
        ("experiment hash", analysis.experiment_hash),
        ("plan hash", analysis.plan_hash),
    ]
    blocks: list[Block] = [_fact_table("Plan", tuple(plan))]
    if analysis.facts:
        facts = sorted(analysis.facts.items(), key=lambda fact: fact[0].casefold())
        blocks.append(_fact_table("Hardware and software", tuple(facts)))
    if view.context.manifests:
        blocks.append(_fact_table("Manifests of the nodes", tuple(_merge_manifests(view))))
    return Section(key="setup", title="What ran", blocks=tuple(blocks))


def make_differences(view: View) -> Iterator[Section]:
    differences = view.context.differences
    if not differences:
        return
    columns = make_columns("variable or flag", "baseline", "enabled", "what", prose=("baseline", "enabled"))
    rows = tuple(
        make_row(
            TableCell(text=item.name, is_code=True),
            TableCell(text=item.baseline, is_code=True),
            TableCell(text=item.enabled, is_code=True),
            TableCell(text=item.kind.value, tone=Tone.BAD if item.kind is Kind.UNDECLARED else Tone.PLAIN),
        )
        for item in differences
    )
    note, title = (
        "The arguments and the environment of all pairs were compared flag by flag and variable by variable.",
        VARIANTS,
    )
    if view.context.is_as_planned:
        note, title = (
            "No record shows how the trials were started, so the table shows what the plan requested.",
            PLANNED_VARIANTS,
        )
    table = Table(columns=columns, rows=rows, note=note, is_folded=True)
    yield Section(key="variants", title=title, blocks=(table,))


def _fact_table(title: str, facts: tuple[tuple[str, str], ...]) -> Table:
    rows = tuple(make_row(name, TableCell(text=value, is_code=True)) for name, value in facts)
    columns = make_columns("fact", "value", prose=("fact", "value"))
    return Table(title=title, columns=columns, rows=rows, is_folded=True)


def _merge_manifests(view: View) -> Iterator[tuple[str, str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    num_left_out = 0
    for manifest in view.context.manifests:
        for path, fact in manifest.facts():
            row = path, shorten(str(fact))
            if row in rows or len(rows) < MAX_FACT_ROWS:
                rows.setdefault(row, []).append(manifest.node)
            else:
                num_left_out += 1
    for (path, value), nodes in sorted(rows.items(), key=lambda item: item[0][0]):
        is_shared = len(nodes) == len(view.context.manifests)
        yield (path, value) if is_shared else (f"{path} ({name_some(nodes, MAX_NAMED_NODES)})", value)
    if num_left_out:
        yield "more", f"{num_left_out} more facts are in the manifests of the bundle"


def make_findings(view: View) -> Section:
    findings = sort_findings((*view.analysis.findings, *view.context.findings))
    blocks: list[Block] = []
    if findings:
        columns = make_columns("where", "level", "expected", "found", prose=("where", "expected", "found"))
        rows = tuple(
            make_row(
                item.where, TableCell(text=item.level.value, tone=LEVEL_TONES[item.level]), item.expected, item.found
            )
            for item in findings
        )
        blocks.append(Table(columns=columns, rows=rows))
    else:
        blocks.append(Text(text="No findings."))
    if view.analysis.notes:
        blocks += [Text(text="Notes:"), Bullets(items=view.analysis.notes)]
    return Section(key="findings", title="Findings and notes", blocks=tuple(blocks))


def make_claims(view: View) -> Section:
    """Say what may be claimed according to the run's definition."""
    analysis, context = view.analysis, view.context
    machines = describe_machines(view)
    scope = f"against {describe_baseline(view)}, on {machines}, " if machines else ""
    scope += f"hardware {analysis.hardware}, stack {analysis.stack}, lane {analysis.lane}, run {analysis.run}"
    blocks: list[Block] = [Text(text=caution) for caution in make_cautions(view)]
    blocks += [
        Text(text="This report may be cited for:"),
        Bullets(items=(f"{analysis.verdict.headline} ({scope})",)),
    ]
    if context.may_claim:
        blocks += [Text(text="The author of the run says what it measures:"), Bullets(items=context.may_claim)]
    blocks += [
        Text(text="What this report does not show:"),
        Bullets(items=(ELSEWHERE, *find_words(analysis.workload).may_not_claim, *context.may_not_claim)),
    ]
    return Section(key="claims", title="What this report may and may not claim", blocks=tuple(blocks))


def make_commands(view: View) -> Commands:
    bundle = shlex.quote(view.context.bundle)
    unpack = (f"mkdir check && tar xzf {bundle} -C check", "unpack into an empty folder; works without rlk-repro")
    folder, first = (bundle, ()) if view.context.is_folder else ("check", (unpack,))
    again = (f"rlk-repro report {bundle}", "write this report again")
    if not view.context.is_sealed:
        return Commands(lines=(again,))
    return Commands(
        lines=(
            *first,
            (f"(cd {folder} && sha256sum -c --quiet SHA256SUMS)", "check every file; works without rlk-repro"),
            (f"rlk-repro verify {bundle}", "check the bundle, its hashes and its manifests"),
            (f"rlk-repro replay {bundle} --analyze-only", "compute this analysis again from the logs"),
            (f"rlk-repro replay {bundle}", "run the same experiment again and compare"),
            again,
        )
    )


def make_sections(view: View) -> tuple[Section, ...]:
    has_noise = view.analysis.noise_floor.is_measured or not view.analysis.is_crossover
    last = (
        make_setup(view),
        make_findings(view),
        make_claims(view),
        Section(key="reproduce", title="How to reproduce", blocks=(make_commands(view),)),
    )
    if not view.has_variants:
        return (make_cells(view), make_noise(view), make_trials(view), *last)
    agreement = (make_agreement(view),) if view.analysis.agreement else ()
    shared = (make_metrics(view), *agreement, *make_differences(view), *last)
    if not view.is_comparison:
        first = make_microbatches(view) if view.analysis.microbatches else make_checks(view)
        return (first, make_trials(view), make_operators(view), *shared)
    return (
        make_effects(view),
        make_gates(view),
        make_pairs(view),
        *((make_noise(view),) if has_noise else ()),
        make_trials(view),
        make_operators(view),
        make_modules(view),
        *shared,
    )


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
        cautions.append(f"{start_sentence(OVERRIDDEN)}.")
    if view.context.rule_changes:
        cautions.append(view.context.rule_changes)
    if has_blocking(view.context.findings):
        cautions.append(
            "Records of the bundle contradict each other: see the findings. This report is computed from the logs."
        )
    return tuple(cautions)


def list_unrecorded(view: View) -> str:
    missing = [metric for metric in view.metrics if metric not in view.recorded]
    return f"{NOT_RECORDED}: {', '.join(missing)}" if missing else ""
