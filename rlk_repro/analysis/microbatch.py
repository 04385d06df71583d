"""Find how many tokens of a microbatch fit in a GPU's memory.

The samples of each step are longer than those of the step before, until a step runs out of memory and ends the trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.analysis.measured import Measured, Records
from rlk_repro.division import list_microbatches
from rlk_repro.plan import Plan
from rlk_repro.rundir.exits import NO_LIMIT
from rlk_repro.rundir.microbatch import Microbatch, MicrobatchResult, describe_microbatches
from rlk_repro.rundir.results import ProofStatus, TrialResult, TrialStatus
from rlk_repro.statistics.stats import PEAK_MEMORY, RESPONSE_LENGTH

NO_SPEED: Final = "the steps have different numbers of tokens, so this run does not compare the speed of the variants"


def read(records: Records) -> Measured:
    results = tuple(_find_largest(records.plan, records.trials))
    if not results:
        return Measured()
    # the results name the trials that ran out of memory, as they should
    reasons = [*map(str, results), NO_SPEED]
    return Measured(keys={"microbatches": results}, headline=describe_microbatches(results), reasons=reasons)


def _find_largest(plan: Plan, trials: Sequence[TrialResult]) -> Iterator[MicrobatchResult]:
    planned = list_microbatches(plan)
    lengths, sizes = [length for length, _ in planned], [size for _, size in planned]
    for trial in trials if planned else ():
        number = trial.num_steps_found
        is_full = trial.status is TrialStatus.OUT_OF_MEMORY and number < len(sizes) and _is_limit(plan, trial)
        yield MicrobatchResult(
            trial=trial.name,
            variant=trial.variant,
            trained=tuple(map(Microbatch, sizes[:number], _read(trial, PEAK_MEMORY, number))),
            refused=sizes[number] if is_full else None,
            reason=_find_obstacle(plan, trial, lengths[:number]),
        )


def _is_limit(plan: Plan, trial: TrialResult) -> bool:
    """Whether the trainer's GPU refused memory; under rules 1 (older bundles) other memory counts as well."""
    is_other = plan.run.measure.rules > 1 and trial.reason.startswith(NO_LIMIT)
    return trial.status is TrialStatus.OUT_OF_MEMORY and not is_other


def _find_obstacle(plan: Plan, trial: TrialResult, lengths: Sequence[int]) -> str:
    if trial.status is not TrialStatus.OK and not _is_limit(plan, trial):
        return f"{trial.status}: {trial.reason}"
    if not lengths:
        return "the first rollout ran out of memory"
    if plan.run.is_routed(trial.variant) and trial.proof is not ProofStatus.PROVED:
        return f"{plan.serving} is not proved to have run: {trial.proof_reason or trial.proof}"
    for step, (planned, found) in enumerate(zip(lengths, _read(trial, RESPONSE_LENGTH, len(lengths)), strict=False)):
        if planned != found:
            return f"step {step} was planned with responses of {planned} tokens, and its log says {found}"
    return ""


def _read(trial: TrialResult, metric: str, number: int) -> Sequence[float | None]:
    series = trial.get_series(metric)
    return (None,) * number if series is None else series.values
