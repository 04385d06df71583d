"""Make a report's sections on results: effects, gates, pairs or sessions, and the noise floor."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from rlk_repro.base.units import format_change, format_number
from rlk_repro.report.basis import describe_change, describe_confidence, describe_interval
from rlk_repro.report.blocks import Block, Bullets, Row, Section, Table, TableCell, Text, Tone, make_table
from rlk_repro.report.labels import NOT_RECORDED, number_or_dash, start_sentence
from rlk_repro.report.view import View
from rlk_repro.rundir.results import (
    Analysis,
    Effect,
    Gate,
    GateStatus,
    NoiseFloor,
    PairResult,
    PairStatus,
    VerdictWord,
    count_gates,
)
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.statistics.stats import (
    ENERGY,
    LOSS,
    NO_GRAD,
    PEAK_MEMORY,
    STEP_TIME,
    Interval,
    t_interval,
    to_ratio,
)

CONFIDENCE: Final = 0.95
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
    interval = f"{describe_confidence(*effects)} interval".strip()
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
    numbers = (*numbers, BY_BLOCKS, "n", exact, "t p", "Holm p")
    rows: list[Row] = [(*_effect_row(view, effect), *_statistics(view, effect)) for effect in effects]
    known = {effect.metric for effect in effects}
    for metric in view.metrics:
        if metric in view.recorded and metric not in known:
            name = view.metric_cell(metric, view.metric(metric).label)
            rows.append((name, *_show_means(view, metric), *[""] * 8))
    names, title = ("metric", *numbers, "note"), "Every metric"
    note = _explain(view, exact)
    return make_table(*names, rows=rows, numbers=numbers, prose=("note",), title=title, note=note, is_folded=True)


def _statistics(view: View, effect: Effect) -> Row:
    noise = view.noise.get(effect.metric)
    floor = "" if effect.p_floor is None else f" ({_describe_p(effect.p_floor)})"
    return (
        "" if noise is None else f"± {format_number(100 * math.expm1(noise.half_width(effect.confidence)), 2)} %",
        str(effect.n),
        f"{_describe_p(effect.p_value)}{floor}",
        _describe_p(effect.p_t),
        _describe_p(effect.p_holm),
        effect.note,
    )


def _explain(view: View, exact: str) -> str:
    notes = [
        f"'t p' comes from a t test on the log ratios of n {view.analysis.unit}s, and 'Holm p' is corrected for the "
        f"number of secondary metrics. '{exact}' is exact, two-sided and of the primary metric only; the smallest p "
        "that n allows is in brackets."
    ]
    if view.noise:
        notes.append(
            f"'{BY_BLOCKS}' is the half width that the noise of blocks alone gives. An interval that is narrower "
            "owes its width to luck."
        )
    notes += [RATIO_KL] if "RL-Kernel" in view.analysis.serving else []
    notes += [] if all(map(view.is_comparable, view.metrics)) else [INSIDE_NOTE]
    return " ".join(notes)


def _describe_p(value: float | None) -> str:
    if value is None:
        return "n/a"
    return "< 0.001" if value < SMALLEST_SHOWN_P else format_number(value, 2)


def list_saved(analysis: Analysis, names: Collection[str] | None = None) -> list[float]:
    """Return by how many seconds log-probs and GRPO loss are shorter in the enabled steps of each session or pair.

    The times are medians over the scored steps, and vary much less than those of whole steps.  There are none of
    variants that are not comparable, that trained on different rollouts (lane ``live``), and without these timers.
    """
    saved = []
    is_alike = analysis.lane != "live" and analysis.verdict.word is not VerdictWord.NOT_COMPARABLE
    for pair in analysis.pairs if is_alike and analysis.workload == "vime" else ():
        found = [pair.metric(name) for name in (NO_GRAD, *LOSS)]
        times = [item.first - item.second for item in found if item and item.first and item.second]
        if pair.is_counted and len(times) == len(found) and (names is None or pair.pair in names):
            saved.append(sum(times))
    return saved


def describe_saved(saved: Interval) -> str:
    word, sign = ("less", 1000) if saved.estimate >= 0 else ("more", -1000)
    low, high = sorted((sign * saved.low, sign * saved.high))
    return (
        f"log-probs and GRPO loss take {sign * saved.estimate:.1f} ms {word} (95 % interval {low:.1f} to {high:.1f} ms)"
    )


def measure_saved(analysis: Analysis) -> Interval | None:
    """Return the interval of ``list_saved`` in seconds; None with fewer than two sessions or pairs."""
    return t_interval(list_saved(analysis), CONFIDENCE)


def describe_functions(view: View) -> str:
    """Say what the replaced functions save within the steps, or return an empty text."""
    saved, step = measure_saved(view.analysis), view.mean(STEP_TIME, BASELINE)
    if saved is None or not step:
        return ""
    share = f"{100 * abs(saved.estimate) / step:.2f} %"
    return (
        f"In these steps, {describe_saved(saved)}, {share} of a step; only whole steps tell whether the rest changes."
    )


def make_gates(view: View) -> Section:
    gates = view.analysis.gates
    names = {gate.name: view.metric_cell(gate.name, gate.name) for gate in gates if gate.name in view.metrics}
    table = make_gate_table(gates, names, title="Every gate", note=OF_GATES, is_folded=True)
    is_open = {GateStatus.FAILED, GateStatus.UNDECIDED, GateStatus.NOT_PLANNED}
    found = tuple(f"{gate.name}: {gate.shown.word}: {gate.detail}" for gate in gates if gate.shown in is_open)
    words = Text(text=f"{count_gates(gates)}.")
    blocks: tuple[Block, ...] = (words, Bullets(items=found), table) if found else (words, table)
    return Section(key="gates", title="Gates", blocks=blocks, summary=True)


def make_gate_table(gates: Sequence[Gate], names: Mapping[str, TableCell], **others: Any) -> Table:
    """Make the table of gates; ``names`` are the cells of gates that are metrics."""
    numbers, prose = ("estimate", "bounds", "margin", "n"), ("what",)
    rows = []
    for gate in gates:
        ends = [number_or_dash(value) for value in (gate.low, gate.high) if value is not None]
        row = (
            names.get(gate.name, gate.name),
            TableCell(text=gate.shown.word, tone=GATE_TONES[gate.shown]),
            number_or_dash(gate.estimate),
            " to ".join(ends) or "–",
            number_or_dash(gate.margin),
            str(gate.n),
            gate.detail,
        )
        rows.append(row)
    return make_table("gate", "status", *numbers, *prose, rows=rows, numbers=numbers, prose=prose, **others)


def make_pairs(view: View) -> Section:
    analysis = view.analysis
    title = f"{start_sentence(analysis.unit)} by {analysis.unit}"
    blocks: list[Block] = [Text(text=f"No comparison {analysis.unit}.")]
    if analysis.pairs:
        blocks = [_make_pair_table(view)]
    if analysis.noise_floor.is_measured or not analysis.is_crossover:
        blocks.append(Text(text=f"Noise floor: {describe_floor(analysis.noise_floor)}"))
    return Section(key="pairs", title=title, blocks=tuple(blocks))


def _make_pair_table(view: View) -> Table:
    label, unit = view.metric(view.primary), view.analysis.unit
    suffix = f" ({label.unit})" if label.unit else ""
    numbers = (f"{BASELINE}{suffix}", f"{ENABLED}{suffix}", "change")
    note = f"Values are medians of {label.label} over the scored steps"
    if view.analysis.is_crossover:
        note += "; a change is the Hodges-Lehmann estimate of the blocks' changes."
    else:
        note += "; a control pair has two baseline trials. The order says which trial ran first."
    rows: list[Row] = []
    for pair in view.analysis.pairs:
        status = TableCell(text=pair.status.value, tone=PAIR_TONES[pair.status])
        why = "; ".join(part for part in (pair.reason, pair.control_reason) if part)
        kind = "control" if pair.is_control else ""
        rows.append((pair.pair, kind, pair.order, status, *make_pair_cells(view, pair, view.primary), why))
    names = (unit, "kind", "order", "status", *numbers, "why")
    return make_table(*names, rows=rows, numbers=numbers, prose=("why",), note=note)


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


def describe_floor(floor: NoiseFloor) -> str:
    if floor.fraction is None:
        return f"{start_sentence(floor.note)}."
    return f"{format_number(100 * floor.fraction, 3)} %: the {floor.note}."
