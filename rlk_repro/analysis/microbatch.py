"""Find how many tokens of a microbatch fit in a GPU's memory.

The samples of each step are longer than those of the step before, until a step runs out of memory and ends the trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlk_repro.division import list_microbatches
from rlk_repro.plan import Plan
from rlk_repro.rundir.microbatch import Microbatch, MicrobatchResult
from rlk_repro.rundir.results import ProofStatus, TrialResult, TrialStatus
from rlk_repro.statistics.stats import PEAK_MEMORY, RESPONSE_LENGTH


def find_largest(plan: Plan, trials: Sequence[TrialResult]) -> Iterator[MicrobatchResult]:
    """Yield each trial's result; a run with another purpose has none."""
    planned = list_microbatches(plan)
    lengths, sizes = [length for length, _ in planned], [size for _, size in planned]
    for trial in trials if planned else ():
        number = trial.num_steps_found
        is_full = trial.status is TrialStatus.OUT_OF_MEMORY and number < len(sizes)
        yield MicrobatchResult(
            trial=trial.name,
            variant=trial.variant,
            trained=tuple(map(Microbatch, sizes[:number], _read(trial, PEAK_MEMORY, number))),
            refused=sizes[number] if is_full else None,
            reason=_find_obstacle(plan, trial, lengths[:number]),
        )


def _find_obstacle(plan: Plan, trial: TrialResult, lengths: Sequence[int]) -> str:
    if trial.status not in {TrialStatus.OK, TrialStatus.OUT_OF_MEMORY}:
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
