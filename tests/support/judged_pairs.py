"""Pairs of made-up trials for the tests of gates and verdict; every metric is equal unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rlk_repro.analysis.evidence import Evidence
from rlk_repro.analysis.noise import find_noise
from rlk_repro.analysis.sessions import Session, compare_sessions
from rlk_repro.analysis.verdict import Judgement, judge
from rlk_repro.plan import Trial
from rlk_repro.rundir.results import PairResult, PairStatus, ProofStatus, Series, TrialResult, TrialStatus
from rlk_repro.spec import Lane, Measure
from rlk_repro.statistics.stats import pair_metrics, summarise

MEASURE: Final = Measure(pairs=6, scored_steps=3)
LEVELS: Final = {
    "step_time_s": 60.0,
    "raw_reward": 0.5,
    "train_rollout_logprob_abs_diff": 0.01,
    "peak_memory_bytes": 6e10,
    "response_length_mean": 1500.0,
}
ALTERNATING: Final = (1.001, 0.999, 1.002, 0.998, 1.0005, 0.9995)


@dataclass(frozen=True, kw_only=True)
class MadePair:
    result: PairResult
    trials: tuple[TrialResult, TrialResult]


def make_trial(
    pair: str, variant: str, steps: Mapping[str, Sequence[float]], proof: ProofStatus, throttled: float | None = None
) -> TrialResult:
    found = [summarise(metric, values) for metric, values in steps.items()]
    return TrialResult(
        index=0,
        name=f"{pair}-{variant}",
        pair=pair,
        variant=variant.rstrip("2"),
        seed=1,
        status=TrialStatus.OK,
        reason="",
        duration_s=None,
        num_steps_found=3,
        num_steps_expected=3,
        proof=proof,
        proof_reason="",
        decisions=(),
        series=(),
        summaries=tuple(item for item in found if item is not None),
        rejects={},
        throttled_fraction=throttled,
    )


def make_pair(
    name: str,
    *,
    proof: ProofStatus = ProofStatus.PROVED,
    second: str = "enabled",
    throttled: float | None = None,
    without: Iterable[str] = (),
    steps: Mapping[str, Sequence[float]] | None = None,
    **levels: float,
) -> MadePair:
    """One pair; ``levels`` and ``steps`` are those of the second trial, ``without`` drops metrics from both."""
    base = {metric: [level] * 3 for metric, level in LEVELS.items() if metric not in without}
    other = {metric: [levels.get(metric, level)] * 3 for metric, level in LEVELS.items() if metric not in without}
    one = make_trial(name, "baseline", base, ProofStatus.NOT_REQUESTED)
    two = make_trial(name, second, {**other, **(steps or {})}, proof, throttled)
    result = PairResult(
        pair=name,
        is_control=False,
        control_reason="",
        status=PairStatus.SCORED,
        reason="",
        first=one.name,
        second=two.name,
        order="baseline, enabled",
        metrics=pair_metrics(one, two),
    )
    return MadePair(result=result, trials=(one, two))


def change(pair: MadePair, **fields: Any) -> MadePair:
    from dataclasses import replace

    return MadePair(result=replace(pair.result, **fields), trials=pair.trials)


def make_pairs(*ratios: float, **options: Any) -> list[MadePair]:
    """One pair per ratio enabled / baseline of the step time."""
    return [make_pair(f"p{i + 1}", step_time_s=60 * ratio, **options) for i, ratio in enumerate(ratios)]


def make_controls(*ratios: float) -> list[MadePair]:
    made = [
        make_pair(f"c{i + 1}", second="baseline2", proof=ProofStatus.NOT_REQUESTED, step_time_s=60 * ratio)
        for i, ratio in enumerate(ratios)
    ]
    return [change(pair, is_control=True, control_reason="baseline against baseline") for pair in made]


def around(ratio: float, spread: float = 1.0) -> list[float]:
    """Six ratios close to one."""
    return [ratio * (1 + spread * (item - 1)) for item in ALTERNATING]


def judge_pairs(
    pairs: Sequence[MadePair], *, measure: Measure = MEASURE, lane: Lane = "live", **options: Any
) -> Judgement:
    is_exploratory = options.pop("is_exploratory", False)
    evidence = Evidence(
        measure=measure,
        lane=lane,
        pairs=[pair.result for pair in pairs],
        trials={trial.name: trial for pair in pairs for trial in pair.trials},
        **{"differences": (), **options},
    )
    return judge(evidence, is_exploratory=is_exploratory)


def make_whole(trial: Trial, times: Sequence[float], tokens: Sequence[float], **others: Sequence[float]) -> TrialResult:
    """A session that ended well, before its steps are divided by variant; ``others`` are further metrics."""
    series = {
        "step_time_s": times,
        "actor_train_time_s": times,
        "train_tokens_per_s": [number / value for number, value in zip(tokens, times, strict=True)],
        "train_rollout_logprob_abs_diff": [0.01] * len(times),
        "peak_memory_bytes": [6e10] * len(times),
        "raw_reward": [0.5 + 0.01 * (step % 3) for step in range(len(times))],
        "grad_norm": [1.0] * len(times),
        **others,
    }
    shown = [Series(metric=name, source="", values=tuple(values), lines=(None,) * len(values))
             for name, values in series.items()]  # fmt: skip
    return replace(make_trial(trial.pair, trial.variant, {}, ProofStatus.PROVED), series=tuple(shown))


def gather_sessions(
    measure: Measure, sessions: Sequence[Session], lane: Lane = "train-only", **options: Any
) -> Evidence:
    pairs, blocks = compare_sessions(sessions)
    return Evidence(
        measure=measure,
        lane=lane,
        pairs=pairs,
        trials={arm.name: arm for session in sessions for arm in session.arms},
        differences=(),
        blocks=blocks,
        noise=find_noise(sessions, [pair.pair for pair in pairs]) if measure.rules > 1 else {},
        **options,
    )
