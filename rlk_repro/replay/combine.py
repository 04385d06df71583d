"""Combine bundles of one experiment: one effect per machine, their mean, and what the next machine will show.

Sessions repeat a measurement on one machine.  Only several machines say something about a kind of GPU.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rlk_repro.analysis.allocations import Allocation, list_allocations, number_hosts
from rlk_repro.analysis.evidence import Evidence
from rlk_repro.analysis.gates import ACTIVE, MANIFESTS, OWN_GPUS, make_pooled_gates
from rlk_repro.analysis.verdict import show_gate
from rlk_repro.base.answer import Answer
from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.findings import Finding, Level, diff_values, has_blocking, refuse_blocking
from rlk_repro.base.units import count, group, name_some
from rlk_repro.plan import Plan
from rlk_repro.prediction import PS_PER_MS, Measured, shape_of
from rlk_repro.replay.compare import changes_nothing
from rlk_repro.replay.recorded import CONTRADICTS, open_intact, read_result
from rlk_repro.report.blocks import Block, Figure, Figures, Section, Text, make_table
from rlk_repro.report.forest import draw_changes, make_change
from rlk_repro.report.plots import plot_steps
from rlk_repro.report.results import describe_saved, list_saved, make_gate_table
from rlk_repro.report.view import Context, View
from rlk_repro.rundir.results import Analysis, Gate, GateStatus, PairResult, TrialResult, VerdictWord, count_gates
from rlk_repro.spec.choices import FREE_RULES
from rlk_repro.statistics.stats import (
    ABS_DIFF,
    GATED,
    LOSS,
    NO_GRAD,
    RAW_REWARD,
    STEP_TIME,
    Interval,
    mean,
    prediction_interval,
    t_interval,
    t_quantile,
    to_ratio,
)

LEAST: Final = 3
"""Machines that a claim about a kind of GPU needs; from so many hosts on, the host is the unit."""
CONFIDENCE: Final = 0.95
NEEDED: Final = frozenset({ACTIVE, MANIFESTS, OWN_GPUS})
"""Gates that say whether the named implementation ran, in equal software, and on GPUs of its own."""
MAY_DIFFER: Final = FREE_RULES | {"rules", "time_limit_min", "stack", "stack_on"}
"""What tells nothing about a machine, beside texts and other hardware: a stack's name, for example, because the commits
that really ran are compared."""


@dataclass(frozen=True, kw_only=True)
class Machine(Answer):
    """One machine: its effect is the mean over the sessions or pairs that count, of all bundles it made.

    Its interval is that of this one machine, whose sessions or pairs are the units.
    """

    name: str
    gpus: tuple[str, ...]
    host: int
    bundles: tuple[str, ...]
    n: int
    ratio: float
    low: float | None
    high: float | None
    baseline_s: float
    enabled_s: float
    functions_saved_s: float | None


@dataclass(frozen=True, kw_only=True)
class Combined(Answer):
    """``next_low`` and ``next_high`` bound the ratio of one more machine; without a claim all four ends are None.

    ``ratio`` is None if no step time counts, because other runs could use the same GPUs during every pair.
    ``functions_saved_s`` is what log-probs and GRPO loss save within a step of vime, of the mean unit.
    ``gates`` judge reward, agreement, memory and response lengths over all pairs of live runs; else there are none.
    ``curves`` draw reward and agreement of their trials, and are left out of the JSON.
    """

    run: str
    hardware: str
    gpu: str
    unit: str
    num_machines: int
    num_hosts: int
    ratio: float | None
    low: float | None
    high: float | None
    spread_pct: float | None
    next_low: float | None
    next_high: float | None
    functions_saved_s: Interval | None
    machines: tuple[Machine, ...]
    gates: tuple[Gate, ...] = ()
    curves: tuple[Figure, ...] = ()
    cautions: tuple[str, ...] = ()
    differences: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_json().items() if key != "curves"}


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What one allocation showed: the log ratio and both step times of each session or pair, and ``list_saved``."""

    allocation: Allocation
    bundle: str
    pairs: list[tuple[float, float, float]]
    saved: list[float]

    @property
    def gpus(self) -> frozenset[str]:
        return frozenset(self.allocation.gpus or self.allocation.boots or (self.allocation.name,))


def combine(sources: Sequence[Path]) -> Combined:
    """Analyse bundles again and combine the effects on step time of the machines that made them.

    Raises:
        CheckFailed: a bundle is not sealed, contradicts itself, is not comparable, or is another experiment; or all
            live pairs together show a worse reward or the like.
    """
    read: dict[str, tuple[Plan, Analysis]] = {}
    seen: list[_Seen] = []
    differences: list[Finding] = []
    cautions: list[str] = []
    unproved: list[tuple[str, Set[str]]] = []
    refused: list[Problem] = []
    for source in sources:
        bundle_id, plan, analysis, allocations, rule_changes = _read(source)
        if analysis.verdict.word in {VerdictWord.NOT_COMPARABLE, VerdictWord.NO_COMPARISON}:
            refused.append(_refuse(source, "compares no step times", analysis))
            if not _is_judged_again(plan, analysis):
                raise CheckFailed(*refused)
        if bundle_id in read:
            raise CheckFailed(Problem(str(source), "is named twice", got=bundle_id[:12]))
        read[bundle_id] = plan, analysis
        differences += _require_same(source, next(iter(read.values()))[0], plan)
        cautions += [f"exploratory: {rule_changes}"] if plan.is_exploratory else []
        undecided = {gate.name for gate in analysis.gates if gate.status is GateStatus.UNDECIDED}
        unproved.append((str(source), undecided & NEEDED))
        for item in allocations:
            pairs, saved = list(_list_pairs(analysis, item)), list_saved(analysis, item.pairs)
            seen.append(_Seen(allocation=item, bundle=bundle_id[:12], pairs=pairs, saved=saved))
    by_machine = group((item.gpus, item) for item in seen if item.pairs)
    first = next(iter(read.values()))[0]
    analyses = [analysis for _, analysis in read.values()]
    is_counted = any(pair.is_counted for analysis in analyses for pair in analysis.pairs)
    if not by_machine and not (first.has_own_policies and is_counted):
        what = "no session or pair counts"
        raise CheckFailed(*(_refuse(source, what, found) for source, found in zip(sources, analyses, strict=True)))
    gates, reason = _pool_gates(read)
    _require_passed(gates, reason, refused)
    cautions += [reason] if reason else []
    cautions += _describe_unproved(unproved, has_times=bool(by_machine))
    known = [gpus.union(*(item.allocation.boots for item in found)) for gpus, found in by_machine.items()]
    hosts = [1 + number for number in number_hosts(known)]
    machines = tuple(map(_describe_machine, by_machine.values(), hosts))
    combined = _conclude(analyses[0], machines)
    return replace(
        combined,
        gates=gates,
        curves=_draw_curves(analyses) if gates else (),
        cautions=tuple(dict.fromkeys(cautions)),
        differences=tuple(differences),
    )


def _describe_unproved(
    unproved: Sequence[tuple[str, Set[str]]],
    *,
    has_times: bool,
) -> Iterator[str]:
    """Yield the undecided gates of each bundle; that no time counts is said once for all."""
    if not has_times:
        is_shared = any(OWN_GPUS in names for _, names in unproved)
        yield "no step time counts" + (": other runs could use the same GPUs" if is_shared else "")
    for source, names in unproved:
        if told := names if has_times else names - {OWN_GPUS}:
            yield f"{source}: undecided gates: {', '.join(sorted(told))}"


def _refuse(source: Path, what: str, analysis: Analysis) -> Problem:
    hint = f"rlk-repro report {shlex.quote(str(source))} --summary says why"
    return Problem(str(source), what, got=analysis.verdict.word.value, hint=hint)


def _require_passed(gates: Sequence[Gate], reason: str, refused: Sequence[Problem]) -> None:
    """Raise CheckFailed for a failed gate; after ``refused`` bundles, also for an undecided one, or for none at all."""
    statuses = (GateStatus.FAILED, GateStatus.UNDECIDED) if refused else (GateStatus.FAILED,)
    worse = [
        Problem("all pairs together", show_gate(replace(gate, name=f"{gate.name} {status}"), "pair"))
        for status in statuses
        for gate in gates
        if gate.status is status
    ]
    if worse or (refused and reason):
        raise CheckFailed(*refused, *worse)


def _read(source: Path) -> tuple[str, Plan, Analysis, list[Allocation], str]:
    """Analyse a bundle again; return its id, plan, analysis, the allocations of what counts, and changed rules."""
    with open_intact(source) as (run_dir, bundle_id):
        plan = Plan.load(run_dir.plan)
        analysis, context = read_result(run_dir, source, bundle_id)
        counted = [pair.pair for pair in analysis.pairs if pair.is_counted]
        allocations = list_allocations(plan, run_dir, counted, least=1)
    if bundle_id is None or has_blocking(context.findings):
        what = "is not sealed" if bundle_id is None else CONTRADICTS
        raise CheckFailed(Problem(str(source), what, expected="a sealed bundle without contradictions"))
    return bundle_id, plan, analysis, allocations, context.rule_changes


def _is_judged_again(plan: Plan, analysis: Analysis) -> bool:
    """Whether the only fault of a bundle is a worse reward or the like, which ``_pool_gates`` judges over all pairs."""
    failed = {gate.name for gate in analysis.gates if gate.status is GateStatus.FAILED}
    return plan.has_own_policies and bool(failed) and failed <= GATED


def _pool_gates(read: Mapping[str, tuple[Plan, Analysis]]) -> tuple[tuple[Gate, ...], str]:
    """Judge all pairs of all bundles, or say why not: two pairs with one seed count as one."""
    plans = [plan for plan, _ in read.values()]
    if not plans[0].has_own_policies:
        return (), ""
    seeds = Counter[int]()
    for plan in plans:
        seeds.update({trial.seed for trial in plan.trials})
    if twice := [str(seed) for seed, number in seeds.items() if number > 1]:
        where = f"{count(len(twice), 'seed')} of two bundles ({name_some(twice)})"
        return (), f"rewards are not judged together, because of {where}: --set measure.seed=N gives a run its own"
    pairs: list[PairResult] = []
    trials: dict[str, TrialResult] = {}
    for bundle_id, (_, analysis) in read.items():
        where = f"{bundle_id[:12]}:"
        trials |= {where + trial.name: replace(trial, name=where + trial.name) for trial in analysis.trials}
        for pair in analysis.pairs:
            names = {name: where + getattr(pair, name) for name in ("pair", "first", "second")}
            pairs.append(replace(pair, **names))
    run = plans[0].run
    planned = {name: sum(getattr(plan.run.measure, name) for plan in plans) for name in ("pairs", "control_pairs")}
    evidence = Evidence(
        measure=run.measure.model_copy(update=planned),
        lane=run.lane,
        workload=run.workload.kind,
        pairs=pairs,
        trials=trials,
        differences=(),
        has_rollout_log_probs=run.workload.has_rollout_log_probs(run.lane),
    )
    return make_pooled_gates(evidence), ""


def _draw_curves(analyses: Sequence[Analysis]) -> tuple[Figure, ...]:
    trials = tuple(trial for analysis in analyses for trial in analysis.trials)
    view = View(replace(analyses[0], trials=trials), Context())
    return plot_steps(view, RAW_REWARD), plot_steps(view, ABS_DIFF)


def _list_pairs(analysis: Analysis, allocation: Allocation) -> Iterator[tuple[float, float, float]]:
    for pair in analysis.pairs:
        metric = pair.metric(STEP_TIME) if pair.pair in allocation.pairs else None
        if metric is not None and metric.log_ratio is not None:
            yield metric.log_ratio, metric.first or 0.0, metric.second or 0.0


def _require_same(source: Path, first: Plan, plan: Plan) -> list[Finding]:
    """Return the differences that do not matter; raise CheckFailed that names those that make another experiment."""
    found = []
    for item in diff_values("experiment", _list_measured(first), _list_measured(plan), Level.BLOCKING):
        is_free = changes_nothing(item, first, plan) or MAY_DIFFER.intersection(item.where.split("."))
        found.append(replace(item, level=Level.INFO) if is_free else item)
    refuse_blocking(found, "is another experiment", under=f"{source}: ")
    return [replace(item, where=f"{source}: {item.where}") for item in found]


def _list_measured(plan: Plan) -> dict[str, Any]:
    commits = {name: pin.commit for name, pin in plan.stack.pins.items()}
    return {"run": plan.experiment["run"], "hardware": plan.hardware.hardware, "commits": commits}


def _describe_machine(found: Sequence[_Seen], host: int) -> Machine:
    pairs = [pair for item in found for pair in item.pairs]
    ratio, baseline_s, enabled_s = (mean(column) for column in zip(*pairs, strict=True))
    own = t_interval([pair[0] for pair in pairs], CONFIDENCE)
    gpus = sorted({*found[0].allocation.gpus})
    saved = [value for item in found for value in item.saved]
    return Machine(
        name=", ".join(gpu[:12] for gpu in gpus) or f"host {host}",
        gpus=tuple(gpus),
        host=host,
        bundles=tuple(dict.fromkeys(item.bundle for item in found)),
        n=len(pairs),
        ratio=to_ratio(ratio),
        low=to_ratio(own.low) if own else None,
        high=to_ratio(own.high) if own else None,
        baseline_s=baseline_s,
        enabled_s=enabled_s,
        functions_saved_s=mean(saved) if saved else None,
    )


def _conclude(analysis: Analysis, machines: tuple[Machine, ...]) -> Combined:
    num_hosts = len({machine.host for machine in machines})
    is_by_host = num_hosts >= LEAST

    def average(values: Iterable[tuple[int, float]]) -> list[float]:
        """Return the means of the units."""
        return [mean(found) for found in group(values).values()]

    units = [machine.host if is_by_host else place for place, machine in enumerate(machines)]
    values = average((unit, math.log(machine.ratio)) for unit, machine in zip(units, machines, strict=True))
    saved = average((unit, machine.functions_saved_s) for unit, machine in zip(units, machines, strict=True)
                    if machine.functions_saved_s is not None)  # fmt: skip
    whole = t_interval(values, CONFIDENCE) if len(values) >= LEAST else None
    # machines of one host are alike, so they tell little about another host
    ahead = prediction_interval(values, CONFIDENCE) if is_by_host else None
    return Combined(
        run=analysis.run,
        hardware=analysis.hardware,
        gpu=analysis.facts.get("GPU") or analysis.facts.get("CPU") or analysis.hardware,
        unit="host" if is_by_host else "machine",
        num_machines=len(machines),
        num_hosts=num_hosts,
        ratio=to_ratio(mean(values)) if values else None,
        low=to_ratio(whole.low) if whole else None,
        high=to_ratio(whole.high) if whole else None,
        spread_pct=whole.stdev * 100 if whole else None,
        next_low=to_ratio(ahead.low) if ahead else None,
        next_high=to_ratio(ahead.high) if ahead else None,
        functions_saved_s=t_interval(saved, CONFIDENCE) if len(saved) == len(values) >= LEAST else None,
        machines=machines,
    )


def make_sections(combined: Combined) -> list[Section]:
    """Return what the terminal and the page show: the sentences, the machines with their mean, and one more machine."""
    blocks: list[Block] = [Text(text=sentence) for sentence in summarise(combined)]
    if combined.machines:
        blocks += _draw_machines(combined)
    if combined.gates:
        blocks.append(make_gate_table(combined.gates, {}, title="All pairs together"))
        blocks.append(Figures(figures=combined.curves))
    title = count(combined.num_machines, "machine") if combined.machines else "Rewards only"
    return [Section(key="machines", title=title, subject=combined.run, blocks=tuple(blocks))]


def _draw_machines(combined: Combined) -> list[Block]:
    machines = sorted(combined.machines, key=lambda item: item.ratio)
    rows = [make_change(item.name, item.ratio, item.low, item.high) for item in machines]
    rows.append(make_change(f"mean {combined.unit}", combined.ratio, combined.low, combined.high))
    if combined.next_low is not None:
        rows.append(make_change(f"one more {combined.unit}", None, combined.next_low, combined.next_high))
    caption = "Change of the step time with 95 % intervals; a machine's interval is of its own sessions or pairs alone."
    names = ("machine", "host", "less time", "n", "baseline", "enabled", "bundles")
    cells = []
    for machine in machines:
        times = (f"{seconds * 1000:,.1f} ms" for seconds in (machine.baseline_s, machine.enabled_s))
        found = (machine.name, str(machine.host), _less(machine.ratio), str(machine.n), *times)
        cells.append((*found, ", ".join(machine.bundles)))
    figures = Figures(figures=(draw_changes(rows, "forest", "Machines", caption),))
    return [figures, make_table(*names, rows=cells, numbers=names[2:6])]


def summarise(combined: Combined) -> Iterator[str]:
    """Yield what was found, what to expect, and in what the plans differ."""
    yield from combined.cautions
    if combined.ratio is not None:
        yield from _summarise_times(combined, combined.ratio)
    if combined.gates:
        yield f"all pairs together: {count_gates(combined.gates)}"
    if combined.differences:
        yield f"the plans also differ in what measures nothing: {count(len(combined.differences), 'value')} (--json)"


def _summarise_times(combined: Combined, ratio: float) -> Iterator[str]:
    where = f"{count(combined.num_machines, combined.gpu)} on {count(combined.num_hosts, 'host')}"
    saved = f"{_less(ratio)} less time"
    if combined.low is None or combined.high is None:
        yield f"{saved} on {where}; a claim about this kind of GPU needs {LEAST} hosts"
    else:
        yield f"{saved} (95 % interval {_less(combined.high)} to {_less(combined.low)}) on {where}"
        yield f"{_describe_next(combined)}; {combined.unit}s differ by {combined.spread_pct:.2g} % (standard deviation)"
    if combined.functions_saved_s is not None:
        yield f"in these steps, {describe_saved(combined.functions_saved_s)}"


def _describe_next(combined: Combined) -> str:
    if combined.next_low is None or combined.next_high is None:
        return f"the interval is of these machines alone; what to expect of another one takes {LEAST} hosts"
    return f"expect {_less(combined.next_high)} to {_less(combined.next_low)} from one more host of this kind"


def _less(ratio: float) -> str:
    return f"{100 - 100 * ratio:.2f} %"


def measure(source: Path) -> Measured:
    """Return what a bundle measured, as constants of ``predict``; raise CheckFailed if it compares no step times."""
    bundle_id, plan, analysis, allocations, _ = _read(source)
    counted = [pair for pair in analysis.pairs if pair.is_counted]

    def average(*metrics: str) -> tuple[float, float]:
        """Return the time in baseline and the time saved, in ms."""
        rows = [[metric for metric in map(pair.metric, metrics) if metric is not None] for pair in counted]
        whole = [row for row in rows if len(row) == len(metrics) and all(item.first and item.second for item in row)]
        if not whole:
            raise CheckFailed(Problem(str(source), f"lacks {' and '.join(metrics)}", expected="a timed run of vime"))
        before = mean([sum(item.first or 0.0 for item in row) for row in whole])
        after = mean([sum(item.second or 0.0 for item in row) for row in whole])
        return before * 1000, (before - after) * 1000

    shape, effect = shape_of(plan), analysis.effect(STEP_TIME)
    if effect is None or effect.ratio is None or effect.low is None or effect.high is None:
        raise CheckFailed(Problem(str(source), "has no interval of step time", expected="at least 2 sessions or pairs"))
    step_ms, _ = average(STEP_TIME)
    half_ms = step_ms * (effect.high - effect.low) / 2
    return Measured(
        **vars(shape),
        bundle=bundle_id[:12],
        name=source.name,
        run=plan.run.run,
        is_module=plan.run.workload.kind == "module",
        has_collection=not plan.run.gc_freeze,
        gpus=", ".join(sorted({gpu[:12] for allocation in allocations for gpu in allocation.gpus})),
        boots=", ".join(sorted({boot[:8] for allocation in allocations for boot in allocation.boots})),
        step_ms=round(step_ms, 2),
        saved_ms=round(step_ms * (1 - effect.ratio), 2),
        error_ms=round(half_ms / t_quantile(effect.confidence, effect.n - 1), 3),
        n=effect.n,
        no_grad_ps=round(average(NO_GRAD)[1] / shape.logits / shape.passes * PS_PER_MS, 3) if shape.passes else 0.0,
        loss_ps=round(average(*LOSS)[1] / shape.logits * PS_PER_MS, 3),
    )
