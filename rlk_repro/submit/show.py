"""Describe a plan for ``submit --dry-run``, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import CheckFailed
from rlk_repro.base.escapes import printable
from rlk_repro.base.units import count, format_duration
from rlk_repro.clusters.api import Bound, Job
from rlk_repro.plan import Plan
from rlk_repro.rundir.differences import Kind
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Lane, Measure
from rlk_repro.spec.values import CROSSOVER
from rlk_repro.statistics.power import chance_of_live_gates, smallest_effect, smallest_session_effect
from rlk_repro.submit.consent import find_build_hint, find_foreign
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.differences import list_differences

SHOWN_HASH: Final = 12
NOWHERE: Final = Path("/runs/run/id")
RAN_ON: Final = frozenset({"cpu", "h100", "h200"})
"""The hardware of the bundles in the repository's evidence."""
NEVER_RAN: Final = "no run on {} has been published: its layout, limits and times are untested estimates"


def plan_summary(plan: Plan) -> dict[str, Any]:
    measure, workload = plan.run.measure, WORKLOADS[plan.run.workload.kind]
    controls = [first.is_control for first, _ in plan.pairs().values()]
    num_pairs = controls.count(False)
    minutes, storing = plan.expected_minutes(), _find_storing(plan)
    if minutes is not None and storing is not None:
        minutes += storing["expected_minutes"] or 0.0
    return {
        "num_trials": len(plan.trials),
        "num_pairs": num_pairs,
        "num_control_pairs": controls.count(True),
        **({"num_sessions": len(plan.trials)} if plan.is_crossover else {}),
        "expected_minutes": minutes,
        "gpu_hours": None if minutes is None else minutes / 60 * plan.num_gpus,
        "rollouts_first": storing,
        "has_run_on_hardware": plan.hardware.hardware in RAN_ON,
        "smallest_visible_effect": (
            find_visible_effect(measure, plan.run.lane) if num_pairs or plan.is_crossover else None
        ),
        "prediction": _predict(plan),
        "operators": [
            {"op": op, "is_eligible": not reason, "reason": reason} for op, reason in plan.explain_operators().items()
        ],
        "differences": [item.to_json() for item in list_differences(plan)],
        "warnings": [finding.to_json() for finding in workload.find_warnings(plan)],
    }


def _predict(plan: Plan) -> dict[str, Any] | None:
    """Return what a timed run of vime is predicted to save, or why nothing is; None for other runs."""
    from rlk_repro.prediction import describe_share, load_measured, predict_plan

    if plan.run.workload.kind != "vime" or not plan.routed or not plan.run.workload.is_timed:
        return None
    try:
        found = predict_plan(plan, load_measured())
    except CheckFailed as error:
        return {"refused": str(error.problems[0]).partition("\n")[0]}
    return {**found.to_json(), "text": f"{found.saved_ms:.0f} ms less, {describe_share(found)}"}


def _prediction_rows(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is predicted, and a warning where the plan's smallest visible effect is larger."""
    found, visible = summary["prediction"], summary["smallest_visible_effect"]
    if found is None:
        return
    if "refused" in found:
        yield "predicted", f"nothing: {found['refused']} (`rlk-repro predict` names the run that would tell)"
        return
    yield "predicted", found["text"]
    if not found["shares_pct"] or visible is None:
        return
    _, low, high = (share / (100 - share) for share in found["shares_pct"])
    if low < visible:
        what = "cannot see" if high < visible else "may miss"
        yield "warning", f"the plan {what} what is predicted: plan more sessions or pairs"


def _find_storing(plan: Plan) -> dict[str, float | None] | None:
    """Return the cost of the live run that stores rollouts before the trials; None if the plan needs no such run."""
    if not WORKLOADS[plan.run.workload.kind].rollout_commands(plan, RunDir(NOWHERE)):
        return None
    minutes = plan.storing_minutes
    return {"expected_minutes": minutes, "gpu_hours": None if minutes is None else minutes / 60 * plan.num_gpus}


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


def describe_dry_run(plan: Plan, job: Job) -> dict[str, Any]:
    """Return the answer of a dry run: the plan, its figures, and exactly the job that ``submit`` would send."""
    shown = {"files": dict(job.files), "command": job.command, "env": dict(job.env)}
    return {"plan": plan.to_json(), "summary": plan_summary(plan), "job": shown}


def bound_line(plan: Plan, bound: Bound) -> str:
    num_nodes = plan.layout.num_nodes
    hours = bound.time_min / 60 * num_nodes * bound.gpus_per_node
    cost = f"{hours:.1f} GPU-hours" if hours else "no GPU"
    line = f"{count(num_nodes, 'node')} for at most {format_duration(bound.time_min * 60)} a job, {cost}"
    if bound.num_jobs == 1:
        return line
    what = "session" if plan.is_crossover else "pair"
    return f"{line}; if one is too short, more follow, each for at least one {what}; at most {bound.num_jobs} in all"


def plan_lines(plan: Plan) -> list[str]:
    summary = plan_summary(plan)
    rows = [
        ("run", f"{plan.run.run} · {plan.run.workload.kind} · lane {plan.run.lane} · stack {plan.stack.stack}"),
        ("where", f"{plan.cluster} · profile {plan.profile.profile} · {plan.hardware.title}"),
        ("layout", _describe_layout(plan)),
    ]
    rows.append(_describe_amount(plan, summary))
    rows.append(("duration", _describe_cost(summary)))
    if not summary["has_run_on_hardware"]:
        rows.append(("evidence", NEVER_RAN.format(plan.hardware.hardware)))
    rows.append(("smallest effect", _effect(summary, plan)))
    rows += _prediction_rows(summary)
    if plan.routed:
        rows += _operator_rows(plan, summary)
    rows += _difference_rows(summary)
    rows += [("experiment", plan.experiment_hash[:SHOWN_HASH]), ("plan", plan.plan_hash[:SHOWN_HASH])]
    if not plan.run.entropy_metric:
        rows.append(("entropy metric", "not computed, in both variants"))
    if plan.run.gc_freeze:
        frozen = "objects frozen after the warm-up (gc.freeze), in both variants"
        rows.append(("garbage collector", frozen))
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


def _describe_amount(plan: Plan, summary: dict[str, Any]) -> tuple[str, str]:
    measure = plan.run.measure
    if plan.is_crossover:
        text = (
            f"{measure.sessions} of {plan.num_steps} steps: {measure.warmup_steps} warm-up steps, "
            f"{measure.blocks} blocks and {measure.control_blocks} control blocks, "
            f"each of 4 × {measure.period_steps} steps, and {measure.shadow_steps} shadow steps"
        )
        return "sessions", text
    text = (
        f"{summary['num_trials']} trials in {count(summary['num_pairs'], 'pair')} and "
        f"{count(summary['num_control_pairs'], 'control pair')}; "
        f"each trial: {measure.warmup_steps} warm-up + {measure.scored_steps} scored steps"
    )
    return "trials", text


def _operator_rows(plan: Plan, summary: dict[str, Any]) -> list[tuple[str, str]]:
    mode = f"mode {plan.run.rl_kernel.mode}; operators of this layout"
    if plan.needs_rl_kernel:  # only preflight in the job knows
        mode += ", if RL-Kernel is installed"
    rows = [("rl-kernel", f"{mode}:")]
    if title := plan.run.implementation_title:
        rows = [("enabled", title), ("operators", f"{mode}:")]
    for item in summary["operators"]:
        rows.append((f"  {item['op']}", "eligible" if item["is_eligible"] else f"not eligible: {item['reason']}"))
    if not plan.needs_rl_kernel:
        return rows
    for op in sorted(set(plan.run.rl_kernel.ops) - set(plan.ops)):
        reason = f"not on {plan.hardware.hardware} in this run"
        if op == "logp":
            reason += ": expect no gain, since logp gives nearly all of it"
        rows.append((f"  {op}", reason))
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


def describe_cost(plan: Plan) -> str:
    """Return the expected time and GPU-hours of the trials with the rollouts that are stored first."""
    return _describe_cost(plan_summary(plan))


def _describe_cost(summary: dict[str, Any]) -> str:
    text, storing = _duration(summary), summary["rollouts_first"]
    if storing is None:
        return text
    if storing["expected_minutes"] is None:
        return f"{text}, without the rollouts that are stored first: no estimate"
    return f"{text}, of which rollouts first: {_duration(storing)}"


def _duration(summary: dict[str, Any]) -> str:
    if summary["expected_minutes"] is None:
        return "no estimate for this hardware and number of steps"
    text = f"about {format_duration(summary['expected_minutes'] * 60)}"
    return f"{text} · {summary['gpu_hours']:.3g} GPU-hours" if summary["gpu_hours"] else f"{text} · no GPU"


def _effect(summary: dict[str, Any], plan: Plan) -> str:
    measure = plan.run.measure
    effect = summary["smallest_visible_effect"]
    if not plan.run.workload.is_timed:
        return f"none: a run with what_for: {plan.run.workload.purpose} measures no time"
    if plan.is_crossover:
        if effect is None:
            return "none: 'faster' needs 3 sessions of 6 blocks, and either no control blocks or at least 6 in total"
        scatter = f"blocks scatter by {measure.expected_block_sd_pct:g} % (sd)"
        return _describe_effect(effect, measure, f"{measure.sessions} sessions", scatter)
    if summary["num_pairs"] < 6:
        return f"none: the verdicts 'faster' and 'slower' need 6 pairs, and this run has {summary['num_pairs']}"
    if effect is None:
        failing_pct = 100 - _find_gates_chance(measure, plan.run.lane) * 100
        return (
            f"none, too few pairs: even without any difference, the gates on reward and length "
            f"fail in {failing_pct:.0f} % of runs; add pairs, as with "
            f"--pairs {2 * summary['num_pairs']}, or steps"
        )
    scatter = f"pairs scatter by {measure.expected_pair_sd_pct:g} % (sd)"
    return _describe_effect(effect, measure, f"{summary['num_pairs']} pairs", scatter)


def _describe_effect(effect: float, measure: Measure, amount: str, scatter: str) -> str:
    return (
        f"{effect * 100:.1f} % of step time: {amount} detect such a gain in 9 of 10 runs, "
        f"if {scatter}; 'faster' needs more than {measure.smallest_effect_pct:g} %"
    )
