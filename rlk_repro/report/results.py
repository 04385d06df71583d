"""Make a report's sections on results: effects, gates, pairs or sessions, and the noise floor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Final

from rlk_repro.base.units import format_change, format_number, name_some
from rlk_repro.report.basis import describe_change, describe_confidence, describe_interval
from rlk_repro.report.blocks import Block, Bullets, Row, Section, Table, TableCell, Text, Tone, make_table
from rlk_repro.report.labels import NOT_RECORDED, number_or_dash, start_sentence
from rlk_repro.report.view import View, describe_source
from rlk_repro.rundir.results import Effect, Gate, GateStatus, NoiseFloor, PairResult, PairStatus, count_gates
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.statistics.stats import ENERGY, PEAK_MEMORY, STEP_TIME, to_ratio

GATE_TONES: Final = {
    GateStatus.PASSED: Tone.GOOD,
    GateStatus.FAILED: Tone.BAD,
    GateStatus.UNDECIDED: Tone.OPEN,
    GateStatus.NOT_APPLICABLE: Tone.FAINT,
    GateStatus.NOT_PLANNED: Tone.OPEN,
}
PAIR_TONES: Final = {PairStatus.SCORED: Tone.PLAIN, PairStatus.VOID: Tone.BAD, PairStatus.DROPPED: Tone.BAD}
SHOWN: Final = (STEP_TIME, PEAK_MEMORY, "log_probs_time_s", "ref_log_probs_time_s", "actor_train_time_s",
                "rollout_time_s", ENERGY, "tokens_per_s")  # fmt: skip
"""The metrics of the open table, the most important first; the others are folded."""
MOST_SHOWN: Final = 6
SMALLEST_SHOWN_P: Final = 0.001
BY_BLOCKS: Final = "by blocks alone"
OTHER_WORK: Final = "other work †"
INSIDE_NOTE: Final = (
    "† Not comparable: RL-Kernel's grpo_loss calls the trainer's own functions once more, without gradient, "
    "so this timer measures more work in enabled than in baseline. Compare the whole GRPO loss instead."
)
OF_GATES: Final = (
    "A failed gate makes the verdict not comparable; an undecided gate makes it inconclusive. Bounds are one-sided."
)
RATIO_KL: Final = (
    "RL-Kernel's ratio_kl belongs to the log-prob timers; clip and KL are always the trainer's own functions."
)


def make_effects(view: View) -> Section:
    effects = view.effects
    wanted = [name for name in SHOWN if (found := view.analysis.effect(name)) is not None and found.ratio is not None]
    shown = [effect for effect in effects if effect.metric in wanted[:MOST_SHOWN]] or effects[:MOST_SHOWN]
    interval = f"{' or '.join(dict.fromkeys(map(describe_confidence, effects)))} interval".strip()
    numbers = (BASELINE, ENABLED, "change", interval)
    what = "blocks" if view.analysis.is_crossover else "pairs"
    note = (
        f"Baseline and enabled are means over the scored {view.analysis.unit}s; peak memory is the highest value. A "
        f"change compares the variants within {what}, so it need not be the ratio of the two means."
    )
    rows = [_effect_row(view, effect) for effect in shown]
    table = make_table("metric", *numbers, rows=rows, numbers=numbers, note=note)
    blocks = (table, _list_metrics(view, effects, numbers))
    return Section(key="effects", title="Effects", blocks=blocks, summary=True)


def _effect_row(view: View, effect: Effect) -> Row:
    label = view.metric(effect.metric).label
    name = view.metric_cell(effect.metric, f"{label}{' (primary)' if effect.role == 'primary' else ''}")
    means = _show_means(view, effect.metric)
    if not view.is_comparable(effect.metric):
        return name, *means, OTHER_WORK, ""
    return name, *means, describe_change(effect), describe_interval(effect)


def _show_means(view: View, name: str) -> list[str]:
    return [view.metric(name).show(view.mean(name, variant), "–") for variant in (BASELINE, ENABLED)]


def _list_metrics(view: View, effects: Sequence[Effect], numbers: Sequence[str]) -> Table:
    """List every metric with its p values, also those that are no cost, such as the loss, and have no effect."""
    exact = "randomisation p" if view.analysis.is_crossover else "sign-flip p"
    numbers, prose = (*numbers, BY_BLOCKS, "n", exact, "t p", "Holm p"), ("source", "note")
    rows: list[Row] = [(*_effect_row(view, effect), *_statistics(view, effect)) for effect in effects]
    known = {effect.metric for effect in effects}
    for metric in view.metrics:
        if metric in view.recorded and metric not in known:
            means = _show_means(view, metric)
            name = view.metric_cell(metric, view.metric(metric).label)
            rows.append((name, *means, *[""] * 7, *_origin(view, metric), ""))
    return make_table(
        "metric", *numbers, "better", *prose, rows=rows, numbers=numbers, prose=prose, title="Every metric",
        note=_explain(view, exact), is_folded=True,
    )  # fmt: skip


def _statistics(view: View, effect: Effect) -> Row:
    noise = view.noise.get(effect.metric)
    floor = "" if effect.p_floor is None else f" ({_describe_p(effect.p_floor)})"
    return (
        "" if noise is None else f"± {format_number(100 * math.expm1(noise.half_width(effect.confidence)), 2)} %",
        str(effect.n),
        f"{_describe_p(effect.p_value)}{floor}",
        _describe_p(effect.p_t),
        _describe_p(effect.p_holm),
        *_origin(view, effect.metric),
        effect.note,
    )


def _explain(view: View, exact: str) -> str:
    missing = [metric for metric in view.metrics if metric not in view.recorded]
    notes = [
        f"'t p' comes from a t test on the log ratios of n {view.analysis.unit}s, and 'Holm p' is corrected for the "
        f"number of secondary metrics. '{exact}' is exact and two-sided; the smallest p that n allows is in brackets."
    ]
    if view.analysis.is_crossover:
        notes.append(
            f"'{exact}' is for the primary metric only, and for the hypothesis that RL-Kernel changes no block of any "
            "session; where sessions differ, only the interval tells of their mean."
        )
    if view.noise:
        notes.append(
            f"'{BY_BLOCKS}' is the half width that the noise of blocks alone gives. An interval that is narrower "
            "owes its width to luck (docs/statistics.md)."
        )
    notes += [RATIO_KL] if "RL-Kernel" in view.analysis.serving else []
    notes += [] if all(map(view.is_comparable, view.metrics)) else [INSIDE_NOTE]
    notes += [f"Not recorded: {', '.join(missing)}."] if missing else []
    return " ".join(notes)


def _origin(view: View, metric: str) -> tuple[str, str]:
    """Return which direction is better and where the log or the ops files hold the metric."""
    label = view.metric(metric)
    found = ((trial, trial.get_series(metric)) for trial in view.analysis.trials)
    sources = {describe_source(trial, series) for trial, series in found if series is not None}
    return label.better or "neither", label.sources or ", ".join(sorted(sources)) or "–"


def _describe_p(value: float | None) -> str:
    if value is None:
        return "n/a"
    return "< 0.001" if value < SMALLEST_SHOWN_P else format_number(value, 2)


def make_gates(view: View) -> Section:
    gates = view.analysis.gates
    numbers, prose = ("estimate", "bounds", "margin", "n"), ("what",)
    rows = [_gate_row(view, gate) for gate in gates]
    table = make_table(
        "gate", "status", *numbers, *prose, rows=rows, numbers=numbers, prose=prose, title="Every gate", note=OF_GATES,
        is_folded=True,
    )  # fmt: skip
    is_open = {GateStatus.FAILED, GateStatus.UNDECIDED, GateStatus.NOT_PLANNED}
    found = tuple(f"{gate.name}: {gate.shown.word}: {gate.detail}" for gate in gates if gate.shown in is_open)
    blocks: list[Block] = [Text(text=f"{count_gates(gates)}."), *([Bullets(items=found)] if found else []), table]
    return Section(key="gates", title="Gates", blocks=tuple(blocks), summary=True)


def _gate_row(view: View, gate: Gate) -> Row:
    ends = [number_or_dash(value) for value in (gate.low, gate.high) if value is not None]
    return (
        view.metric_cell(gate.name, gate.name) if gate.name in view.metrics else gate.name,
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
    tables = [_make_pair_table(view, pairs, BASELINE, ENABLED), *make_allocation_tables(view)]
    if view.analysis.is_crossover:
        tables += [_make_block_table(view), _make_percentiles(view)]
    return Section(key="pairs", title=title, blocks=tuple(tables))


def _make_pair_table(view: View, pairs: Sequence[PairResult], first: str, second: str) -> Table:
    label, unit = view.metric(view.primary), view.analysis.unit
    numbers = (*(f"{name} ({label.unit})" if label.unit else name for name in (first, second)), "change")
    note = f"Values are medians of {label.label} over the scored steps. "
    note += "The order says which of the two trials ran first."
    if view.analysis.is_crossover:
        note = note.partition(". ")[0] + (
            ". A change is the Hodges-Lehmann estimate of the blocks' changes. In an order such as ABBA, A is baseline "
            "and B is enabled."
        )
    rows: list[Row] = []
    for pair in pairs:
        status = TableCell(text=pair.status.value, tone=PAIR_TONES[pair.status])
        why = "; ".join(part for part in (pair.reason, pair.control_reason) if part)
        rows.append((pair.pair, pair.order, status, *make_pair_cells(view, pair, view.primary), why))
    prose = ("why",)
    return make_table(unit, "order", "status", *numbers, *prose, rows=rows, numbers=numbers, prose=prose, note=note)


def make_pair_cells(view: View, pair: PairResult, metric: str) -> tuple[TableCell, ...]:
    """Return the values of the pair's first and second trial, and the change."""
    found, ratio = pair.metric(metric), pair_ratio(pair, metric)
    values = (found.first, found.second) if found else (None, None)
    trials = map(view.find_trial, (pair.first, pair.second))
    cells = (view.value_cell(metric, trial, value) for trial, value in zip(trials, values, strict=True))
    return (*cells, TableCell(text=NOT_RECORDED if ratio is None else format_change(ratio)))


def pair_ratio(pair: PairResult, metric: str) -> float | None:
    found = pair.metric(metric)
    return None if found is None or found.log_ratio is None else to_ratio(found.log_ratio)


def make_allocation_tables(view: View) -> Iterator[Table]:
    """Yield a table with the effect of each allocation if pairs of more than one allocation count."""
    whole = view.by_allocation
    if whole is None:
        return
    unit = view.analysis.unit
    numbers, prose = (f"{unit}s", f"{BASELINE} ({view.metric(view.primary).unit})", "change"), ("which", "GPUs")
    rows = []
    for number, (allocation, counted) in enumerate(view.allocations, start=1):
        first = view.metric(view.primary).format(mean(item.first or 0.0 for item in counted.values()))
        change = format_change(to_ratio(mean(item.log_ratio or 0.0 for item in counted.values())))
        nodes, gpus = name_some(allocation.nodes) or "unknown", name_some(allocation.gpus, 8) or "unknown"
        rows.append((str(number), str(len(counted)), first, change, name_some(counted, 12), nodes, gpus))
    note = (
        f"The verdict's interval counts each {unit} as one observation. If the effect differs more between allocations "
        "than within them, that interval is too narrow for other machines. With each allocation as one observation, "
        f"the change is {describe_change(whole)} ({describe_confidence(whole)} interval "
        f"{describe_interval(whole)}, n = {whole.n})."
    )
    yield make_table(
        "allocation", *numbers, "which", "nodes", "GPUs", rows=rows, numbers=numbers, prose=prose,
        title="Allocation by allocation", note=note,
    )  # fmt: skip


def _make_block_table(view: View) -> Table:
    numbers, prose = ("change", "by first steps"), ("lost because",)
    has_first = any(block.first_log_ratio != block.log_ratio for block in view.analysis.blocks)
    rows = []
    for block in view.analysis.blocks:
        ratios = (block.log_ratio, block.first_log_ratio if has_first else None)
        changes = ["" if ratio is None else format_change(to_ratio(ratio)) for ratio in ratios]
        kind = "control" if block.is_control else "comparison"
        rows.append((block.session, str(block.number), block.order, kind, *changes, block.reason))
    note = (
        "A change compares the step time of B with that of A over a block's scored steps; in a control block, A and B "
        "are both the baseline. 'by first steps' is the same change over the first step of each period."
    )
    return make_table(
        "session", "block", "order", "kind", *numbers, *prose, rows=rows, numbers=numbers, prose=prose,
        title="Block by block", note=note, is_folded=True,
    )  # fmt: skip


def _make_percentiles(view: View) -> Table:
    shown = ("n", "p50", "p90", "p99")
    metric, rows = view.metric(view.primary), []
    for variant, item in view.analysis.pooled.items():
        values = [metric.format(value, f"n/a (n={item.n})") for value in (item.p50, item.p90, item.p99)]
        rows.append((variant, str(item.n), *values))
    note = "These numbers cover all scored steps; no verdict uses them, because a session's steps depend on each other."
    title = f"Percentiles of {metric.named}"
    return make_table("variant", *shown, rows=rows, numbers=shown, title=title, note=note, is_folded=True)


def make_noise(view: View) -> Section:
    analysis = view.analysis
    blocks: list[Block] = [Text(text=describe_floor(analysis.noise_floor))]
    if controls := [pair for pair in analysis.pairs if pair.is_control]:
        blocks.append(_make_pair_table(view, controls, "first", "second"))
    return Section(key="noise", title=f"Noise floor and control {analysis.unit}s", blocks=tuple(blocks))


def describe_floor(floor: NoiseFloor) -> str:
    if floor.fraction is None:
        return f"{start_sentence(floor.note)}."
    return f"{format_number(100 * floor.fraction, 3)} %: the {floor.note}."
