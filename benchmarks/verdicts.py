"""Simulated experiments through the real functions: how often is a verdict wrong, and how often is there none?

    python -m benchmarks.verdicts          # the table of docs/statistics.md

Every experiment makes step series with drift, correlation, warm-up and outliers, in the planned order, and has them
summarised, paired and judged by the package.  Fixed seeds and the standard library's generator.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rlk_repro.analysis.evidence import Evidence
from rlk_repro.analysis.verdict import Judgement, judge
from rlk_repro.plan import Trial, order_trials
from rlk_repro.rundir.results import PairResult, PairStatus, ProofStatus, TrialResult, TrialStatus, VerdictWord
from rlk_repro.spec import Lane, Margins, Measure
from rlk_repro.statistics.power import STEP_AND_TRIAL_SD
from rlk_repro.statistics.stats import pair_metrics, summarise

SEED: Final = 20261120
NUM_EXPERIMENTS: Final = 2000
"""Of a scenario with a bar; a quarter of it of the others."""
STEP_TIME_S: Final = 60.0
MEMORY_BYTES: Final = 6e10
ORDINARY_REWARD: Final = 0.5
ABS_DIFF: Final = 0.01
RESPONSE_LENGTH: Final = 1500.0


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Standard deviations as fractions of the level; rewards in reward units.  ``shared`` noise is equal in a pair."""

    linear_drift: float = 0.02
    walk_sd: float = 0.004
    trial_sd: float = 0.0113
    step_sd: float = 0.02
    step_correlation: float = 0.5
    warmup_size: float = 0.5
    outlier_chance: float = 0.01
    reward_shared_sd: float = 0.03
    reward_step_sd: float = STEP_AND_TRIAL_SD["raw_reward"][0]
    reward_trial_sd: float = STEP_AND_TRIAL_SD["raw_reward"][1]
    length_shared_sd: float = 0.02
    length_step_sd: float = STEP_AND_TRIAL_SD["response_length_mean"][0]
    length_trial_sd: float = STEP_AND_TRIAL_SD["response_length_mean"][1]
    abs_diff_step_sd: float = 0.05
    abs_diff_trial_sd: float = 0.02
    memory_sd: float = 0.002


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of experiment, and what enabled really does in it.

    With a ``gain`` of 0.05 baseline takes 5 % longer; ``stall_chance`` adds slow steps.
    """

    name: str
    lane: Lane = "fixed-rollout"
    pairs: int = 6
    control_pairs: int = 0
    scored_steps: int = 20
    reward_margin: float = 0.01
    noise: Noise = Noise()
    gain: float = 0.0
    reward_change: float = 0.0
    length_ratio: float = 1.0
    abs_diff_ratio: float = 1.0
    memory_ratio: float = 1.0
    stall_chance: float = 0.0

    @property
    def measure(self) -> Measure:
        return Measure(
            pairs=self.pairs,
            control_pairs=self.control_pairs,
            scored_steps=self.scored_steps,
            margins=Margins(raw_reward=self.reward_margin),
        )

    @property
    def true_ratio(self) -> float:
        """Step time enabled / baseline; half of a live step goes with the response length."""
        through_length = math.sqrt(self.length_ratio) if self.lane == "live" else 1.0
        return through_length / (1 + self.gain)


NOISY: Final = Noise(
    reward_trial_sd=0.05, length_trial_sd=0.08, abs_diff_trial_sd=0.3, memory_sd=0.08, trial_sd=0.05, step_sd=0.05
)
QUIET: Final = Noise(linear_drift=0.005, walk_sd=0.0005, trial_sd=0.0028, step_sd=0.005)
SCENARIOS: Final = (
    Scenario(name="A/A, live", lane="live"),
    Scenario(name="A/A, stored rollouts"),
    Scenario(name="A/A, 6 control pairs", control_pairs=6),
    Scenario(name="A/A, steep drift (10 %)", noise=Noise(linear_drift=0.10)),
    Scenario(name="A/A, strong walk (2 % a trial)", noise=Noise(walk_sd=0.02)),
    Scenario(name="A/A, 5 pairs", pairs=5),
    Scenario(name="A/A, live, very noisy", lane="live", scored_steps=5, noise=NOISY),
    Scenario(name="A/A, quiet (pair sd 0.5 %)", noise=QUIET),
    Scenario(name="1.2 % faster, quiet (pair sd 0.5 %)", noise=QUIET, gain=0.012),
    Scenario(name="5 % faster, stored rollouts", gain=0.05),
    Scenario(name="5 % faster, steep drift (10 %)", gain=0.05, noise=Noise(linear_drift=0.10)),
    Scenario(name="5 % faster, 2 control pairs", gain=0.05, control_pairs=2),
    Scenario(name="5 % faster, 6 control pairs", gain=0.05, control_pairs=6),
    Scenario(name="5 % faster, live", lane="live", gain=0.05),
    Scenario(name="5 % faster, live, reward margin 0.03", lane="live", gain=0.05, reward_margin=0.03),
    Scenario(name="5 % faster, live, 12 pairs", lane="live", gain=0.05, pairs=12),
    Scenario(name="5 % faster, live, 12 pairs of 80 steps", lane="live", gain=0.05, pairs=12, scored_steps=80),
    Scenario(name="5 % slower, stored rollouts", gain=1 / 1.05 - 1),
    Scenario(name="5 % faster, stalls in 5 % of steps", gain=0.05, stall_chance=0.05),
    Scenario(name="5 % faster, reward 0.05 lower", lane="live", gain=0.05, reward_change=-0.05),
    Scenario(name="5 % faster, reward 0.03 lower", lane="live", gain=0.05, reward_change=-0.03),
    Scenario(name="5 % faster, reward 0.01 lower", lane="live", gain=0.05, reward_change=-0.01),
    Scenario(name="5 % faster, abs diff 1.5 times", gain=0.05, abs_diff_ratio=1.5),
    Scenario(name="5 % faster, memory 5 % higher", gain=0.05, memory_ratio=1.05),
    Scenario(name="5 % faster, responses 6 % shorter", lane="live", gain=0.05, length_ratio=0.94),
)


A_A: Final = ("A/A, live", "A/A, stored rollouts", "A/A, 6 control pairs")
COVERING: Final = (*A_A, "5 % faster, stored rollouts")
BARS: Final[dict[str, tuple[tuple[tuple[VerdictWord, ...], float, float], ...]]] = {
    **dict.fromkeys(
        A_A,
        (((VerdictWord.FASTER, VerdictWord.SLOWER), 0.0, 0.05), ((VerdictWord.NOT_COMPARABLE,), 0.0, 0.02)),
    ),
    "1.2 % faster, quiet (pair sd 0.5 %)": (((VerdictWord.EQUIVALENT,), 0.0, 0.05),),
    "5 % faster, stored rollouts": (((VerdictWord.FASTER,), 0.9, 1.0),),
    "5 % faster, reward 0.05 lower": (((VerdictWord.NOT_COMPARABLE,), 0.9, 1.0),),
}
"""The share of verdicts that each of these scenarios must keep: words, lowest and highest share."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Shares over the experiments of one scenario; ``coverage`` is that of the interval of the step time."""

    name: str
    num_experiments: int
    words: dict[str, float]
    coverage: float
    pair_sd: float
    failed: dict[str, float]

    def share(self, *words: VerdictWord) -> float:
        return sum(self.words.get(word.value, 0.0) for word in words)


def simulate(scenario: Scenario, num_experiments: int) -> Outcome:
    """Judge so many experiments of one scenario."""
    source = random.Random(f"{SEED} {scenario.name}")
    judgements = [judge_one(scenario, source) for _ in range(num_experiments)]
    true_ratio = scenario.true_ratio
    effects = [judgement.effects[0] for judgement in judgements]
    covered = sum((effect.low or 0.0) <= true_ratio <= (effect.high or 0.0) for effect in effects)
    gates = itertools.chain.from_iterable(judgement.gates for judgement in judgements)
    failed = [gate.name for gate in gates if gate.status == "failed"]
    return Outcome(
        name=scenario.name,
        num_experiments=num_experiments,
        words=_shares(Counter(judgement.verdict.word.value for judgement in judgements), num_experiments),
        coverage=covered / num_experiments,
        pair_sd=math.sqrt(math.fsum((effect.sd_log or 0.0) ** 2 for effect in effects) / num_experiments),
        failed=_shares(Counter(failed), num_experiments),
    )


def _shares(counts: Counter[str], total: int) -> dict[str, float]:
    return {name: number / total for name, number in sorted(counts.items())}


def judge_one(scenario: Scenario, source: random.Random) -> Judgement:
    """One experiment: trials in the planned order, then everything the package does with their series."""
    measure = scenario.measure
    planned = list(order_trials(measure, has_enabled=True))
    trials = list(_run_trials(scenario, planned, source))
    names = dict.fromkeys(trial.pair for trial in planned)
    pairs = [_make_pair(name, planned, trials) for name in names]
    named = {trial.name: trial for trial in trials}
    return judge(Evidence(measure=measure, lane=scenario.lane, pairs=pairs, trials=named, differences=()))


def _make_pair(name: str, planned: Sequence[Trial], trials: Sequence[TrialResult]) -> PairResult:
    one, two = (trial for trial in trials if trial.pair == name)
    first, second = (two, one) if one.variant == "enabled" else (one, two)
    return PairResult(
        pair=name,
        is_control=any(trial.is_control for trial in planned if trial.pair == name),
        control_reason="",
        status=PairStatus.SCORED,
        reason="",
        first=first.name,
        second=second.name,
        order=f"{one.variant}, {two.variant}",
        metrics=pair_metrics(first, second),
    )


def _run_trials(scenario: Scenario, planned: Sequence[Trial], source: random.Random) -> Iterator[TrialResult]:
    noise, measure = scenario.noise, scenario.measure
    num_steps = measure.warmup_steps + measure.scored_steps
    pace, shared = 0.0, {}
    same = Scenario(name="equal variants", lane=scenario.lane, noise=noise)
    for trial in planned:
        rewards_and_lengths = [
            (source.gauss(0, noise.reward_shared_sd), source.gauss(0, noise.length_shared_sd)) for _ in range(num_steps)
        ]
        shared[trial.pair] = rewards_and_lengths
    for trial in planned:
        pace += source.gauss(0.0, noise.walk_sd)
        begin = pace + noise.linear_drift * trial.index / len(planned)
        truth = scenario if trial.variant == "enabled" else same
        series = _make_series(truth, shared[trial.pair], source)
        slope = noise.linear_drift / len(planned) / num_steps
        series["step_time_s"] = [
            value * math.exp(begin + slope * step) for step, value in enumerate(series["step_time_s"])
        ]
        yield _make_trial(trial, series, measure)


def _make_series(
    truth: Scenario, shared: Sequence[tuple[float, float]], source: random.Random
) -> dict[str, list[float]]:
    noise, gauss = truth.noise, source.gauss
    reward = ORDINARY_REWARD + truth.reward_change + gauss(0, noise.reward_trial_sd)
    length = math.log(RESPONSE_LENGTH * truth.length_ratio) + gauss(0, noise.length_trial_sd)
    abs_diff = math.log(ABS_DIFF * truth.abs_diff_ratio) + gauss(0, noise.abs_diff_trial_sd)
    memory = MEMORY_BYTES * truth.memory_ratio
    lengths = [math.exp(length + common + gauss(0, noise.length_step_sd)) for _, common in shared]
    return {
        "step_time_s": _make_step_times(truth, lengths, source),
        "raw_reward": [reward + 0.002 * i + item[0] + gauss(0, noise.reward_step_sd) for i, item in enumerate(shared)],
        "response_length_mean": lengths,
        "train_rollout_logprob_abs_diff": [math.exp(abs_diff + gauss(0, noise.abs_diff_step_sd)) for _ in shared],
        "peak_memory_bytes": [memory * math.exp(gauss(0, noise.memory_sd))] * len(shared),
    }


def _make_step_times(truth: Scenario, lengths: Sequence[float], source: random.Random) -> list[float]:
    noise = truth.noise
    level = math.log(STEP_TIME_S) - math.log1p(truth.gain) + source.gauss(0.0, noise.trial_sd)
    innovation = noise.step_sd * math.sqrt(1 - noise.step_correlation**2)
    correlated, values = source.gauss(0.0, noise.step_sd), []
    for step, length in enumerate(lengths):
        value = level + correlated + noise.warmup_size * math.exp(-1.5 * step)
        if truth.lane == "live":
            value += 0.5 * math.log(length / RESPONSE_LENGTH)
        is_slow = source.random() < noise.outlier_chance + truth.stall_chance
        values.append(math.exp(value) * (source.uniform(5, 10) if is_slow else 1.0))
        correlated = noise.step_correlation * correlated + source.gauss(0.0, innovation)
    return values


def _make_trial(trial: Trial, series: dict[str, list[float]], measure: Measure) -> TrialResult:
    begin, end = measure.warmup_steps, measure.warmup_steps + measure.scored_steps
    found = (summarise(metric, values[begin:end]) for metric, values in series.items())
    return TrialResult(
        index=trial.index,
        name=trial.name,
        pair=trial.pair,
        variant=trial.variant,
        seed=trial.seed,
        status=TrialStatus.OK,
        reason="",
        duration_s=None,
        num_steps_found=end,
        num_steps_expected=end,
        proof=ProofStatus.PROVED if trial.variant == "enabled" else ProofStatus.NOT_REQUESTED,
        proof_reason="",
        decisions=(),
        series=(),
        summaries=tuple(summary for summary in found if summary is not None),
        rejects={},
        throttled_fraction=None,
    )


def find_misses(outcomes: Sequence[Outcome]) -> list[str]:
    """The bars that a set of outcomes misses, in words."""
    misses = []
    for item in outcomes:
        bars = [(" or ".join(words), item.share(*words), low, high) for words, low, high in BARS.get(item.name, ())]
        if item.name in COVERING:
            bars.append(("coverage", item.coverage, 0.93, 0.97))
        misses += list_missed(item.name, bars)
    return misses


def list_missed(name: str, bars: Iterable[tuple[str, float, float, float]]) -> list[str]:
    return [
        f"{name}: {what} is {value:.4f}, expected {low} to {high}"
        for what, value, low, high in bars
        if not low <= value <= high
    ]


def render_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, shares in percent."""
    columns = [word.value for word in VerdictWord if word is not VerdictWord.NO_COMPARISON]
    lines = [
        f"| scenario | n | {' | '.join(columns)} | coverage | pair sd |",
        f"|---|{'---:|' * (len(columns) + 3)}",
    ]
    for item in outcomes:
        shares = " | ".join(f"{100 * item.words.get(word, 0.0):.1f}" for word in columns)
        rest = f"{100 * item.coverage:.1f} | {100 * item.pair_sd:.2f}"
        lines.append(f"| {item.name} | {item.num_experiments} | {shares} | {rest} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    outcomes = [simulate(item, NUM_EXPERIMENTS if item.name in BARS else NUM_EXPERIMENTS // 4) for item in SCENARIOS]
    misses = find_misses(outcomes)
    sys.stdout.write(render_table(outcomes) + "".join(f"missed: {miss}\n" for miss in misses))
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
