"""Combine bundles of one experiment: one effect per machine, their mean, and what the next machine will show.

Sessions repeat a measurement on one machine.  Only several machines say something about a kind of GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rlk_repro.analysis.allocations import Allocation, list_allocations
from rlk_repro.base.answer import Answer
from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.findings import Finding, Level, diff_values, has_blocking
from rlk_repro.base.units import count, group
from rlk_repro.bundle.seal import open_bundle
from rlk_repro.plan import Plan
from rlk_repro.replay.recorded import CONTRADICTS, read_result, require_intact
from rlk_repro.rundir.results import Analysis, VerdictWord
from rlk_repro.statistics.stats import STEP_TIME, Interval, mean, prediction_interval, t_interval, to_ratio

LEAST: Final = 3
"""Machines that a claim about a kind of GPU needs; from so many hosts on, the host is the unit."""
CONFIDENCE: Final = 0.95
MAY_DIFFER: Final = ("purpose", "may_claim", "may_not_claim", "expected_", "time_limit_min", "layouts", "placements")
"""What says nothing about how a machine was measured: sentences, estimates, and layouts of other hardware."""
NUMBERS: Final = ("sessions", "pairs", "control_pairs", "seed")


@dataclass(frozen=True, kw_only=True)
class Machine(Answer):
    """One machine: its effect is the mean over the sessions or pairs that count, of all bundles it made."""

    gpus: tuple[str, ...]
    host: int
    bundles: tuple[str, ...]
    n: int
    ratio: float
    baseline_s: float
    enabled_s: float


@dataclass(frozen=True, kw_only=True)
class Combined(Answer):
    """``next_low`` and ``next_high`` bound the ratio of one more machine; without a claim all four ends are None."""

    run: str
    hardware: str
    gpu: str
    unit: str
    num_machines: int
    num_hosts: int
    ratio: float
    low: float | None
    high: float | None
    spread_pct: float | None
    next_low: float | None
    next_high: float | None
    machines: tuple[Machine, ...]
    differences: tuple[Finding, ...]


@dataclass
class _Seen:
    """What is known of one machine while bundles are read; ``boots`` tell hosts apart."""

    gpus: frozenset[str]
    boots: set[str]
    bundles: list[str] = field(default_factory=list)
    pairs: list[tuple[float, float, float]] = field(default_factory=list)


def combine(sources: Sequence[Path]) -> Combined:
    """Analyse bundles again and combine the effects on step time of the machines that made them.

    Raises:
        CheckFailed: a bundle is not sealed, contradicts itself, is not comparable, or is another experiment.
    """
    seen: dict[frozenset[str], _Seen] = {}
    first: tuple[Plan, Analysis] | None = None
    ids: set[str] = set()
    differences: list[Finding] = []
    for source in sources:
        bundle_id = require_intact(source)
        with open_bundle(source, bundle_id) as run_dir:
            plan = Plan.load(run_dir.plan)
            analysis, context = read_result(run_dir, source, bundle_id)
            counted = [pair.pair for pair in analysis.pairs if pair.is_counted]
            allocations = list_allocations(plan, run_dir, counted, least=1)
        if bundle_id is None or has_blocking(context.findings):
            what = "is not sealed" if bundle_id is None else CONTRADICTS
            raise CheckFailed(Problem(str(source), what, expected="a sealed bundle without contradictions"))
        if analysis.verdict.word in {VerdictWord.NOT_COMPARABLE, VerdictWord.NO_COMPARISON}:
            raise CheckFailed(Problem(str(source), "compares no step times", got=analysis.verdict.word.value))
        if bundle_id in ids:
            raise CheckFailed(Problem(str(source), "is named twice", got=bundle_id[:12]))
        ids.add(bundle_id)
        if first is None:
            first = plan, analysis
        else:
            differences += _require_same(source, first[0], plan)
        for allocation in allocations:
            _add(seen, allocation, analysis, bundle_id)
    machines = [machine for machine in seen.values() if machine.pairs]
    if first is None or not machines:
        raise CheckFailed(Problem("bundles", "no session or pair counts", expected="at least one"))
    return _conclude(first[1], machines, differences)


def _add(seen: dict[frozenset[str], _Seen], allocation: Allocation, analysis: Analysis, bundle_id: str) -> None:
    key = frozenset(allocation.gpus or allocation.boots or (allocation.name,))
    machine = seen.setdefault(key, _Seen(gpus=frozenset(allocation.gpus), boots=set()))
    machine.boots |= {*allocation.boots}
    machine.bundles.append(bundle_id[:12])
    for pair in analysis.pairs:
        metric = pair.metric(STEP_TIME) if pair.pair in allocation.pairs else None
        if metric is not None and metric.log_ratio is not None:
            machine.pairs.append((metric.log_ratio, metric.first or 0.0, metric.second or 0.0))


def _require_same(source: Path, reference: Plan, plan: Plan) -> Iterator[Finding]:
    """Yield the differences that do not matter; raise CheckFailed that names those that make another experiment."""
    was, now = (_keep(_shorten(item), item.hardware.hardware) for item in (reference, plan))
    wrong = list(diff_values("experiment", was, now, Level.BLOCKING))
    if wrong:
        raise CheckFailed(
            *(Problem(f"{source}: {item.where}", "is another experiment", got=item.found, expected=item.expected)
              for item in wrong)
        )  # fmt: skip
    yield from diff_values(f"{source.name}: experiment", _shorten(reference), _shorten(plan), Level.INFO)


def _shorten(plan: Plan) -> dict[str, Any]:
    experiment: dict[str, Any] = plan.to_json()["experiment"]
    stack = experiment["stack"]
    pins = {name: pin.get("commit") for name, pin in (stack.get("pins") or {}).items()}
    return {"run": experiment["run"], "hardware": plan.hardware.hardware, "commits": pins}


def _keep(value: Any, hardware: str) -> Any:
    """Return a plan's values without those that may differ between runs of one experiment."""
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for name, item in value.items():
        if name in {"layouts", "placements"}:
            kept[name] = item.get(hardware) if isinstance(item, Mapping) else item
        elif name not in NUMBERS and not name.startswith(MAY_DIFFER):
            kept[name] = _keep(item, hardware)
    return kept


def _number_hosts(machines: Sequence[_Seen]) -> list[int]:
    """Number the hosts: machines that share a boot or a GPU are one host."""
    hosts: list[set[str]] = []
    numbers = []
    for machine in machines:
        known = {*machine.boots, *machine.gpus}
        number = next((place for place, host in enumerate(hosts) if host & known), len(hosts))
        if number == len(hosts):
            hosts.append(set())
        hosts[number] |= known
        numbers.append(number)
    return numbers


def _conclude(analysis: Analysis, found: Sequence[_Seen], differences: Sequence[Finding]) -> Combined:
    hosts = _number_hosts(found)
    effects = [mean([log_ratio for log_ratio, _, _ in machine.pairs]) for machine in found]
    num_hosts = len({*hosts})
    unit = "host" if num_hosts >= LEAST else "machine"
    values = effects
    if unit == "host":
        values = [mean(of_host) for of_host in group(zip(hosts, effects, strict=True)).values()]
    has_claim = len(values) >= LEAST
    whole: Interval | None = t_interval(values, CONFIDENCE) if has_claim else None
    ahead: Interval | None = prediction_interval(values, CONFIDENCE) if has_claim else None
    return Combined(
        run=analysis.run,
        hardware=analysis.hardware,
        gpu=analysis.facts.get("GPU") or analysis.facts.get("CPU") or analysis.hardware,
        unit=unit,
        num_machines=len(found),
        num_hosts=num_hosts,
        ratio=to_ratio(mean(values)),
        low=to_ratio(whole.low) if whole else None,
        high=to_ratio(whole.high) if whole else None,
        spread_pct=whole.stdev * 100 if whole else None,
        next_low=to_ratio(ahead.low) if ahead else None,
        next_high=to_ratio(ahead.high) if ahead else None,
        machines=tuple(
            Machine(
                gpus=tuple(sorted(machine.gpus)),
                host=host,
                bundles=tuple(dict.fromkeys(machine.bundles)),
                n=len(machine.pairs),
                ratio=to_ratio(effect),
                baseline_s=mean([first for _, first, _ in machine.pairs]),
                enabled_s=mean([second for _, _, second in machine.pairs]),
            )
            for machine, host, effect in zip(found, hosts, effects, strict=True)
        ),
        differences=tuple(differences),
    )


def describe(combined: Combined) -> Iterator[str]:
    """Yield the lines that a terminal shows: the sentence, then one row per machine with its place on a scale."""
    where = f"{count(combined.num_machines, combined.gpu)} on {count(combined.num_hosts, 'host')}"
    saved = f"{_less(combined.ratio)} less time"
    if combined.low is None or combined.high is None or combined.next_low is None or combined.next_high is None:
        yield f"{combined.run}: {saved} on {where}; a claim about this kind of GPU needs {LEAST} machines"
    else:
        yield f"{combined.run}: {saved} (95 % interval {_less(combined.high)} to {_less(combined.low)}) on {where}"
        ahead = f"{_less(combined.next_high)} to {_less(combined.next_low)} from one more {combined.unit} of this kind"
        yield f"expect {ahead}; {combined.unit}s differ by {combined.spread_pct:.2g} % (standard deviation)"
    ratios = [machine.ratio for machine in combined.machines]
    low, high = min(ratios), max(ratios)
    for machine in sorted(combined.machines, key=lambda item: item.ratio):
        place = round(30 * (machine.ratio - low) / (high - low)) if high > low else 15
        name = ", ".join(gpu[:12] for gpu in machine.gpus) or f"host {machine.host}"
        times = f"{machine.baseline_s * 1000:,.1f} → {machine.enabled_s * 1000:,.1f} ms"
        dot = "●".rjust(place + 1).ljust(31)
        yield f"{name:<14} {_less(machine.ratio):>8}  {dot}  n = {machine.n:<2}  {times}  {', '.join(machine.bundles)}"
    if combined.differences:
        keys = {item.where.partition(": experiment.run.")[2].rpartition(".")[2] for item in combined.differences}
        named = ", ".join(sorted(key for key in keys if not key.isdecimal()))
        yield f"the plans also differ in what measures nothing: {named} (--json has the values)"


def _less(ratio: float) -> str:
    return f"{100 - 100 * ratio:.2f} %"
