"""Simulated experiments through the real functions: how often is a verdict wrong, and how often is there none?

    python -m benchmarks.verdicts --out benchmarks/verdicts.json --plot docs/images/power.svg

Every experiment makes step series with drift, correlation, warm-up and outliers, in the planned order, and has them
summarised, paired and judged by the package.  Fixed seeds and the standard library's generator.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from rlk_repro.analysis.gates import Evidence
from rlk_repro.analysis.verdict import Judgement, judge
from rlk_repro.base.files import write_json, write_text
from rlk_repro.plan import Trial, order_trials
from rlk_repro.rundir.results import PairResult, PairStatus, ProofStatus, TrialResult, TrialStatus, VerdictWord
from rlk_repro.spec import Lane, Margins, Measure, Run
from rlk_repro.statistics.power import MIN_PAIRS, STEP_AND_TRIAL_SD, Design, smallest_effect
from rlk_repro.statistics.stats import pair_metrics, summarise

SEED: Final = 20261120
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
class Truth:
    """What enabled really does: with a ``gain`` of 0.05 baseline takes 5 % longer; ``stall_chance`` adds slow steps."""

    gain: float = 0.0
    reward_change: float = 0.0
    length_ratio: float = 1.0
    abs_diff_ratio: float = 1.0
    memory_ratio: float = 1.0
    stall_chance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of experiment.  The figures of a barred one must keep the bars of ``find_misses``."""

    name: str
    lane: Lane = "fixed-rollout"
    pairs: int = 6
    control_pairs: int = 0
    scored_steps: int = 20
    reward_margin: float = 0.01
    is_barred: bool = False
    noise: Noise = Noise()
    truth: Truth = Truth()

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
        through_length = math.sqrt(self.truth.length_ratio) if self.lane == "live" else 1.0
        return through_length / (1 + self.truth.gain)


NOISY: Final = Noise(
    reward_trial_sd=0.05, length_trial_sd=0.08, abs_diff_trial_sd=0.3, memory_sd=0.08, trial_sd=0.05, step_sd=0.05
)
QUIET: Final = Noise(linear_drift=0.005, walk_sd=0.0005, trial_sd=0.0028, step_sd=0.005)
_SPELLINGS: Final = {
    "abs diff 1.5 times": "log-prob difference 1.5 times as large",
    "quiet": "little noise",
    "strong walk (2 % a trial)": "random walk of 2 % between trials",
    "very noisy": "much noise",
}
GAIN: Final = Truth(gain=0.05)
SCENARIOS: Final = (
    Scenario(name="A/A, live", lane="live", is_barred=True),
    Scenario(name="A/A, stored rollouts", is_barred=True),
    Scenario(name="A/A, 6 control pairs", control_pairs=6, is_barred=True),
    Scenario(name="A/A, steep drift (10 %)", noise=Noise(linear_drift=0.10)),
    Scenario(name="A/A, strong walk (2 % a trial)", noise=Noise(walk_sd=0.02)),
    Scenario(name="A/A, 5 pairs", pairs=5),
    Scenario(name="A/A, live, very noisy", lane="live", scored_steps=5, noise=NOISY),
    Scenario(name="A/A, quiet (pair sd 0.5 %)", noise=QUIET),
    Scenario(name="1.2 % faster, quiet (pair sd 0.5 %)", is_barred=True, noise=QUIET, truth=Truth(gain=0.012)),
    Scenario(name="5 % faster, stored rollouts", truth=GAIN, is_barred=True),
    Scenario(name="5 % faster, steep drift (10 %)", truth=GAIN, noise=Noise(linear_drift=0.10)),
    Scenario(name="5 % faster, 2 control pairs", truth=GAIN, control_pairs=2),
    Scenario(name="5 % faster, 6 control pairs", truth=GAIN, control_pairs=6),
    Scenario(name="5 % faster, live", lane="live", truth=GAIN),
    Scenario(name="5 % faster, live, reward margin 0.03", lane="live", truth=GAIN, reward_margin=0.03),
    Scenario(name="5 % faster, live, 12 pairs", lane="live", truth=GAIN, pairs=12),
    Scenario(name="5 % faster, live, 12 pairs of 80 steps", lane="live", truth=GAIN, pairs=12, scored_steps=80),
    Scenario(name="5 % slower, stored rollouts", truth=Truth(gain=1 / 1.05 - 1)),
    Scenario(name="5 % faster, stalls in 5 % of steps", truth=Truth(gain=0.05, stall_chance=0.05)),
    Scenario(
        name="5 % faster, reward 0.05 lower", lane="live", truth=Truth(gain=0.05, reward_change=-0.05), is_barred=True
    ),
    Scenario(name="5 % faster, reward 0.03 lower", lane="live", truth=Truth(gain=0.05, reward_change=-0.03)),
    Scenario(name="5 % faster, reward 0.01 lower", lane="live", truth=Truth(gain=0.05, reward_change=-0.01)),
    Scenario(name="5 % faster, abs diff 1.5 times", truth=Truth(gain=0.05, abs_diff_ratio=1.5)),
    Scenario(name="5 % faster, memory 5 % higher", truth=Truth(gain=0.05, memory_ratio=1.05)),
    Scenario(name="5 % faster, responses 6 % shorter", lane="live", truth=Truth(gain=0.05, length_ratio=0.94)),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Shares over the experiments of one scenario; ``coverage`` is that of the interval of the step time."""

    name: str
    num_experiments: int
    words: dict[str, float]
    coverage: float
    pair_sd: float
    undecided: dict[str, float]
    failed: dict[str, float]

    def share(self, *words: VerdictWord) -> float:
        return sum(self.words.get(word.value, 0.0) for word in words)


def simulate(scenario: Scenario, num_experiments: int, seed: int = SEED) -> Outcome:
    """Judge so many experiments of one scenario."""
    source = random.Random(f"{seed} {scenario.name}")
    judgements = [judge_one(scenario, source) for _ in range(num_experiments)]
    truth = scenario.true_ratio
    effects = [judgement.effects[0] for judgement in judgements]
    covered = sum((effect.low or 0.0) <= truth <= (effect.high or 0.0) for effect in effects)
    return Outcome(
        name=scenario.name,
        num_experiments=num_experiments,
        words=_shares(Counter(judgement.verdict.word.value for judgement in judgements), num_experiments),
        coverage=covered / num_experiments,
        pair_sd=math.sqrt(math.fsum((effect.sd_log or 0.0) ** 2 for effect in effects) / num_experiments),
        undecided=_shares(_count_gates(judgements, "undecided"), num_experiments),
        failed=_shares(_count_gates(judgements, "failed"), num_experiments),
    )


def _count_gates(judgements: Sequence[Judgement], status: str) -> Counter[str]:
    return Counter(gate.name for judgement in judgements for gate in judgement.gates if gate.status == status)


def _shares(counts: Counter[str], total: int) -> dict[str, float]:
    return {name: number / total for name, number in sorted(counts.items())}


def judge_one(scenario: Scenario, source: random.Random) -> Judgement:
    """One experiment: trials in the planned order, then everything the package does with their series."""
    measure = scenario.measure
    planned = list(order_trials(cast("Run", SimpleNamespace(measure=measure)), has_enabled=True))
    trials = list(_run_trials(scenario, planned, source))
    pairs = [_make_pair(name, planned, trials) for name in dict.fromkeys(trial.pair for trial in planned)]
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
    pace, shared = 0.0, {trial.pair: _shared_noise(noise, num_steps, source) for trial in planned}
    for trial in planned:
        pace += source.gauss(0.0, noise.walk_sd)
        begin = pace + noise.linear_drift * trial.index / len(planned)
        truth = scenario.truth if trial.variant == "enabled" else Truth()
        series = _make_series(scenario, truth, shared[trial.pair], source)
        slope = noise.linear_drift / len(planned) / num_steps
        series["step_time_s"] = [
            value * math.exp(begin + slope * step) for step, value in enumerate(series["step_time_s"])
        ]
        yield _make_trial(trial, series, measure)


def _shared_noise(noise: Noise, num_steps: int, source: random.Random) -> list[tuple[float, float]]:
    return [
        (source.gauss(0, noise.reward_shared_sd), source.gauss(0, noise.length_shared_sd)) for _ in range(num_steps)
    ]


def _make_series(
    scenario: Scenario, truth: Truth, shared: Sequence[tuple[float, float]], source: random.Random
) -> dict[str, list[float]]:
    noise, gauss = scenario.noise, source.gauss
    reward = ORDINARY_REWARD + truth.reward_change + gauss(0, noise.reward_trial_sd)
    length = math.log(RESPONSE_LENGTH * truth.length_ratio) + gauss(0, noise.length_trial_sd)
    abs_diff = math.log(ABS_DIFF * truth.abs_diff_ratio) + gauss(0, noise.abs_diff_trial_sd)
    memory = MEMORY_BYTES * truth.memory_ratio
    lengths = [math.exp(length + common + gauss(0, noise.length_step_sd)) for _, common in shared]
    return {
        "step_time_s": _make_step_times(scenario, truth, lengths, source),
        "raw_reward": [reward + 0.002 * i + item[0] + gauss(0, noise.reward_step_sd) for i, item in enumerate(shared)],
        "response_length_mean": lengths,
        "train_rollout_logprob_abs_diff": [math.exp(abs_diff + gauss(0, noise.abs_diff_step_sd)) for _ in shared],
        "peak_memory_bytes": [memory * math.exp(gauss(0, noise.memory_sd))] * len(shared),
    }


def _make_step_times(scenario: Scenario, truth: Truth, lengths: Sequence[float], source: random.Random) -> list[float]:
    noise = scenario.noise
    level = math.log(STEP_TIME_S) - math.log1p(truth.gain) + source.gauss(0.0, noise.trial_sd)
    innovation = noise.step_sd * math.sqrt(1 - noise.step_correlation**2)
    correlated, values = source.gauss(0.0, noise.step_sd), []
    for step, length in enumerate(lengths):
        value = level + correlated + noise.warmup_size * math.exp(-1.5 * step)
        if scenario.lane == "live":
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
    """The bars that a set of outcomes misses, in words; scenarios that are absent are not held against it."""
    named = {outcome.name: outcome for outcome in outcomes}
    a_a = ("A/A, live", "A/A, stored rollouts", "A/A, 6 control pairs")
    faster, slower, equivalent = VerdictWord.FASTER, VerdictWord.SLOWER, VerdictWord.EQUIVALENT
    bars: list[tuple[str, tuple[VerdictWord, ...], float, float]] = [
        *((name, (faster, slower), 0.0, 0.05) for name in a_a),
        *((name, (VerdictWord.NOT_COMPARABLE,), 0.0, 0.02) for name in a_a),
        ("1.2 % faster, quiet (pair sd 0.5 %)", (equivalent,), 0.0, 0.05),
        ("5 % faster, stored rollouts", (faster,), 0.9, 1.0),
        ("5 % faster, reward 0.05 lower", (VerdictWord.NOT_COMPARABLE,), 0.9, 1.0),
    ]
    found = [(name, " or ".join(words), named[name].share(*words), low, high)
             for name, words, low, high in bars if name in named]  # fmt: skip
    covering = (*a_a, "5 % faster, stored rollouts")
    found += [(name, "coverage", named[name].coverage, 0.93, 0.97) for name in covering if name in named]
    return [
        f"{name}: {what} is {value:.4f}, expected {low} to {high}"
        for name, what, value, low, high in found
        if not low <= value <= high
    ]


def spell_out(name: str) -> str:
    """Return a scenario's name as the tables show it.  The name itself seeds the simulation, so it does not change."""
    for short, full in _SPELLINGS.items():
        name = name.replace(short, full)
    return name


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
        lines.append(f"| {spell_out(item.name)} | {item.num_experiments} | {shares} | {rest} |")
    return "\n".join(lines) + "\n"


def render_power_table() -> str:
    """Markdown: the smallest speed-up called ``faster`` in 9 of 10 experiments, by pairs, spread and control pairs."""
    spreads, lines = (0.5, 1.0, 2.0, 4.0), ["| pairs | control pairs | sd 0.5 % | 1 % | 2 % | 4 % |", f"|{'---:|' * 6}"]
    for pairs, controls in ((6, 0), (8, 0), (12, 0), (20, 0), (40, 0), (6, 2), (6, 6), (12, 12)):
        effects = [smallest_effect(pairs, sd, 1.0, 0.05, num_control_pairs=controls) or math.nan for sd in spreads]
        lines.append(f"| {pairs} | {controls} | {' | '.join(f'{100 * effect:.1f} %' for effect in effects)} |")
    return "\n".join(lines) + "\n"


def power_of(
    effect: float,
    *,
    num_pairs: int,
    pair_sd_pct: float,
    smallest_effect_pct: float,
    alpha: float,
    num_control_pairs: int = 0,
) -> float:
    """Return the chance of the verdict ``faster`` for a true speed-up of ``effect`` (a fraction), if all gates pass."""
    if num_pairs < MIN_PAIRS:
        return 0.0
    design = Design(num_pairs, pair_sd_pct / 100, smallest_effect_pct / 100, alpha, num_control_pairs)
    return design.power(math.log1p(effect))


def plot_power(path: Path) -> None:
    """The chance of ``faster`` over the true gain per number of pairs; pair sd 2 %, smallest effect 1 %."""
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "power", "svg.fonttype": "none"})
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="true speed-up, %", ylabel="chance of the verdict 'faster'", ylim=(0, 1.02))
    gains = [step / 4 for step in range(41)]
    for num_pairs in (6, 8, 12, 20, 40):
        chances = [
            power_of(gain / 100, num_pairs=num_pairs, pair_sd_pct=2.0, smallest_effect_pct=1.0, alpha=0.05)
            for gain in gains
        ]
        axes.plot(gains, chances, label=f"{num_pairs} pairs")
    axes.axhline(0.9, color="0.7", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 10)
    axes.legend(frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    write_text(path, "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n")


def to_json(outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    return {"schema": 1, "seed": seed, "outcomes": [vars(item) for item in outcomes], "misses": find_misses(outcomes)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate experiments and judge them.")
    parser.add_argument(
        "--experiments", type=int, default=2000, help="per scenario with a bar; a quarter of it for the others"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, help="write the outcomes as JSON")
    parser.add_argument("--plot", type=Path, help="draw the power curve")
    options = parser.parse_args(argv)
    begin_s = time.monotonic()
    outcomes = [simulate(item, options.experiments // (1 if item.is_barred else 4), options.seed) for item in SCENARIOS]
    if options.out:
        write_json(options.out, to_json(outcomes, options.seed))
    if options.plot:
        plot_power(options.plot)
    misses = find_misses(outcomes)
    sys.stdout.write(f"{render_table(outcomes)}\n{render_power_table()}\n")
    sys.stdout.write("".join(f"missed: {miss}\n" for miss in misses))
    sys.stdout.write(f"{time.monotonic() - begin_s:.0f} s\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
