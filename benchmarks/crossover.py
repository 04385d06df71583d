"""Simulated runs of the crossover design under rules 1 through the real functions: how often is a verdict wrong?

    python -m benchmarks.crossover --out benchmarks/crossover.json

Step times have drift in minutes (waves of 3 to 20 minutes), noise of single steps and stalls, as measured in
docs/evidence; sessions differ by a spread of their own.  Fixed seeds and the standard library's generator.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.verdicts import make_result, spell_out
from rlk_repro.analysis.gates import Evidence
from rlk_repro.analysis.sessions import Session, compare_sessions, make_session
from rlk_repro.analysis.shadows import CASES
from rlk_repro.analysis.verdict import Judgement, judge
from rlk_repro.base.files import write_json
from rlk_repro.plan import Trial
from rlk_repro.rundir.results import ProofStatus, Series, ShadowResult, TrialResult, VerdictWord
from rlk_repro.schedule import Schedule, make_schedule
from rlk_repro.spec import Lane, Measure
from rlk_repro.statistics.power import smallest_effect

SEED: Final = 20261123
STEP_TIME_S: Final = 5.0
TOKENS: Final = 2e5
WAVES_S: Final = (180.0, 480.0, 1200.0)
STARTUP_S: Final = 45.0
"""Of one trial or session of whole vime on an H200, before its first step (docs/vime-workload.md)."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of run.  Standard deviations are of log step times; ``between`` is in units of the within-session error.

    ``drift`` is the size of each wave; with a ``gain`` of 0.05 baseline takes 5 % longer.  ``carry_over`` slows each
    first step of an enabled period.  ``runs`` multiplies the number of simulated runs.  ``stall`` makes one scored step
    of one session five times as long, and ``stalls`` that share of all steps.
    """

    name: str
    gain: float = 0.0
    step_sd: float = 0.005
    drift: float = 0.05
    between: float = 0.0
    carry_over: float = 0.0
    stall: bool = False
    stalls: float = 0.0
    token_sd: float = 0.0
    lane: Lane = "train-only"
    sessions: int = 4
    blocks: int = 8
    control_blocks: int = 2
    runs: float = 1.0
    bars: tuple[tuple[str, float, float], ...] = ()

    @property
    def measure(self) -> Measure:
        return Measure(
            design="crossover",
            sessions=self.sessions,
            blocks=self.blocks,
            control_blocks=self.control_blocks,
        )

    @property
    def between_sd(self) -> float:
        """A block's effect is a difference of means of two steps each: its sd is that of a step."""
        return self.between * self.step_sd / math.sqrt(self.blocks)


EDGE: Final = (("faster", 0.0, 0.025),)
FALSE: Final = (("false", 0.0, 0.01), ("coverage", 0.93, 1.0))
SEEN: Final = (("faster", 0.9, 1.0), ("coverage", 0.93, 1.0))
SCENARIOS: Final = (
    *(Scenario(name=f"A/A, sessions spread {n} ×", between=n, bars=FALSE) for n in (0, 1, 3)),
    *(Scenario(name=f"A/A, steps 4 %, sessions spread {n} ×", step_sd=0.04, between=n, bars=FALSE) for n in (0, 1, 3)),
    Scenario(name="A/A, steps 12 %", step_sd=0.12, bars=FALSE),
    Scenario(name="A/A, stalls in 1 % of steps", stalls=0.01, bars=FALSE),
    Scenario(name="A/A, live, tokens 5 %", lane="live", token_sd=0.05, bars=FALSE),
    *(Scenario(name=f"gain of exactly 1 %, sessions spread {n} ×", gain=0.01, between=n, runs=10, bars=EDGE)
      for n in (0, 1, 3)),
    *(Scenario(name=f"gain of exactly 1 %, steps {pct} %", gain=0.01, step_sd=pct / 100, bars=EDGE) for pct in (4, 12)),
    Scenario(name="gain 2 %", gain=0.02, bars=SEEN),
    Scenario(name="gain 2 %, one stall of 5 ×", gain=0.02, stall=True, bars=SEEN),
    Scenario(name="gain 2 %, stalls in 1 % of steps", gain=0.02, stalls=0.01),
    Scenario(name="gain 2 %, live, tokens 5 %", gain=0.02, lane="live", token_sd=0.05, bars=SEEN),
    Scenario(
        name="gain 2 %, steps 4 %, 8 sessions of 40 blocks",
        gain=0.02, step_sd=0.04, sessions=8, blocks=40, control_blocks=32, runs=0.2, bars=SEEN,
    ),
    Scenario(name="gain 5 %, steps 4 %, 6 sessions of 12 blocks", gain=0.05, step_sd=0.04, sessions=6, blocks=12,
             control_blocks=12),
    Scenario(name="loss 2 %", gain=1 / 1.02 - 1, bars=(("slower", 0.9, 1.0),)),
    Scenario(name="carry-over of 1 % in first steps", carry_over=0.01, bars=FALSE),
    Scenario(name="carry-over of -3 % in first steps", carry_over=-0.03, bars=FALSE),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Shares over the runs of one scenario; ``half_width`` is the median of the interval's, as a fraction."""

    name: str
    num_runs: int
    words: dict[str, float]
    coverage: float
    half_width: float
    session_sd: float
    undecided: dict[str, float]

    def share(self, what: str) -> float:
        if what == "coverage":
            return self.coverage
        if what == "false":
            return self.words.get("faster", 0.0) + self.words.get("slower", 0.0)
        return self.words.get(what, 0.0)


def simulate(scenario: Scenario, num_runs: int, seed: int = SEED) -> Outcome:
    """Judge so many runs of one scenario."""
    source = random.Random(f"{seed} {scenario.name}")
    judgements = [judge_one(scenario, source) for _ in range(num_runs)]
    effects = [judgement.effects[0] for judgement in judgements]
    truth = 1 / (1 + scenario.gain)
    words = Counter(judgement.verdict.word.value for judgement in judgements)
    undecided = Counter(gate.name for item in judgements for gate in item.gates if gate.status == "undecided")
    return Outcome(
        name=scenario.name,
        num_runs=num_runs,
        words={word: number / num_runs for word, number in sorted(words.items())},
        coverage=sum((item.low or 0.0) <= truth <= (item.high or 0.0) for item in effects) / num_runs,
        half_width=statistics.median(math.log((item.high or 1.0) / (item.low or 1.0)) / 2 for item in effects),
        session_sd=statistics.median(item.sd_log or 0.0 for item in effects),
        undecided={name: number / num_runs for name, number in sorted(undecided.items())},
    )


def judge_one(scenario: Scenario, source: random.Random) -> Judgement:
    """One run: the sessions as planned, then everything the package does with their series."""
    stalled = source.randrange(scenario.sessions) if scenario.stall else -1
    sessions = [_run_session(scenario, number, source, has_stall=number == stalled)
                for number in range(scenario.sessions)]  # fmt: skip
    pairs, blocks = compare_sessions(sessions)
    evidence = Evidence(
        measure=scenario.measure,
        lane=scenario.lane,
        pairs=pairs,
        trials={arm.name: arm for session in sessions for arm in session.arms},
        differences=(),
        blocks=blocks,
        shadows=[
            ShadowResult(
                session=pair.pair,
                case=case,
                num_ranks=1,
                error="",
                log_prob_max=0.0,
                log_prob_mean=0.0,
                gradient_share=0.0,
            )
            for pair in pairs
            for case in CASES
        ],
    )
    return judge(evidence)


def _run_session(scenario: Scenario, number: int, source: random.Random, *, has_stall: bool) -> Session:
    seed = source.randrange(2**31)
    schedule = make_schedule(scenario.measure, seed)
    trial = Trial(index=number, pair=f"s{number + 1}", variant="crossover", is_control=False, seed=seed)
    gain = math.log1p(scenario.gain) + source.gauss(0.0, scenario.between_sd)
    tokens = [TOKENS * math.exp(source.gauss(0.0, scenario.token_sd)) for _ in schedule.rollouts]
    times = list(_make_times(scenario, schedule, gain, tokens, source))
    if has_stall:
        scored = [step for step, rollout in enumerate(schedule.rollouts) if rollout.is_scored]
        times[source.choice(scored)] *= 5
    return make_session(trial, make_whole(trial, times, tokens), schedule, {}, lane=scenario.lane)


def _make_times(
    scenario: Scenario, schedule: Schedule, gain: float, tokens: Sequence[float], source: random.Random
) -> Iterator[float]:
    phases = [source.uniform(0.0, 2 * math.pi) for _ in WAVES_S]
    for step, (rollout, number) in enumerate(zip(schedule.rollouts, tokens, strict=True)):
        turns = (step * STEP_TIME_S / wave_s for wave_s in WAVES_S)
        pace = math.fsum(math.sin(2 * math.pi * turn + phase) for turn, phase in zip(turns, phases, strict=True))
        value = scenario.drift * pace + source.gauss(0.0, scenario.step_sd) + 0.5 * math.log(number / TOKENS)
        if rollout.variant == "enabled":
            value -= gain - (0.0 if rollout.is_scored else scenario.carry_over)
        if source.random() < scenario.stalls:
            value += math.log(5)
        yield STEP_TIME_S * math.exp(value)


def make_whole(trial: Trial, times: Sequence[float], tokens: Sequence[float]) -> TrialResult:
    series = {
        "step_time_s": times,
        "actor_train_time_s": times,
        "train_tokens_per_s": [number / value for number, value in zip(tokens, times, strict=True)],
        "train_rollout_logprob_abs_diff": [0.01] * len(times),
        "peak_memory_bytes": [6e10] * len(times),
        "raw_reward": [0.5 + 0.01 * (step % 3) for step in range(len(times))],
        "grad_norm": [1.0] * len(times),
    }
    shown = tuple(
        Series(metric=name, source="", values=tuple(values), lines=(None,) * len(values))
        for name, values in series.items()
    )
    return replace(make_result(trial, ProofStatus.PROVED, len(times)), series=shown)


def find_misses(outcomes: Sequence[Outcome]) -> list[str]:
    """The bars that a set of outcomes misses, in words; scenarios that are absent are not held against it."""
    named = {outcome.name: outcome for outcome in outcomes}
    return [
        f"{item.name}: {what} is {named[item.name].share(what):.4f}, expected {low} to {high}"
        for item in SCENARIOS
        for what, low, high in item.bars
        if item.name in named and not low <= named[item.name].share(what) <= high
    ]


def render_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown, shares in percent."""
    columns = [word.value for word in VerdictWord if word is not VerdictWord.NO_COMPARISON]
    lines = [
        f"| scenario | n | {' | '.join(columns)} | coverage | half width |",
        f"|---|{'---:|' * (len(columns) + 3)}",
    ]
    for item in outcomes:
        shares = " | ".join(f"{100 * item.words.get(word, 0.0):.1f}" for word in columns)
        lines.append(f"| {spell_out(item.name)} | {item.num_runs} | {shares} | {100 * item.coverage:.1f} | "
                     f"{100 * item.half_width:.2f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def compare_costs() -> list[tuple[str, float, float]]:
    """(noise, GPU-hours of the crossover, of parallel) for a gain of 2 % called ``faster`` 9 times in 10.

    One GPU; a trial has 2 + 10 steps of 5 s after its start.  Pairs spread by the drift between processes that the
    whole-vime bundles show, 15 % (docs/evidence); the crossover's sessions are as planned in ``SCENARIOS``.
    """
    trial_s = STARTUP_S + 12 * STEP_TIME_S
    pairs = next(n for n in range(100, 100_000, 100)
                 if (smallest_effect(n, 15.0, 1.0, 0.05) or 1.0) <= 0.02)  # fmt: skip
    rows = []
    for name in ("gain 2 %", "gain 2 %, steps 4 %, 8 sessions of 40 blocks"):
        scenario = next(item for item in SCENARIOS if item.name == name)
        session_s = STARTUP_S + scenario.measure.num_steps * STEP_TIME_S
        rows.append((name, scenario.sessions * session_s / 3600, 2 * pairs * trial_s / 3600))
    return rows


def to_json(outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    costs = [{"name": name, "crossover_gpu_hours": ours, "parallel_gpu_hours": theirs}
             for name, ours, theirs in compare_costs()]  # fmt: skip
    return {
        "schema": 1,
        "seed": seed,
        "outcomes": [vars(item) for item in outcomes],
        "costs": costs,
        "misses": find_misses(outcomes),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate runs of the crossover design and judge them.")
    parser.add_argument("--runs", type=int, default=2000, help="per scenario")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, help="write the outcomes as JSON")
    options = parser.parse_args(argv)
    begin_s = time.monotonic()
    outcomes = [simulate(item, round(options.runs * item.runs), options.seed)
                for item in SCENARIOS]  # fmt: skip
    if options.out:
        write_json(options.out, to_json(outcomes, options.seed))
    misses = find_misses(outcomes)
    sys.stdout.write(render_table(outcomes))
    sys.stdout.write("".join(f"{name}: {ours:.1f} GPU-hours, parallel {theirs:.0f}\n"
                             for name, ours, theirs in compare_costs()))  # fmt: skip
    sys.stdout.write("".join(f"missed: {miss}\n" for miss in misses))
    sys.stdout.write(f"{time.monotonic() - begin_s:.0f} s\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
