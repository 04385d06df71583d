"""Read a trial's folder: how the trial ended, its values with their log lines, its summaries, and what ran."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rlk_repro.analysis.proof import prove
from rlk_repro.logs.metrics import find_void_rollouts, metric_series
from rlk_repro.logs.ops import OpsLog, TimerSample, read_ops
from rlk_repro.logs.ops_lines import Tokens
from rlk_repro.logs.vime import LogSample, parse_log
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.exits import read_exit
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import ProofStatus, Series, Summary, TrialResult, TrialStatus
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.statistics.stats import ENERGY, STEP_TIME, summarise

IMPOSSIBLE: Final = "steps with an impossible time or another impossible number"
# The records of peak memory, the preferred one first: the allocator's peak on a device; the process's peak on a CPU.
PEAKS: Final = ("peak_allocated_bytes", "peak_rss_bytes")


def read_unproved(plan: Plan, trial: Trial, folder: TrialDir, throttled: float | None) -> tuple[TrialResult, OpsLog]:
    """Return a trial's result before its proof and its summaries are known, and the ops log that the proof needs."""
    ended = read_exit(folder)
    status, reason = ended.status, ended.reason
    ops = read_ops(folder, plan.num_steps)
    log_series, rejects, void = _read_log(plan, folder)
    series = (*log_series, *_ops_series(plan, ops, folder))
    num_found = count_steps(series)
    if status is TrialStatus.OK and num_found < plan.num_steps:
        status = TrialStatus.FAILED
        reason = f"ended well, but only {num_found} of {plan.num_steps} steps are in its log{void}"
    rejects |= {f"ops: {name}": number for name, number in ops.num_rejects.items()}
    result = TrialResult(
        index=trial.index,
        name=trial.name,
        pair=trial.pair,
        variant=trial.variant,
        seed=trial.seed,
        status=status,
        reason=reason,
        duration_s=ended.duration_s,
        num_steps_found=num_found,
        num_steps_expected=plan.num_steps,
        proof=ProofStatus.MISSING,
        proof_reason="",
        decisions=ops.decisions(),
        series=series,
        summaries=(),
        rejects=rejects,
        throttled_fraction=throttled,
    )
    return result, ops


def read_trial(
    plan: Plan, trial: Trial, folder: TrialDir, throttled: float | None
) -> tuple[TrialResult, tuple[tuple[int, int, Tokens], ...]]:
    """Return a trial's result, and rank, step and record of each step that compares the log-probs of its tokens."""
    result, ops = read_unproved(plan, trial, folder, throttled)
    is_routed = plan.run.is_routed(trial.variant)
    proof = prove(
        ops,
        variant=ENABLED if is_routed else BASELINE,
        requested_ops=plan.ops_of(trial.variant) if is_routed else (),
        platform=plan.hardware.platform,
        commit=plan.run.rl_kernel.find_commit(trial.variant),
        num_stages=plan.layout.pipeline_parallel,
    )
    scored = range(plan.run.measure.warmup_steps, plan.num_steps)
    summaries = summarise_all(result.series, scored)
    proved = replace(result, proof=proof.status, proof_reason=proof.reason, summaries=summaries)
    return proved, tuple(ops.tokens())


def _read_log(plan: Plan, folder: TrialDir) -> tuple[tuple[Series, ...], dict[str, int], str]:
    if not folder.stdout.is_file():
        return (), {}, ""
    parsed = parse_log(folder.stdout)
    per_rollout = plan.run.workload.num_steps_per_rollout
    void = find_void_rollouts(parsed, num_steps_per_rollout=per_rollout)
    found = metric_series(parsed, plan.num_steps, per_rollout, void)
    source = _place(folder, folder.stdout)
    series = tuple(_series(name, item, source) for name, item in found.items())
    if not void:
        return series, dict(parsed.reject_counts), ""
    first, what = next(iter(void.items()))
    return series, {**parsed.reject_counts, IMPOSSIBLE: len(void)}, f"; step {first} is void: {what} is impossible"


def _series(name: str, found: Sequence[LogSample | TimerSample | None], source: str) -> Series:
    return Series(
        metric=name,
        source=source,
        values=tuple(float(item.value) if item is not None and math.isfinite(item.value) else None for item in found),
        lines=tuple(None if item is None else item.line for item in found),
    )


def _ops_series(plan: Plan, ops: OpsLog, folder: TrialDir) -> Iterable[Series]:
    columns = {f"module_{timer}_s": samples for timer, samples in ops.timers.items()}
    peak = next((name for name in PEAKS if name in ops.memory), None)
    if peak is not None:
        # A name has the form peak_memory_bytes, or peak_memory_in_update_bytes for one phase of a step.
        columns |= {f"peak_memory{name.removeprefix(peak)}_bytes": samples for name, samples in ops.memory.items()
                    if name.startswith(peak)}  # fmt: skip
    if ops.energy:
        columns[ENERGY] = ops.energy
    for name, by_step in columns.items():
        samples = [by_step.get(step) for step in range(plan.num_steps)]
        sources = {sample.source for sample in samples if sample is not None}
        place = folder.path / sources.pop() if len(sources) == 1 else folder.ops
        yield _series(name, samples, _place(folder, place))


def _place(folder: TrialDir, path: Path) -> str:
    return path.relative_to(folder.path.parent.parent).as_posix()


def fell_back_everywhere(trial: TrialResult) -> bool:
    return not any(decision.is_served and decision.calls for decision in trial.decisions)


def summarise_all(series: Iterable[Series], steps: Collection[int]) -> tuple[Summary, ...]:
    found = []
    for item in series:
        values = [item.values[step] for step in steps if step < len(item.values)]
        found.append(summarise(item.metric, values))
    return tuple(summary for summary in found if summary is not None)


def count_steps(series: Iterable[Series]) -> int:
    return sum(value is not None for item in series if item.metric == STEP_TIME for value in item.values)
