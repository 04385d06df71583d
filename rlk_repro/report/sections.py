"""Make a report's sections on results: effects, gates, pairs, trials, operator decisions and the noise floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from rlk_repro.base.units import format_count, format_duration, format_number, format_percent
from rlk_repro.operators import OPERATORS
from rlk_repro.report.allocations import make_allocation_tables
from rlk_repro.report.answer import VERDICT_TONES, did_not_run
from rlk_repro.report.basis import describe_confidence, describe_interval
from rlk_repro.report.blocks import (
    Block,
    Bullets,
    Section,
    Table,
    TableCell,
    Text,
    Tone,
    drop_empty_columns,
    make_columns,
    make_row,
)
from rlk_repro.report.checks import TONES
from rlk_repro.report.labels import NOT_RECORDED, number_or_dash, start_sentence
from rlk_repro.report.view import View, log_path
from rlk_repro.rundir.agreement import CheckWord, choose_word
from rlk_repro.rundir.results import (
    Analysis,
    DecisionSummary,
    Effect,
    Gate,
    GateStatus,
    NoiseFloor,
    PairResult,
    PairStatus,
    ProofStatus,
    TrialResult,
    TrialStatus,
)
from rlk_repro.statistics.stats import to_ratio

GATE_TONES: Final = {
    GateStatus.PASSED: Tone.GOOD,
    GateStatus.FAILED: Tone.BAD,
    GateStatus.UNDECIDED: Tone.OPEN,
    GateStatus.NOT_APPLICABLE: Tone.FAINT,
    GateStatus.NOT_PLANNED: Tone.OPEN,
}
PROOF_TONES: Final = {
    ProofStatus.PROVED: Tone.GOOD,
    ProofStatus.NATIVE: Tone.OPEN,
    ProofStatus.FALLBACK: Tone.BAD,
    ProofStatus.MISSING: Tone.BAD,
    ProofStatus.NOT_REQUESTED: Tone.FAINT,
}
SMALLEST_SHOWN_P: Final = 0.001
BY_BLOCKS: Final = "by blocks alone"
OTHER_WORK: Final = "other work †"
INSIDE_NOTE: Final = (
    "† Not comparable: RL-Kernel's grpo_loss calls the trainer's own functions once more, without gradient, "
    "so this timer measures more work in enabled than in baseline. Compare the whole GRPO loss instead."
)
PAIR_TONES: Final = {PairStatus.SCORED: Tone.PLAIN, PairStatus.VOID: Tone.BAD, PairStatus.DROPPED: Tone.BAD}


def choose_tone(analysis: Analysis) -> Tone:
    """Choose the verdict's colour; a run in which no kernel of RL-Kernel ran gets the colour of `inconclusive`."""
    word = choose_word(analysis.checks)
    if did_not_run(analysis) and word is not CheckWord.FAIL:
        return Tone.OPEN
    return TONES[word] if analysis.checks else VERDICT_TONES[analysis.verdict.word]


def make_effects(view: View) -> Section:
    effects = sorted(view.effects, key=lambda effect: view.metric_rank(effect.metric))
    interval = f"{' or '.join(dict.fromkeys(map(describe_confidence, effects)))} interval".strip()
    unit = view.analysis.unit
    exact = "randomisation p" if view.analysis.is_crossover else "sign-flip p"
    numbers = ("change", interval, BY_BLOCKS, "n", exact, "t p", "Holm p")
    columns = make_columns("metric", *numbers, "better", "note", numbers=numbers, prose=("note",))
    rows = tuple(_effect_row(view, effect) for effect in effects)
    note = (
        f"The interval and 't p' come from a t test on the log ratios of n {unit}s. The column '{exact}' is exact and "
        "two-sided; the smallest p that this n allows is in brackets. The column 'Holm p' is 't p' corrected for the "
        "number of secondary metrics."
    )
    if view.analysis.is_crossover:
        note += (
            f" '{exact}' is given for the primary metric only, if its orders are few enough to count. It is exact for "
            "the hypothesis that RL-Kernel changes no block of any session; where sessions differ, only the interval "
            "tells of their mean."
        )
    if view.noise:
        note += (
            f" The column '{BY_BLOCKS}' is the half width that the noise of single blocks alone gives. An interval "
            "that is narrower owes its width to luck (docs/statistics.md)."
        )
    if not all(view.is_comparable(effect.metric) for effect in effects):
        note += f" {INSIDE_NOTE}"
    table = drop_empty_columns(Table(columns=columns, rows=rows, note=note))
    text = Text(
        text=f"Each change is the ratio enabled / baseline over the scored {unit}s, in percent of the baseline."
    )
    return Section(key="effects", title="Effects", blocks=(text, table))


def _effect_row(view: View, effect: Effect) -> tuple[TableCell, ...]:
    label = view.label(effect.metric)
    is_primary = effect.role == "primary"
    if not view.is_comparable(effect.metric):
        return make_row(view.metric_cell(effect.metric, label.label), OTHER_WORK, *[""] * 8)
    noise = view.noise.get(effect.metric)
    floor = "" if effect.p_floor is None else f" ({_describe_p(effect.p_floor)})"
    return make_row(
        view.metric_cell(effect.metric, f"{label.label}{' (primary)' if is_primary else ''}"),
        "no comparison" if effect.ratio is None else format_percent(effect.ratio),
        describe_interval(effect),
        "" if noise is None else f"± {format_number(100 * math.expm1(noise.half_width(effect.confidence)), 2)} %",
        str(effect.n),
        f"{_describe_p(effect.p_value)}{floor}",
        _describe_p(effect.p_t),
        _describe_p(effect.p_holm),
        label.better or "neither",
        effect.note,
    )


def _describe_p(value: float | None) -> str:
    if value is None:
        return "n/a"
    return "< 0.001" if value < SMALLEST_SHOWN_P else format_number(value, 2)


def make_gates(view: View) -> Section:
    columns = make_columns(
        "gate", "status", "estimate", "bounds", "margin", "n", "what",
        numbers=("estimate", "bounds", "margin", "n"), prose=("what",),
    )  # fmt: skip
    note = (
        "A failed gate makes the verdict not comparable; an undecided gate makes it inconclusive. Bounds are one-sided."
    )
    rows = tuple(_gate_row(view, gate) for gate in view.analysis.gates)
    return Section(key="gates", title="Gates", blocks=(Table(columns=columns, rows=rows, note=note),))


def _gate_row(view: View, gate: Gate) -> tuple[TableCell, ...]:
    ends = [number_or_dash(value) for value in (gate.low, gate.high) if value is not None]
    name = view.metric_cell(gate.name, gate.name) if gate.name in view.metrics else TableCell(text=gate.name)
    return make_row(
        name,
        TableCell(text=gate.shown.word, tone=GATE_TONES[gate.shown]),
        number_or_dash(gate.estimate),
        " to ".join(ends) or "–",
        number_or_dash(gate.margin),
        str(gate.n),
        gate.detail,
    )


def make_pairs(view: View) -> Section:
    pairs = [pair for pair in view.analysis.pairs if not pair.is_control]
    unit = view.analysis.unit
    title = f"{start_sentence(unit)} by {unit}"
    if not pairs:
        return Section(key="pairs", title=title, blocks=(Text(text=f"No comparison {unit}."),))
    tables = [
        _make_pair_table(view, pairs, "baseline", "enabled"),
        *make_allocation_tables(view),
        *_make_block_tables(view),
    ]
    return Section(key="pairs", title=title, blocks=tuple(tables))


def _make_block_tables(view: View) -> Iterable[Table]:
    if not view.analysis.is_crossover:
        return
    numbers = ("change", "by first steps")
    has_first = any(block.first_log_ratio != block.log_ratio for block in view.analysis.blocks)
    columns = make_columns("session", "block", "order", "kind", *numbers, "lost because", numbers=numbers,
                           prose=("lost because",))  # fmt: skip
    rows = tuple(
        make_row(
            block.session,
            str(block.number),
            block.order,
            "control" if block.is_control else "comparison",
            *(
                "" if ratio is None else format_percent(to_ratio(ratio))
                for ratio in (block.log_ratio, block.first_log_ratio if has_first else None)
            ),
            block.reason,
        )
        for block in view.analysis.blocks
    )
    note = (
        "A change compares the step time of B with that of A over a block's scored steps; in a control block, A and B "
        "are both the baseline."
    )
    if has_first:
        note += (
            " The column 'by first steps' is the same change, but over the first step of each period, which is not "
            "scored."
        )
    yield drop_empty_columns(Table(title="Block by block", columns=columns, rows=rows, note=note, is_folded=True))
    metric, shown = view.primary, ("n", "p50", "p90", "p99")
    columns = make_columns("variant", *shown, numbers=shown)
    rows = tuple(
        make_row(variant, str(item.n), *(
            f"n/a (n={item.n})" if value is None else view.numbers.format(metric, value)
            for value in (item.p50, item.p90, item.p99)
        ))
        for variant, item in view.analysis.pooled.items()
    )  # fmt: skip
    note = "These numbers cover all scored steps; no verdict uses them, because a session's steps depend on each other."
    title = f"Percentiles of {view.name_with_unit(metric)}"
    yield Table(title=title, columns=columns, rows=rows, note=note, is_folded=True)


def _make_pair_table(view: View, pairs: Sequence[PairResult], first: str, second: str) -> Table:
    unit = view.label(view.primary).unit
    first, second = (f"{name} ({unit})" if unit else name for name in (first, second))
    numbers = (first, second, "change")
    columns = make_columns(view.analysis.unit, "order", "status", *numbers, "why", numbers=numbers, prose=("why",))
    note = (
        f"Values are those of the metric {view.label(view.primary).label}. The value of a trial is the median of its "
        "scored steps (times and rates), their maximum (memory) or their mean (other metrics). The order says which "
        "of the two trials ran first."
    )
    if view.analysis.is_crossover:
        note = (
            f"A value is the median of the metric {view.label(view.primary).label} over the scored steps. A change is "
            "the Hodges-Lehmann estimate of the blocks' changes. "
            "In an order such as ABBA, A is baseline and B is enabled."
        )
    rows = tuple(_pair_row(view, pair, view.primary) for pair in pairs)
    return drop_empty_columns(Table(columns=columns, rows=rows, note=note))


def _pair_row(view: View, pair: PairResult, metric: str) -> tuple[TableCell, ...]:
    return make_row(
        pair.pair,
        pair.order,
        TableCell(text=pair.status.value, tone=PAIR_TONES[pair.status]),
        *make_pair_cells(view, pair, metric),
        "; ".join(part for part in (pair.reason, pair.control_reason) if part),
    )


def make_pair_cells(view: View, pair: PairResult, metric: str) -> tuple[TableCell, ...]:
    """Return the values of the pair's first and second trial, and the change."""
    found, ratio = pair.metric(metric), pair_ratio(pair, metric)
    values = (found.first, found.second) if found else (None, None)
    trials = map(view.find_trial, (pair.first, pair.second))
    cells = (view.value_cell(metric, trial, value) for trial, value in zip(trials, values, strict=True))
    return (*cells, TableCell(text=NOT_RECORDED if ratio is None else format_percent(ratio)))


def pair_ratio(pair: PairResult, metric: str) -> float | None:
    found = pair.metric(metric)
    if found is None or found.log_ratio is None:
        return None
    return to_ratio(found.log_ratio)


def make_trials(view: View) -> Section:
    unit = view.label(view.primary).unit
    mean, median = (f"{what} ({unit})" for what in ("mean", "median"))
    columns = make_columns(
        "trial", "seed", "status", "steps", "duration", mean, median, view.analysis.serving, "throttled", "log", "why",
        numbers=("seed", "steps", "duration", mean, median, "throttled"), prose=("why",),
    )  # fmt: skip
    rows = tuple(_trial_row(view, trial) for trial in view.analysis.trials)
    note = (
        f"Trials are in the order that they ran. Mean and median are those of {view.label(view.primary).label} over "
        "the scored steps. Throttled is the share of telemetry samples in which heat or a fault slowed a device down; "
        f"the power limit does not count. The log of a trial is {log_path('<trial>')}."
    )
    blocks: list[Block] = [drop_empty_columns(Table(columns=columns, rows=rows, note=note))]
    if rejects := tuple(_describe_rejects(view.analysis.trials)):
        blocks += [Text(text="Log lines that looked like metrics but were refused:"), Bullets(items=rejects)]
    return Section(key="trials", title="Trials", blocks=tuple(blocks))


def _trial_row(view: View, trial: TrialResult) -> tuple[TableCell, ...]:
    summary = trial.summary(view.primary)
    mean, median = (summary.mean, summary.median) if summary else (None, None)
    throttled = NOT_RECORDED if trial.throttled_fraction is None else f"{trial.throttled_fraction * 100:.1f} %"
    return make_row(
        TableCell(text=trial.name, anchor=view.trial_anchor(trial.name), is_code=True),
        str(trial.seed),
        TableCell(text=trial.status.value, tone=Tone.PLAIN if trial.status is TrialStatus.OK else Tone.BAD),
        f"{trial.num_steps_found} of {trial.num_steps_expected}",
        NOT_RECORDED if trial.duration_s is None else format_duration(trial.duration_s),
        view.value_cell(view.primary, trial, mean),
        view.value_cell(view.primary, trial, median),
        make_proof_cell(view, trial),
        throttled,
        view.file_cell(log_path(trial.folder), "log" if view.context.run_directory else ""),
        "; ".join(part for part in (trial.reason, trial.proof_reason) if part),
    )


def make_proof_cell(view: View, trial: TrialResult) -> TableCell:
    if not view.has_variants:
        return TableCell(text="n/a", tone=Tone.FAINT)
    return TableCell(text=trial.proof.value, tone=PROOF_TONES[trial.proof])


def _describe_rejects(trials: Iterable[TrialResult]) -> Iterable[str]:
    for trial in trials:
        for reason, count in sorted(trial.rejects.items()):
            yield f"{trial.name}: {count} × {reason}"


def make_operators(view: View) -> Section:
    groups: dict[tuple[str, str, str, bool], list[tuple[TrialResult, DecisionSummary]]] = {}
    for trial in view.analysis.trials:
        for item in trial.decisions:
            key = (item.op, item.implementation, item.reason, item.is_rl_kernel)
            groups.setdefault(key, []).append((trial, item))
    title = "Operators: what ran"
    if not groups:
        return Section(key="operators", title=title, blocks=(Text(text=f"Decisions: {NOT_RECORDED}."),))
    columns = make_columns(
        "operator", "implementation", "RL-Kernel", "why", "trials", "calls", "tokens", "fallbacks",
        numbers=("calls", "tokens", "fallbacks"), prose=("why", "trials"),
    )  # fmt: skip
    rows = tuple(_operator_row(found) for found in groups.values())
    note = "Calls, tokens and fallbacks are sums over all ranks; a range goes from the lowest to the highest trial."
    table = drop_empty_columns(Table(columns=columns, rows=rows, note=note))
    return Section(key="operators", title=title, blocks=(table,))


def _operator_row(found: list[tuple[TrialResult, DecisionSummary]]) -> tuple[TableCell, ...]:
    decisions = [item for _, item in found]
    first = decisions[0]
    return make_row(
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
    low, high = format_count(ordered[0]), format_count(ordered[-1])
    return low if low == high else f"{low} – {high}"


def make_noise(view: View) -> Section:
    analysis = view.analysis
    blocks: list[Block] = [Text(text=describe_floor(analysis.noise_floor))]
    if controls := [pair for pair in analysis.pairs if pair.is_control]:
        blocks.append(_make_pair_table(view, controls, "first", "second"))
    return Section(key="noise", title=f"Noise floor and control {analysis.unit}s", blocks=tuple(blocks))


def describe_floor(floor: NoiseFloor) -> str:
    if floor.fraction is None:
        return f"{start_sentence(floor.note)}."
    return f"{floor.fraction * 100:.2f} %: the {floor.note}."
