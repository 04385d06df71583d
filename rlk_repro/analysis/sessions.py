"""Read a session of the design ``crossover``: its two arms, its blocks, and one effect per metric.

An *arm* holds the steps of one variant and has the form of a trial's result, so that a report shows a session like a
pair of trials.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rlk_repro.analysis.proof import count_serving, find_unproved, find_unswitched, prove
from rlk_repro.analysis.shadows import summarise_shadows
from rlk_repro.analysis.trials import count_steps, fell_back_everywhere, read_unproved, summarise_all
from rlk_repro.base.units import count
from rlk_repro.logs.ops import OpsLog
from rlk_repro.logs.ops_lines import Tokens
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import (
    ALLOCATED_AGAIN,
    BlockResult,
    PairMetric,
    PairResult,
    PairStatus,
    ProofStatus,
    Series,
    ShadowResult,
    Summary,
    TrialResult,
    TrialStatus,
)
from rlk_repro.schedule import ORDERS, Schedule, make_schedule
from rlk_repro.spec import Lane
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.statistics.crossover import block_effect, common_slope, hodges_lehmann
from rlk_repro.statistics.stats import (
    CARRY_OVER,
    DIAGNOSTICS,
    ENERGY,
    MEAN_STEP_TIME,
    STEP_TIME,
    UNADJUSTED,
    mean,
    pair_metrics,
    stdev,
    summarise,
)
from rlk_repro.switches import AGREEMENT_RECORD

ADJUSTED: Final = (STEP_TIME, "train_time_s", "actor_train_time_s")
"""The times that depend on the number of tokens; they are adjusted where the variants train on different rollouts."""
LEAST_TOKEN_SPREAD: Final = 0.01
"""The standard deviation of the blocks' log ratios of tokens below which a slope on tokens is noise."""
LEAST_ENERGY_TIME_S: Final = 1.0
"""The shortest scored period whose energy counts: NVML's counter of energy advances in coarse steps."""
_TOKENS: Final = "tokens"
_RATE, _RATE_TIME = "train_tokens_per_s", "actor_train_time_s"
_KERNELS: Final = "kernel_compilations"
_COUNTS: Final = {
    "compilations": "compilation",
    _KERNELS: "kernel compilation",
    "recompile_limit_hits": "recompile-limit hit",
    "allocator_retries": ALLOCATED_AGAIN,
}
_ROUTERS, _REPLAYED = "routers", "routers_replayed"

Values = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class Session:
    """One session; ``faults`` maps a block's index to the reason why the block does not count.

    ``routers`` are the numbers of routers that replay the rollout's experts (R3), in each rank and
    step of the blocks that count; older records and runs without R3 have none.
    """

    trial: Trial
    schedule: Schedule
    values: Values
    faults: Mapping[int, str]
    arms: tuple[TrialResult, TrialResult]
    shadows: tuple[ShadowResult, ...] = ()
    tokens: tuple[tuple[int, int, Tokens], ...] = ()
    routers: frozenset[int] = frozenset()
    rules: int = 1

    @property
    def is_complete(self) -> bool:
        return self.arms[0].status is TrialStatus.OK

    def effect(self, metric: str, block: int, *, is_scored: bool = True) -> float | None:
        """Return ln(B / A) of one block, or None if the block does not count or lacks a value.

        It is that of the last step of each period, which is scored, or else of the first, which follows a change.
        """
        if block in self.faults or metric not in self.values:
            return None
        period, steps = self.schedule.period_steps, self.schedule.steps_of_blocks[block]
        values = []
        for start in range(0, len(steps), period):
            step = steps[start + period - 1] if is_scored else steps[start]
            values.append(self.values[metric][step])
        return block_effect(self.schedule.blocks[block].order, values)

    def effects(self, metric: str, *, is_scored: bool = True) -> list[float] | None:
        """Return the effects of all comparing blocks without a fault; None if there is none or a value is missing."""
        found = []
        for block, item in enumerate(self.schedule.blocks):
            if item.is_control or block in self.faults:
                continue
            value = self.effect(metric, block, is_scored=is_scored)
            if value is None:
                return None
            found.append(value)
        return found or None


def read_session(plan: Plan, trial: Trial, folder: TrialDir, throttled: float | None) -> Session:
    result, ops = read_unproved(plan, trial, folder, throttled)
    schedule = make_schedule(plan.run.measure, trial.seed)
    step_times = next((item.values for item in result.series if item.metric == STEP_TIME), ())
    faults = dict(_find_faults(plan, ops, schedule, step_times))
    counted = {
        step: rollout.variant
        for step, rollout in enumerate(schedule.rollouts)
        if rollout.block is not None and rollout.block not in faults
    }
    proof = prove(
        ops,
        variant=trial.variant if plan.routed else BASELINE,
        requested_ops=plan.ops,
        baseline_ops=plan.ops_of(BASELINE),
        platform=plan.hardware.platform,
        planned=counted,
        num_stages=plan.layout.pipeline_parallel,
    )
    whole = replace(result, proof=proof.status, proof_reason=proof.reason)
    session = make_session(trial, whole, schedule, faults, lane=plan.run.lane, rules=plan.run.measure.rules)
    serving = count_serving(ops, plan.layout.pipeline_parallel)
    shadows = tuple(summarise_shadows(trial.pair, ops, serving))
    steps = [rank.steps[step][1] for rank in ops.ranks for step in counted if step in rank.steps]
    routers = frozenset(record.counts[_ROUTERS] for record in steps if _ROUTERS in record.counts)
    return replace(session, shadows=shadows, tokens=tuple(ops.tokens()), routers=routers)


def describe_replays(sessions: Sequence[Session]) -> dict[str, str]:
    """Return the fact that all routers replayed the rollout's experts, if the records tell."""
    found = {number for session in sessions for number in session.routers if number}
    if not found:
        return {}
    least, most = min(found), max(found)
    numbers = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    fact = f"all {numbers} of a GPU, in each step that counts"
    return {"routers that replay the rollout's experts (R3)": fact}


def make_session(
    trial: Trial, whole: TrialResult, schedule: Schedule, faults: Mapping[int, str], *, lane: Lane, rules: int = 1
) -> Session:
    values: dict[str, Sequence[float | None]] = {item.metric: item.values for item in whole.series}
    if lane == "live" and (tokens := _count_tokens(values)):
        values[_TOKENS] = tokens
    first, second = (_make_arm(whole, variant, schedule, faults) for variant in (BASELINE, ENABLED))
    return Session(trial=trial, schedule=schedule, values=values, faults=faults, arms=(first, second), rules=rules)


def _count_tokens(values: Values) -> list[float | None]:
    pairs = zip(values.get(_RATE, ()), values.get(_RATE_TIME, ()), strict=False)
    return [None if rate is None or time_s is None else rate * time_s for rate, time_s in pairs]


def _find_faults(
    plan: Plan, ops: OpsLog, schedule: Schedule, step_times: Sequence[float | None]
) -> Iterator[tuple[int, str]]:
    """Yield each block that does not count, with the first reason."""
    called = {item.op for item in ops.decisions() if item.is_served}
    served = {op: variant for variant in plan.routed for op in plan.ops_of(variant) if op in called}
    uncounted = _find_uncounted(ops, len(schedule.rollouts)) if plan.num_gpus else {}
    for block, steps in enumerate(schedule.steps_of_blocks):
        for step in steps:
            fault = _find_unproved_step(plan, ops, served, step, schedule.variant_of(step))
            if not fault and schedule.is_scored(step):
                fault = _find_unmeasured(ops, step_times, uncounted, step)
            if fault:
                yield block, fault
                break


def _find_unproved_step(plan: Plan, ops: OpsLog, served: Mapping[str, str], step: int, planned: str) -> str:
    if plan.run.switch is not None:
        return find_unswitched(ops, step, planned, of_tokens=AGREEMENT_RECORD in plan.run.switch.enabled)
    for op, variant in served.items():
        if fault := find_unproved(ops, op, step, planned, plan.layout.pipeline_parallel, variant):
            return fault
    return ""


def _find_unmeasured(ops: OpsLog, step_times: Sequence[float | None], uncounted: Mapping[int, str], step: int) -> str:
    if step >= len(step_times) or step_times[step] is None:
        return f"step {step} has no step time"
    if step in uncounted:
        return f"step {step}, which is scored, has no counts of {uncounted[step]}"
    if fault := _find_unreplayed(ops, step):
        return fault
    counts = ops.counts_in(step)
    for name, what in _COUNTS.items():
        if counts.get(name):
            return f"{count(counts[name], what)} in step {step}, which is scored"
    return ""


def _find_unreplayed(ops: OpsLog, step: int) -> str:
    """Return which rank did not use the rollout's experts (R3) in a step.

    The result is empty for older records and without R3.
    """
    for rank in ops.ranks:
        counts = rank.steps[step][1].counts if step in rank.steps else {}
        replayed, routers = counts.get(_REPLAYED, 0), counts.get(_ROUTERS, 0)
        if replayed < routers:
            what = f"{replayed} of {count(routers, 'router')} replayed the rollout's experts (R3)"
            return f"rank {rank.rank}: {what} in step {step}, which is scored"
    return ""


def _find_uncounted(ops: OpsLog, num_steps: int) -> dict[int, str]:
    """Return the steps of which a rank's record lacks a count, each with what is not counted.

    Older records lack the count of kernel compilations, and so does a rank that has not loaded
    Triton.  They also lack the count of routers, but if one record has it, all need it.
    """
    uncounted: dict[int, str] = {}
    records = (record for rank in ops.ranks for _, record in rank.steps.values())
    has_routers = any(_ROUTERS in record.counts for record in records)
    of_routers = {_ROUTERS, _REPLAYED} if has_routers else set[str]()
    for rank in ops.ranks:
        counts = {step: record.counts.keys() for step, (_, record) in rank.steps.items()}
        wanted = set(_COUNTS)
        if not any(_KERNELS in names for names in counts.values()):
            wanted.remove(_KERNELS)
        for step in range(num_steps):
            names = counts.get(step, set[str]())
            if not wanted <= names:
                uncounted[step] = "compilations and repeated allocations"
            elif not of_routers <= names:
                uncounted[step] = "routers that replay experts (R3)"
    return uncounted


def _make_arm(whole: TrialResult, variant: str, schedule: Schedule, faults: Mapping[int, str]) -> TrialResult:
    own = {step for step, rollout in enumerate(schedule.rollouts) if rollout.variant == variant}
    scored = [step for step in schedule.list_compared(faults) if step in own]
    series = tuple(_keep_steps(item, own) for item in whole.series)
    is_enabled = variant == ENABLED
    return replace(
        whole,
        name=f"{whole.name}:{variant}",
        variant=variant,
        num_steps_found=count_steps(series),
        num_steps_expected=len(own),
        proof=whole.proof if is_enabled else ProofStatus.NOT_REQUESTED,
        proof_reason=whole.proof_reason if is_enabled else "",
        decisions=whole.decisions if is_enabled else (),
        series=series,
        summaries=summarise_all(series, scored),
        rejects={} if is_enabled else whole.rejects,
    )


def _keep_steps(series: Series, kept: Collection[int]) -> Series:
    return replace(
        series,
        values=tuple(value if step in kept else None for step, value in enumerate(series.values)),
        lines=tuple(line if step in kept else None for step, line in enumerate(series.lines)),
    )


def compare_sessions(sessions: Sequence[Session]) -> tuple[list[PairResult], list[BlockResult]]:
    """Compare each session's variants by the Hodges-Lehmann estimate of block effects; return sessions and blocks."""
    slopes = find_slopes(sessions)
    counting = [session for session in sessions if session.is_complete]
    blocks = [block for session in counting for block in _list_blocks(session, slopes.get(STEP_TIME, 0.0))]
    return [_compare(session, slopes) for session in sessions], blocks


def find_slopes(sessions: Sequence[Session]) -> dict[str, float]:
    """Return the slope on tokens of each adjusted metric; a metric is absent if both variants use the same rollouts.

    Under rules 2 a slope is 0 to 1, because more tokens take more time but never more than in proportion, and no metric
    has one if the variants' tokens differ too little to tell it.
    """
    counting = [session for session in sessions if session.is_complete]
    found = {metric: slope for metric in ADJUSTED if (slope := _find_slope(counting, metric)) is not None}
    if not any(session.rules > 1 for session in counting):
        return found
    tokens = [value for session in counting for value in session.effects(_TOKENS) or ()]
    if len(tokens) < 2 or stdev(tokens) < LEAST_TOKEN_SPREAD:
        return {}
    return {metric: min(1.0, max(0.0, slope)) for metric, slope in found.items()}


def _find_slope(sessions: Sequence[Session], metric: str) -> float | None:
    found = ((session.effects(_TOKENS), session.effects(metric)) for session in sessions)
    return common_slope([list(zip(tokens, effects, strict=True)) for tokens, effects in found if tokens and effects])


def _compare(session: Session, slopes: Mapping[str, float]) -> PairResult:
    first, second = session.arms
    status, reason = _find_status(session)
    is_control = status is PairStatus.SCORED and second.proof is ProofStatus.FALLBACK
    return PairResult(
        pair=session.trial.pair,
        is_control=is_control,
        control_reason=f"enabled fell back everywhere: {second.proof_reason}" if is_control else "",
        status=status,
        reason=reason,
        first=first.name,
        second=second.name,
        order=" ".join(block.order for block in session.schedule.blocks if not block.is_control),
        metrics=tuple(_compare_metrics(session, slopes)),
    )


def _find_status(session: Session) -> tuple[PairStatus, str]:
    enabled = session.arms[1]
    if not session.is_complete:
        return PairStatus.DROPPED, f"{session.trial.name}: {enabled.status}"
    if session.effects(STEP_TIME) is None:
        return PairStatus.VOID, f"{session.trial.name}: no block counts ({next(iter(session.faults.values()), '')})"
    has_fallen_back = enabled.proof is ProofStatus.FALLBACK and fell_back_everywhere(enabled)
    # NOT_REQUESTED is the status of a session that switches something other than RL-Kernel; such a session is scored.
    if has_fallen_back or enabled.proof in {ProofStatus.PROVED, ProofStatus.NATIVE, ProofStatus.NOT_REQUESTED}:
        return PairStatus.SCORED, ""
    return PairStatus.VOID, f"{session.trial.name}: {enabled.proof} ({enabled.proof_reason})"


def _compare_metrics(session: Session, slopes: Mapping[str, float]) -> Iterator[PairMetric]:
    effects = list_effects(session, slopes)
    for item in pair_metrics(*session.arms):
        if item.metric == MEAN_STEP_TIME:
            yield _adjust_mean(item, session, slopes) if session.rules > 2 else item
        else:
            found = effects.get(item.metric)
            yield replace(item, log_ratio=hodges_lehmann(found) if found else None)
    for name in DIAGNOSTICS:
        if values := effects.get(name):
            yield _make_metric(name, hodges_lehmann(values))
    has_gate = session.rules > 1 and session.schedule.period_steps == 1 and STEP_TIME in session.values
    if has_gate and (carried := find_carry_over(session)) is not None:
        yield _make_metric(CARRY_OVER, carried)


def _adjust_mean(item: PairMetric, session: Session, slopes: Mapping[str, float]) -> PairMetric:
    """Adjust the mean step time for a rollout's tokens, as the effects of blocks are."""
    if STEP_TIME not in slopes or item.log_ratio is None:
        return item
    tokens = session.effects(_TOKENS)
    return replace(item, log_ratio=item.log_ratio - slopes[STEP_TIME] * mean(tokens) if tokens else None)


def list_effects(session: Session, slopes: Mapping[str, float]) -> dict[str, list[float]]:
    """Return, by metric, the effects of all blocks without a fault; a metric that lacks a value is absent."""
    raw = {metric: effects for metric in session.values if (effects := session.effects(metric))}
    tokens, times = raw.pop(_TOKENS, None), raw.get(STEP_TIME)
    found = {metric: effects for metric, effects in raw.items() if metric not in slopes}
    if tokens:
        for metric in slopes.keys() & raw.keys():
            pairs = zip(raw[metric], tokens, strict=True)
            found[metric] = [effect - slopes[metric] * more for effect, more in pairs]
    if STEP_TIME in slopes and times:
        found[UNADJUSTED] = times
    if session.rules > 1 and ENERGY in found and _find_shortest(session) < LEAST_ENERGY_TIME_S:
        del found[ENERGY]
    firsts = session.effects(STEP_TIME, is_scored=False)
    if times and firsts and session.schedule.period_steps > 1:
        found[CARRY_OVER] = [first - scored for first, scored in zip(firsts, times, strict=True)]
    return found


def _find_shortest(session: Session) -> float:
    """Return the median time in seconds of a scored step, of the faster variant."""
    found = [summary.median for arm in session.arms if (summary := arm.summary(STEP_TIME)) is not None]
    return min(found, default=0.0)


def find_carry_over(session: Session) -> float | None:
    """Return how the first step after a change of the variant differs from the next one: in enabled minus in baseline.

    In a block of four single steps the second follows a change and the third does not.  Both are enabled in ABBA and
    baseline in BAAB, so linear drift cancels out.
    """
    gaps: dict[str, list[float]] = {order: [] for order in ORDERS}
    for block, item in enumerate(session.schedule.blocks):
        first, second = (session.values[STEP_TIME][step] for step in session.schedule.steps_of_blocks[block][1:3])
        if first and second and not item.is_control and block not in session.faults:
            gaps[item.order].append(math.log(first / second))
    enabled, baseline = (gaps[order] for order in ORDERS)
    return hodges_lehmann(enabled) - hodges_lehmann(baseline) if enabled and baseline else None


def _make_metric(name: str, log_ratio: float) -> PairMetric:
    return PairMetric(metric=name, first=None, second=None, log_ratio=log_ratio if math.isfinite(log_ratio) else None)


def _list_blocks(session: Session, slope: float) -> Iterator[BlockResult]:
    for number, block in enumerate(session.schedule.blocks):
        log_ratio, tokens = session.effect(STEP_TIME, number), session.effect(_TOKENS, number)
        yield BlockResult(
            session=session.trial.pair,
            number=number,
            order=block.order,
            is_control=block.is_control,
            reason=session.faults.get(number, ""),
            log_ratio=None if log_ratio is None else log_ratio - slope * (tokens or 0.0),
            first_log_ratio=session.effect(STEP_TIME, number, is_scored=False),
        )


def pool_step_times(sessions: Sequence[Session]) -> dict[str, Summary]:
    """Summarise, for each variant, the scored step times of all sessions."""
    pooled: dict[str, list[float | None]] = {}
    for session in sessions:
        times = session.values.get(STEP_TIME)
        if session.is_complete and times:
            for step in session.schedule.list_compared(session.faults):
                pooled.setdefault(session.schedule.variant_of(step), []).append(times[step])
    found = {variant: summarise(STEP_TIME, values) for variant, values in sorted(pooled.items())}
    return {variant: summary for variant, summary in found.items() if summary is not None}
