"""Synthetic ``Analysis`` values for the tests of reports: one per verdict and per way a run can go wrong.

The numbers are made up, seeded and plausible; nothing here checks the real analysis.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.results import (
    Analysis,
    DecisionSummary,
    Effect,
    Gate,
    GateStatus,
    NoiseFloor,
    PairResult,
    PairStatus,
    ProofStatus,
    Series,
    TrialResult,
    TrialStatus,
    Verdict,
    VerdictWord,
)
from rlk_repro.statistics.stats import STEP_TIME, holm, is_cost, noise_floor, pair_metrics, paired_effect, summarise

HOSTILE: Final = (
    "<script>alert('x')</script> \"quoted\" `tick` | pipe\nnew\tline \x1b[31mred ünï 漢字 \u202edlrow [bold]"
)

# metric: baseline value, and what a step_time ratio of 1 - x does to it (exponent of the speed)
LEVELS: Final[dict[str, tuple[float, float]]] = {
    "step_time_s": (41.7, 1.0),
    "train_time_s": (24.9, 1.6),
    "train_wait_time_s": (16.8, 0.0),
    "actor_train_time_s": (19.2, 2.0),
    "log_probs_time_s": (2.31, 0.6),
    "ref_log_probs_time_s": (2.28, 0.6),
    "rollout_time_s": (12.9, 0.0),
    "weight_sync_time_s": (1.84, 0.0),
    "train_tokens_per_s": (52_310.0, -2.0),
    "tokens_per_s": (24_080.0, -1.0),
    "raw_reward": (0.41, 0.0),
    "response_length_mean": (1_512.0, 0.0),
    "train_rollout_logprob_abs_diff": (0.0121, 0.0),
    "loss": (0.0031, 0.0),
    "pg_loss": (0.0027, 0.0),
    "kl_loss": (0.00042, 0.0),
    "grad_norm": (0.184, 0.0),
    "peak_memory_bytes": (61.4 * 2**30, 0.4),
    "module_log_probs_forward_s": (1.92, 4.0),
    "module_log_probs_backward_s": (2.71, 4.0),
    "module_log_probs_no_grad_s": (1.55, 3.0),
    "module_clip_kl_forward_s": (0.0141, 1.0),
    "module_clip_kl_backward_s": (0.0102, 1.0),
    "module_grpo_loss_forward_s": (2.05, 3.8),
    "module_grpo_loss_backward_s": (2.83, 3.8),
    "module_optimizer_s": (0.913, 0.0),
    "module_step_s": (24.6, 1.6),
}
GATED: Final = (
    "step_time_s",
    "raw_reward",
    "response_length_mean",
    "train_rollout_logprob_abs_diff",
    "peak_memory_bytes",
    "module_log_probs_forward_s",
)
MAYBE: Final = "mean ratio enabled / baseline may be beyond the margin; about 11 pairs would decide at this spread"
LOG_PROB_REASON: Final = "compiled symbol rl_engine._C.fused_logp_gather found, bf16, vocabulary 151936"

FACTS: Final = {
    "nodes": "1",
    "CPU": "INTEL(R) XEON(R) PLATINUM 8558",
    "kernel": "6.8.0-79-generic",
    "GPU": "NVIDIA H200",
    "GPUs per node": "8",
    "driver": "575.57.08",
    "image": "sha256:" + "5e" * 32,
    "vime commit": "9b1df45a7e0d4c2b8f6a1e3d5c7b9a0f2e4d6c8b",
    "RL-Kernel commit": "202f0e3a5d1fb0c3c1a9c0f9a9f2b4d2f3b1a7e0",
    "Megatron-LM commit": "3714d81d418c9f1bca4594fc35f9e8289f652862",
    "torch as loaded": "2.9.1+cu129",
    "nccl as loaded": "2.27.5",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a synthetic run looks like; ``speed`` is the true ratio enabled / baseline of the step time.

    ``{effect}`` and ``{floor}`` in the headline and the reasons stand for what came out.
    """

    word: VerdictWord
    headline: str
    reasons: tuple[str, ...] = ()
    speed: float = 0.95
    num_pairs: int = 6
    num_control_pairs: int = 4
    num_warmup_steps: int = 2
    num_scored_steps: int = 20
    spread: float = 0.002
    metrics: tuple[str, ...] = tuple(LEVELS)
    seed: int = 7


def make_analysis(recipe: Recipe) -> Analysis:
    source = random.Random(recipe.seed)
    trials = tuple(_make_trials(recipe, source))
    pairs = tuple(_make_pairs(recipe, trials))
    effects = _make_effects(pairs)
    floor = _make_floor(pairs)
    words = {"effect": _show_effect(effects[0]), "floor": f"{100 * (floor.fraction or 0):.3g} %"}
    return Analysis(
        run="qwen3-30b-a3b",
        run_id="20261120-091500-7f3a",
        lane="live",
        workload="vime",
        hardware="h200",
        stack="example",
        cluster="slurm",
        experiment_hash="e1" * 32,
        plan_hash="f2" * 32,
        num_pairs_planned=recipe.num_pairs,
        num_control_pairs_planned=recipe.num_control_pairs,
        num_warmup_steps=recipe.num_warmup_steps,
        num_scored_steps=recipe.num_scored_steps,
        facts=dict(FACTS),
        trials=trials,
        pairs=pairs,
        effects=effects,
        noise_floor=floor,
        gates=_make_gates(recipe.num_pairs),
        verdict=Verdict(
            word=recipe.word,
            headline=recipe.headline.format(**words),
            reasons=tuple(reason.format(**words) for reason in recipe.reasons),
            threshold=max(0.01, floor.fraction or 0.0),
            smallest_effect=0.01,
            num_pairs=recipe.num_pairs,
            is_exploratory=False,
        ),
        notes=("step 0 holds initialisation and is part of the warm-up",),
        findings=(),
    )


def _show_effect(effect: Effect) -> str:
    if effect.ratio is None or effect.low is None:
        return "no step time ratio"
    interval = f"95 % interval {effect.low:.4f} to {effect.high:.4f}"
    return f"step time ratio enabled / baseline {effect.ratio:.4f} ({interval}, {effect.n} pairs)"


def _make_trials(recipe: Recipe, source: random.Random) -> Iterator[TrialResult]:
    names = [(f"c{index + 1}", ("baseline", "baseline")) for index in range(recipe.num_control_pairs)]
    for index in range(recipe.num_pairs):
        order = ("baseline", "enabled") if index % 2 == 0 else ("enabled", "baseline")
        names.append((f"p{index + 1}", order))
    number = 0
    for position, (pair, order) in enumerate(names):
        drift = source.gauss(0, 0.01)
        for variant in order:
            yield _make_trial(recipe, number, pair, variant, 1000 + position, drift, source)
            number += 1


def _make_trial(
    recipe: Recipe, index: int, pair: str, variant: str, seed: int, drift: float, source: random.Random
) -> TrialResult:
    name = f"{index:02d}-{pair}-{variant}"
    num_steps = recipe.num_warmup_steps + recipe.num_scored_steps
    shift = drift + source.gauss(0, recipe.spread)
    series = []
    for metric in recipe.metrics:
        level, exponent = LEVELS[metric]
        factor = math.exp(shift) * (recipe.speed**exponent if variant == "enabled" else 1.0)
        values = [level * factor * math.exp(source.gauss(0, 0.02)) for _ in range(num_steps)]
        if metric == "raw_reward":
            values = [value + 0.006 * step for step, value in enumerate(values)]
        elif metric.endswith("_time_s"):
            values[0] *= 1.6
        is_in_ops = metric.startswith(("module_", "peak_"))
        lines = tuple(3 + step if is_in_ops else 120 + 14 * step for step in range(num_steps))
        file = "ops/0.jsonl" if is_in_ops else "stdout.log"
        series.append(Series(metric=metric, source=f"trials/{name}/{file}", values=tuple(values), lines=lines))
    is_enabled = variant == "enabled"
    summaries = (summarise(item.metric, item.values[recipe.num_warmup_steps :]) for item in series)
    return TrialResult(
        index=index,
        name=name,
        pair=pair,
        variant=variant,
        seed=seed,
        status=TrialStatus.OK,
        reason="",
        duration_s=1034.2 + 3 * index,
        num_steps_found=num_steps,
        num_steps_expected=num_steps,
        proof=ProofStatus.PROVED if is_enabled else ProofStatus.NOT_REQUESTED,
        proof_reason="fused_logp_gather ran on 8 ranks" if is_enabled else "",
        decisions=_make_decisions(num_steps) if is_enabled else (),
        series=tuple(series),
        summaries=tuple(summary for summary in summaries if summary is not None),
        rejects={},
        throttled_fraction=0.0,
    )


def _make_decisions(num_steps: int) -> tuple[DecisionSummary, ...]:
    shared = {"calls": 64 * num_steps, "tokens": 98_304 * num_steps, "fallbacks": 0}
    return (
        DecisionSummary(
            op="logp", implementation="rl_kernel.cuda.fused_logp", reason=LOG_PROB_REASON, is_rl_kernel=True, **shared
        ),
        DecisionSummary(
            op="ratio_kl", implementation="vime", reason="not listed for this run", is_rl_kernel=False, **shared
        ),
    )


def _make_pairs(recipe: Recipe, trials: tuple[TrialResult, ...]) -> Iterator[PairResult]:
    for name in dict.fromkeys(trial.pair for trial in trials):
        one, two = (trial for trial in trials if trial.pair == name)
        first, second = (one, two) if one.variant == "baseline" else (two, one)
        is_control = name.startswith("c")
        yield PairResult(
            pair=name,
            is_control=is_control,
            control_reason="planned" if is_control else "",
            status=PairStatus.SCORED,
            reason="",
            first=first.name,
            second=second.name,
            order="AB" if first.index < second.index else "BA",
            metrics=pair_metrics(first, second),
        )


def _make_effects(pairs: Iterable[PairResult]) -> tuple[Effect, ...]:
    scored = [pair for pair in pairs if not pair.is_control and pair.status is PairStatus.SCORED]
    names = sorted({item.metric for pair in scored for item in pair.metrics if is_cost(item.metric)} - {STEP_TIME})
    secondary = [paired_effect(name, _log_ratios(scored, name), role="secondary", alpha=0.05) for name in names]
    corrected = holm([effect.p_t for effect in secondary])
    return (
        paired_effect(STEP_TIME, _log_ratios(scored, STEP_TIME), role="primary", alpha=0.05),
        *(dataclasses.replace(effect, p_holm=p) for effect, p in zip(secondary, corrected, strict=True)),
    )


def _log_ratios(pairs: Iterable[PairResult], metric: str) -> list[float]:
    found = (pair.metric(metric) for pair in pairs)
    return [item.log_ratio for item in found if item is not None and item.log_ratio is not None]


def _make_floor(pairs: Iterable[PairResult]) -> NoiseFloor:
    return noise_floor(_log_ratios([pair for pair in pairs if pair.is_control], STEP_TIME), alpha=0.05)


def _make_gates(n: int) -> tuple[Gate, ...]:
    def make(name: str, detail: str, values: tuple[float, float, float, float] | None = None) -> Gate:
        estimate, low, high, margin = values or (None, None, None, None)
        status = GateStatus.PASSED
        return Gate(name=name, status=status, detail=detail, estimate=estimate, low=low, high=high, margin=margin, n=n)

    ratio = "mean ratio enabled / baseline is within the margin"
    difference = "mean difference enabled - baseline is within the margin"
    return (
        make("raw_reward", difference, (0.0012, -0.0048, 0.0072, -0.01)),
        make("train_rollout_logprob_abs_diff", ratio, (1.004, 0.991, 1.017, 1.05)),
        make("peak_memory_bytes", ratio, (0.981, 0.978, 0.984, 1.02)),
        make("response_length_mean", ratio, (1.001, 0.994, 1.008, 1.02)),
        make("manifests", "the variants are equal outside the declared switches"),
        make("steps", "every scored step present"),
        make("rl_kernel_active", "RL-Kernel is proved to run in every scored pair"),
        make("pairs", f"{n} of {n} planned pairs scored"),
    )


def replace_trial(analysis: Analysis, index: int, change: Callable[[TrialResult], TrialResult]) -> Analysis:
    trials = tuple(change(trial) if trial.index == index else trial for trial in analysis.trials)
    return dataclasses.replace(analysis, trials=trials)


@cache
def faster() -> Analysis:
    return make_analysis(
        Recipe(
            word=VerdictWord.FASTER,
            headline="enabled is faster than baseline: {effect}, wholly beyond the noise floor, {floor}",
            reasons=("every gate that applies passed", "noise floor {floor}, the farther end of the 95 % interval"),
        )
    )


@cache
def slower() -> Analysis:
    return make_analysis(
        Recipe(
            word=VerdictWord.SLOWER,
            headline="enabled is slower than baseline: {effect}, wholly beyond the noise floor, {floor}",
            reasons=("every gate that applies passed",),
            speed=1.041,
            metrics=GATED,
        )
    )


@cache
def equivalent() -> Analysis:
    return make_analysis(
        Recipe(
            word=VerdictWord.EQUIVALENT,
            headline="enabled and baseline are equivalent within 1 %: {effect}",
            reasons=("every gate that applies passed",),
            speed=1.001,
            metrics=GATED,
        )
    )


@cache
def inconclusive() -> Analysis:
    """Three pairs without control pairs: never ``faster``, whatever the interval says."""
    return make_analysis(
        Recipe(
            word=VerdictWord.INCONCLUSIVE,
            headline="inconclusive: 3 scored pairs, at least 6 are needed; {effect}",
            reasons=("a verdict on speed needs 6 pairs with a step time, found 3", "the noise floor was not measured"),
            num_pairs=3,
            num_control_pairs=0,
        )
    )


@cache
def not_comparable() -> Analysis:
    analysis = make_analysis(
        Recipe(
            word=VerdictWord.NOT_COMPARABLE,
            headline="not comparable: raw_reward: mean difference enabled - baseline is shown to be beyond the margin "
            "(-0.061, bounds -0.082 and -0.04, margin -0.01, 6 pairs)",
            reasons=("failed: raw_reward", "undecided: train_rollout_logprob_abs_diff"),
            metrics=GATED,
        )
    )
    failed = dataclasses.replace(
        analysis.gates[0],
        status=GateStatus.FAILED,
        detail="mean difference enabled - baseline is shown to be beyond the margin",
        estimate=-0.061,
        low=-0.082,
        high=-0.04,
    )
    undecided = dataclasses.replace(analysis.gates[1], status=GateStatus.UNDECIDED, high=1.09, detail=MAYBE)
    return dataclasses.replace(analysis, gates=(failed, undecided, *analysis.gates[2:]))


@cache
def all_fallback() -> Analysis:
    """The CPU smoke run on the reference trainer: enabled fell back everywhere, so every pair is a control pair."""
    analysis = make_analysis(
        Recipe(
            word=VerdictWord.INCONCLUSIVE,
            headline="enabled never ran RL-Kernel: logp fell back in 2 of 2 enabled trials",
            reasons=("no scored comparison pair", "cpu never yields a speed verdict"),
            num_pairs=2,
            num_control_pairs=0,
            num_scored_steps=4,
        )
    )
    reason = "RL-Kernel is not installed here"
    fallback = DecisionSummary(
        op="logp", implementation="torch", reason=reason, is_rl_kernel=False, calls=48, tokens=12_288, fallbacks=48
    )

    def fall_back(trial: TrialResult) -> TrialResult:
        if trial.variant == "baseline":
            return trial
        return dataclasses.replace(
            trial, proof=ProofStatus.FALLBACK, proof_reason=f"logp: {reason}", decisions=(fallback,)
        )

    pairs = tuple(
        dataclasses.replace(pair, is_control=True, control_reason="the enabled trial fell back everywhere")
        for pair in analysis.pairs
    )
    gates = (
        dataclasses.replace(
            analysis.gates[6],
            status=GateStatus.UNDECIDED,
            detail="no scored pair",
        ),
    )
    floor = _make_floor(pairs)
    return dataclasses.replace(
        analysis,
        run="smoke",
        workload="reference",
        hardware="cpu",
        cluster="local",
        lane="live",
        facts={"nodes": "1", "CPU": "AMD EPYC 9654 96-Core Processor", "Python": "3.11.9"},
        trials=tuple(fall_back(trial) for trial in analysis.trials),
        pairs=pairs,
        effects=_make_effects(()),
        noise_floor=floor,
        gates=gates,
        verdict=dataclasses.replace(analysis.verdict, threshold=floor.fraction or 0.0, num_pairs=0),
    )


@cache
def with_failures() -> Analysis:
    """One trial out of memory, one killed by the time limit, one never started, one fallen back half-way."""
    analysis = make_analysis(
        Recipe(
            word=VerdictWord.INCONCLUSIVE,
            headline="inconclusive: 2 scored pairs, at least 6 are needed; 1 of 6 planned pairs void: p3; "
            "3 of 6 planned pairs dropped: p1, p4, p6",
            reasons=("pair p1 dropped: 09-p1-enabled: out of memory", "pair p3 void: 13-p3-enabled: fallback"),
        )
    )
    endings = {
        9: (TrialStatus.OUT_OF_MEMORY, "rank 3: torch.OutOfMemoryError while allocating 2.32 GiB", 412.7, 7),
        14: (TrialStatus.INTERRUPTED, "SIGTERM from the scheduler, 120 s before the time limit", 611.0, 11),
        19: (TrialStatus.MISSING, "never started", None, 0),
    }
    trials = tuple(_end(trial, *endings[trial.index]) if trial.index in endings else trial for trial in analysis.trials)
    fallen = dataclasses.replace(trials[13], proof=ProofStatus.FALLBACK, proof_reason="logp: 44 calls fell back")
    trials = (*trials[:13], fallen, *trials[14:])
    broken = {trial.pair for trial in trials if trial.status is not TrialStatus.OK}

    def lose(pair: PairResult) -> PairResult:
        if pair.pair in broken:
            return dataclasses.replace(pair, status=PairStatus.DROPPED, reason="a trial did not finish", metrics=())
        if pair.pair == fallen.pair:
            return dataclasses.replace(pair, status=PairStatus.VOID, reason=f"{fallen.name}: {fallen.proof}")
        return pair

    pairs = tuple(lose(pair) for pair in analysis.pairs)
    finding = Finding(Level.WARNING, "nodes.node-1.gpu.driver", "575.57.08", "580.65.06")
    return dataclasses.replace(
        analysis,
        trials=trials,
        pairs=pairs,
        effects=_make_effects(pairs),
        findings=(finding,),
        verdict=dataclasses.replace(analysis.verdict, num_pairs=2),
    )


def _end(trial: TrialResult, status: TrialStatus, reason: str, duration_s: float | None, found: int) -> TrialResult:
    series = tuple(
        dataclasses.replace(item, values=item.values[:found], lines=item.lines[:found]) for item in trial.series
    )
    return dataclasses.replace(
        trial,
        status=status,
        reason=reason,
        duration_s=duration_s,
        num_steps_found=found,
        series=series if found else (),
        summaries=(),
        proof=ProofStatus.MISSING if trial.variant == "enabled" else trial.proof,
        proof_reason="the trial did not reach the end of its ops file" if trial.variant == "enabled" else "",
        decisions=(),
    )


@cache
def missing_metrics() -> Analysis:
    """Only the step time was logged, with one hole."""
    analysis = make_analysis(
        Recipe(
            word=VerdictWord.INCONCLUSIVE,
            headline="gates without data: reward and log-prob agreement were not recorded",
            reasons=("2 gates are undecided",),
            metrics=("step_time_s",),
        )
    )
    undecided = tuple(
        dataclasses.replace(
            gate, status=GateStatus.UNDECIDED, detail="not recorded", estimate=None, low=None, high=None, n=0
        )
        for gate in analysis.gates[:2]
    )

    def punch(trial: TrialResult) -> TrialResult:
        (only,) = trial.series
        values, lines = list(only.values), list(only.lines)
        values[5], lines[5] = None, None
        return dataclasses.replace(
            trial,
            series=(dataclasses.replace(only, values=tuple(values), lines=tuple(lines)),),
            throttled_fraction=None,
        )

    return dataclasses.replace(replace_trial(analysis, 3, punch), gates=undecided + analysis.gates[4:])


@cache
def huge() -> Analysis:
    """48 pairs of 240 steps: what the page does with a lot of data."""
    return make_analysis(
        Recipe(
            word=VerdictWord.FASTER,
            headline="enabled is faster than baseline: {effect}, wholly beyond the noise floor, {floor}",
            reasons=("every gate that applies passed",),
            num_pairs=48,
            num_scored_steps=240,
            metrics=GATED,
        )
    )


@cache
def hostile() -> Analysis:
    """Every free text of a run holds markup, quotes, control and right-to-left characters."""
    analysis = make_analysis(
        Recipe(
            word=VerdictWord.FASTER,
            headline=HOSTILE,
            reasons=(HOSTILE,),
            num_pairs=2,
            num_control_pairs=2,
            num_scored_steps=3,
            metrics=GATED,
        )
    )

    def rename(trial: TrialResult) -> TrialResult:
        bad = DecisionSummary(
            op=HOSTILE, implementation=HOSTILE, reason=HOSTILE, is_rl_kernel=True, calls=1, tokens=1, fallbacks=0
        )
        return dataclasses.replace(
            trial, name=f"{trial.name}-{HOSTILE}", reason=HOSTILE, proof_reason=HOSTILE, decisions=(bad,)
        )

    pairs = tuple(
        dataclasses.replace(
            pair,
            pair=f"{pair.pair}{HOSTILE}",
            reason=HOSTILE,
            control_reason=HOSTILE,
            first=f"{pair.first}-{HOSTILE}",
            second=f"{pair.second}-{HOSTILE}",
        )
        for pair in analysis.pairs
    )
    return dataclasses.replace(
        analysis,
        run=HOSTILE,
        run_id=HOSTILE,
        hardware=HOSTILE,
        stack=HOSTILE,
        facts={HOSTILE: HOSTILE},
        trials=tuple(rename(trial) for trial in analysis.trials),
        pairs=pairs,
        gates=tuple(dataclasses.replace(gate, detail=HOSTILE) for gate in analysis.gates),
        notes=(HOSTILE,),
        findings=(Finding(Level.BLOCKING, HOSTILE, HOSTILE, HOSTILE),),
    )


@cache
def small() -> Analysis:
    """The example of the Markdown golden: two pairs, three scored steps, four metrics."""
    return make_analysis(
        Recipe(
            word=VerdictWord.INCONCLUSIVE,
            headline="2 pairs cannot carry a verdict, 6 are needed",
            reasons=("2 pairs are fewer than 6",),
            num_pairs=2,
            num_control_pairs=0,
            num_warmup_steps=1,
            num_scored_steps=3,
            metrics=("step_time_s", "raw_reward", "peak_memory_bytes", "module_log_probs_forward_s"),
        )
    )


def operators() -> Analysis:
    """A run of the operator tier, made from logs."""
    from tests.support import operator_examples

    return operator_examples.operators()


def hostile_operators() -> Analysis:
    from tests.support import operator_examples

    return operator_examples.hostile_operators()


EXAMPLES: Final[dict[str, Callable[[], Analysis]]] = {
    "faster": faster,
    "slower": slower,
    "equivalent": equivalent,
    "inconclusive": inconclusive,
    "not-comparable": not_comparable,
    "all-fallback": all_fallback,
    "with-failures": with_failures,
    "missing-metrics": missing_metrics,
    "huge": huge,
    "hostile": hostile,
    "small": small,
    "operators": operators,
    "hostile-operators": hostile_operators,
}
