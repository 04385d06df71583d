"""Describe a plan for ``submit --dry-run``, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlk_repro.base.escapes import printable
from rlk_repro.base.findings import Finding
from rlk_repro.base.units import count, format_duration
from rlk_repro.clusters.api import Bound, Job
from rlk_repro.plan import Plan
from rlk_repro.rundir.differences import Kind
from rlk_repro.schedule import make_schedule
from rlk_repro.spec import Lane, Measure
from rlk_repro.spec.values import CROSSOVER
from rlk_repro.statistics.power import chance_of_live_gates, smallest_effect, smallest_session_effect
from rlk_repro.submit.consent import find_build_hint, find_foreign
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.differences import list_differences

SHOWN_HASH: Final = 12
MAX_ORDERS: Final = 3


def plan_summary(plan: Plan) -> dict[str, Any]:
    measure = plan.run.measure
    controls = [first.is_control for first, _ in plan.pairs().values()]
    num_pairs = controls.count(False)
    minutes = plan.expected_minutes()
    return {
        "num_trials": len(plan.trials),
        "num_pairs": num_pairs,
        "num_control_pairs": controls.count(True),
        **({"num_sessions": len(plan.trials)} if plan.is_crossover else {}),
        "expected_minutes": minutes,
        "gpu_hours": None if minutes is None else minutes / 60 * plan.num_gpus,
        "smallest_visible_effect": (
            find_visible_effect(measure, plan.run.lane) if num_pairs or plan.is_crossover else None
        ),
        **({"other_design": _find_other_design(plan)} if _has_choice(plan) else {}),
        "operators": [
            {"op": op, "is_eligible": not reason, "reason": reason} for op, reason in plan.explain_operators().items()
        ],
        "differences": [item.to_json() for item in list_differences(plan)],
        "warnings": [finding.to_json() for finding in _find_warnings(plan)],
    }


def _find_warnings(plan: Plan) -> list[Finding]:
    from rlk_repro.agent.preflight.checks import find_unused

    unused = find_unused(plan.profile.preflight)
    return [*WORKLOADS[plan.run.workload.kind].find_warnings(plan), *unused]


def find_visible_effect(measure: Measure, lane: Lane) -> float | None:
    """Return the smallest speed-up, as a fraction, for which 9 of 10 runs get the verdict ``faster``.

    Of the gates, only those on control blocks (sessions), or on rewards and lengths (pairs), may fail in this estimate.
    """
    if measure.design == CROSSOVER:
        return smallest_session_effect(
            sessions=measure.sessions,
            blocks=measure.blocks,
            control_blocks=measure.control_blocks,
            block_sd_pct=measure.expected_block_sd_pct,
            smallest_effect_pct=measure.smallest_effect_pct,
            alpha=measure.alpha,
        )
    return smallest_effect(
        measure.pairs,
        measure.expected_pair_sd_pct,
        measure.smallest_effect_pct,
        measure.alpha,
        num_control_pairs=measure.control_pairs,
        gates=_find_gates_chance(measure, lane),
    )


def _find_gates_chance(measure: Measure, lane: Lane) -> float:
    if lane != "live" or measure.design == CROSSOVER:
        return 1.0
    return chance_of_live_gates(
        num_pairs=measure.pairs,
        scored_steps=measure.scored_steps,
        alpha=measure.alpha,
        reward_margin=measure.margins.raw_reward,
        length_margin=measure.margins.response_length_pct / 100,
    )


def _has_choice(plan: Plan) -> bool:
    """Only a timed run has a choice of design; comparisons of switches or commits need ``parallel``."""
    return plan.run.workload.is_timed and bool(plan.routed) and plan.run.rl_kernel.commits is None


def _find_other_design(plan: Plan) -> dict[str, Any]:
    other = plan.run.measure.other_design
    minutes = None
    if plan.expected_minutes() is not None and plan.run.expected_session_minutes:  # an estimate for each design
        estimates = plan.run.model_copy(update={"measure": other}).expected_minutes
        minutes = estimates[plan.hardware.hardware] * other.num_trials
    return {
        "design": other.design,
        "expected_minutes": minutes,
        "gpu_hours": None if minutes is None else minutes / 60 * plan.num_gpus,
        "smallest_visible_effect": find_visible_effect(other, plan.run.lane),
    }


def _describe_other_design(summary: dict[str, Any], plan: Plan) -> str:
    other = summary["other_design"]
    seen, here = other["smallest_visible_effect"], summary["smallest_visible_effect"]
    text = f"{other['design']}: detects {_percent(seen)}; duration: {_duration(other)}"
    sees_more = here is None or (seen is not None and seen < here)
    better = other["design"] if sees_more else plan.run.measure.design
    return f"{text}. For speed and memory use {better}; only the parallel design measures reward over training"


def _percent(effect: float | None) -> str:
    return "no gain" if effect is None else f"a gain of {effect * 100:.1f} %"


def describe_dry_run(plan: Plan, job: Job) -> dict[str, Any]:
    """Return the answer of a dry run: the plan, its figures, and exactly the job that ``submit`` would send."""
    shown = {"files": dict(job.files), "command": job.command, "env": dict(job.env)}
    return {"plan": plan.to_json(), "summary": plan_summary(plan), "job": shown}


def bound_line(plan: Plan, bound: Bound) -> str:
    num_nodes = plan.layout.num_nodes
    hours = bound.time_min / 60 * num_nodes * bound.gpus_per_node
    cost = f"{hours:.1f} GPU-hours" if hours else "no GPU"
    line = f"{count(num_nodes, 'node')} for at most {format_duration(bound.time_min * 60)} a job, {cost}"
    what = "session" if plan.is_crossover else "pair"
    more = f"; if one job is too short, more jobs follow, each for at least one {what}; at most {bound.num_jobs} in all"
    return line + more * (bound.num_jobs > 1)


def plan_lines(plan: Plan) -> list[str]:
    summary = plan_summary(plan)
    rows = [
        ("run", f"{plan.run.run} · {plan.run.workload.kind} · lane {plan.run.lane} · stack {plan.stack.stack}"),
        ("where", f"{plan.cluster} · profile {plan.profile.profile} · {plan.hardware.title}"),
        ("layout", _describe_layout(plan)),
        *(_session_rows(plan) if plan.is_crossover else _trial_rows(plan, summary)),
        ("duration", _duration(summary)),
        ("smallest effect", _effect(summary, plan)),
        *((("other design", _describe_other_design(summary, plan)),) if _has_choice(plan) else ()),
    ]  # fmt: skip
    if plan.routed:
        rows += _operator_rows(plan, summary)
    rows += _difference_rows(summary)
    rows += [("experiment", plan.experiment_hash[:SHOWN_HASH]), ("plan", plan.plan_hash[:SHOWN_HASH])]
    if not plan.run.entropy_metric:
        rows.append(("entropy metric", "not computed, in both variants"))
    if plan.run.gc_freeze:
        rows.append(("garbage collector", "objects frozen after the warm-up (gc.freeze), in both variants"))
    missing = plan.stack.unpublished.get(plan.hardware.image_platform)
    if missing is not None:
        hint = find_build_hint(plan) or "build it"
        rows.append(("image", f"not published ({missing.reason}): submit refuses the run; {hint}"))
    rows += [
        ("warning", f"{item['where']}: {item['found']}, expected {item['expected']}") for item in summary["warnings"]
    ]
    rows += [("foreign code", f"{printable(str(item))}: review it before you submit") for item in find_foreign(plan)]
    if plan.is_exploratory:
        rows.append(("exploratory", "measurement rules were changed; the verdict will say so"))
    changed = [f"{path} ({source})" for path, source in plan.sources.items() if source.startswith("--")]
    if changed:
        rows.append(("set by flags", ", ".join(changed)))
    return [f"{name:<16} {text}" for name, text in rows]


def _describe_layout(plan: Plan) -> str:
    layout = plan.layout
    size = f"{count(layout.num_nodes, 'node')} × {count(layout.gpus_per_node, 'GPU')}"
    parallel = f"TP {layout.tensor_parallel} PP {layout.pipeline_parallel}"
    return f"{size} · {parallel} CP {layout.context_parallel} EP {layout.expert_parallel}"


def _trial_rows(plan: Plan, summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    measure = plan.run.measure
    yield (
        "trials",
        f"{summary['num_trials']} trials in {count(summary['num_pairs'], 'pair')} and "
        f"{count(summary['num_control_pairs'], 'control pair')}; "
        f"each trial: {measure.warmup_steps} warm-up + {measure.scored_steps} scored steps",
    )
    yield "order", " ".join(f"{trial.pair}:{trial.variant[0]}" for trial in plan.trials)


def _session_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Control blocks are in brackets."""
    measure = plan.run.measure
    yield (
        "sessions",
        f"{measure.sessions} of {plan.num_steps} steps: {measure.warmup_steps} warm-up steps, {measure.blocks} blocks "
        f"and {measure.control_blocks} control blocks, each of 4 × {measure.period_steps} steps, "
        f"and {measure.shadow_steps} shadow steps",
    )
    for number, trial in enumerate(plan.trials[:MAX_ORDERS]):
        blocks = make_schedule(measure, trial.seed).blocks
        shown = " ".join(f"({block.order})" if block.is_control else block.order for block in blocks)
        yield "" if number else "order", f"{trial.pair}: {shown}"
    if len(plan.trials) > MAX_ORDERS:
        yield "", f"… and {count(len(plan.trials) - MAX_ORDERS, 'session')} more (--json)"


def _operator_rows(plan: Plan, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Only preflight in the job knows whether RL-Kernel is installed."""
    is_installed = ", if RL-Kernel is installed" if plan.needs_rl_kernel else ""
    mode = f"mode {plan.run.rl_kernel.mode}; operators of this layout{is_installed}:"
    if title := plan.run.implementation_title:
        rows = [("enabled", title), ("operators", mode)]
    else:
        rows = [("rl-kernel", mode)]
    for item in summary["operators"]:
        rows.append((f"  {item['op']}", "eligible" if item["is_eligible"] else f"not eligible: {item['reason']}"))
    return rows


def _difference_rows(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for number, item in enumerate(summary["differences"]):
        values = f"{item['baseline']} in baseline, {item['enabled']} in enabled"
        what = "output folders" if item["kind"] == Kind.FOLDER else values
        yield "" if number else "variants differ", f"{item['name']}: {what}"
    kinds = {item["kind"] for item in summary["differences"]}
    if kinds:
        undeclared = "a difference between the variants is not declared"
        same = "no other argument or variable differs between the variants"
        yield "", undeclared if Kind.UNDECLARED in kinds else same


def _duration(summary: dict[str, Any]) -> str:
    if summary["expected_minutes"] is None:
        return "no estimate for this hardware and number of steps"
    text = f"about {format_duration(summary['expected_minutes'] * 60)}"
    return f"{text} · {summary['gpu_hours']:.2f} GPU-hours" if summary["gpu_hours"] else f"{text} · no GPU"


def _effect(summary: dict[str, Any], plan: Plan) -> str:
    measure = plan.run.measure
    effect = summary["smallest_visible_effect"]
    if not plan.run.workload.is_timed:
        return f"none: a run with what_for: {plan.run.workload.purpose} measures no time"
    if plan.is_crossover:
        if effect is None:
            return "none: 'faster' needs 3 sessions of 6 blocks, and either no control blocks or at least 6 in total"
        return (
            f"{effect * 100:.1f} % of step time: {measure.sessions} sessions reliably detect a gain of this size if "
            f"block effects have a standard deviation of {measure.expected_block_sd_pct:g} %. The verdict 'faster' "
            f"needs a change of over {measure.smallest_effect_pct:g} %"
        )
    if summary["num_pairs"] < 6:
        return f"none: the verdicts 'faster' and 'slower' need 6 pairs, and this run has {summary['num_pairs']}"
    gates = _find_gates_chance(measure, plan.run.lane)
    if effect is None:
        return (
            f"none: even if the variants are equal, the gates on rewards and lengths pass in only {gates * 100:.1f} % "
            "of runs; plan more pairs or steps"
        )
    return (
        f"{effect * 100:.1f} % of step time: {summary['num_pairs']} pairs reliably detect a gain of this size if pair "
        f"effects have a standard deviation of {measure.expected_pair_sd_pct:g} %. The verdict 'faster' needs a change "
        f"of over {measure.smallest_effect_pct:g} %"
    )
