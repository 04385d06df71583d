"""Simulate the rules of the crossover design with NumPy: 20,000 runs for each case of noise.

    python -m benchmarks.rules          # the table of docs/statistics.md

The formulas are those of the package, vectorised; ``tests/analysis/test_simulated_rules.py`` holds them equal.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from rlk_repro.schedule import ORDERS, Schedule, make_schedule
from rlk_repro.spec import Measure
from rlk_repro.statistics.crossover import SD_PER_MAD

SEED: Final = 20261129
NUM_RUNS: Final = 20_000
CHUNK: Final = 2_000
NUM_SCHEDULES: Final = 64
SMALLEST: Final = 0.01
LARGER: Final = 0.015
ALPHA: Final = 0.05
FEWEST_NARROW: Final = 200
"""A share over fewer narrow intervals is too uncertain to hold against a bar."""

Array: TypeAlias = "npt.NDArray[np.float64]"
Picks: TypeAlias = "npt.NDArray[np.int64]"
"""The number of each run's schedule."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of noise; ``step_sd``, ``drift`` and ``after_switch`` are of log step times.

    ``between`` is the spread of session effects, as a multiple of the error that blocks give a session.  ``lost``
    blocks of the first session are void, all of one order with ``lost_order``.  ``after_switch`` shortens the first
    enabled step after each change of the variant.  With ``is_noisy``, sessions alone owe some of their power to luck.
    """

    name: str = ""
    sessions: int = 4
    blocks: int = 8
    period_steps: int = 2
    step_sd: float = 0.005
    between: float = 0.0
    tail: int = 0
    correlation: float = 0.0
    stalls: float = 0.0
    drift: str = ""
    lost: int = 0
    lost_order: str = ""
    after_switch: float = 0.0
    is_noisy: bool = False

    @property
    def measure(self) -> Measure:
        return Measure(design="crossover", rules=2, sessions=self.sessions, blocks=self.blocks,
                       period_steps=self.period_steps)  # fmt: skip


CASES: Final = (
    *(Case(name="normal noise", sessions=k, between=ratio) for k in (3, 4, 5, 6) for ratio in (0, 1, 2, 3)),
    *(Case(name=f"correlation {value} between steps", correlation=value) for value in (0.3, 0.6, 0.9)),
    Case(name="Student's t with 3 degrees of freedom", tail=3, is_noisy=True),
    Case(name="stalls in 1 % of steps", stalls=0.01),
    Case(name="stalls in 5 % of steps", stalls=0.05),
    *(Case(name=f"drift: {kind}", drift=kind, is_noisy=kind in {"waves", "random walk"})
      for kind in ("linear", "quadratic", "waves", "random walk")),
    Case(name="1 void block in a session", lost=1),
    Case(name="2 void blocks in a session", lost=2),
    Case(name="2 void blocks of one order in a session", lost=2, lost_order="ABBA"),
    Case(name="periods of one step", period_steps=1, blocks=10),
    *(Case(name=f"periods of one step, the first after a change {100 * size:g} % shorter", period_steps=1, blocks=10,
           between=ratio, after_switch=size) for size in (0.02, 0.05) for ratio in (0, 1)),
    Case(name="10 blocks, steps vary by 1.7 %", blocks=10, step_sd=0.017, is_noisy=True),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``errors`` are of the runs' log ratios; ``alone`` are half widths from sessions, which ``floors`` may widen.

    ``carried`` are the gaps (run, session) that the gate on carry-over judges; None without that gate.
    """

    case: Case
    errors: Array
    alone: Array
    floors: Array
    carried: Array | None = None

    @property
    def widths(self) -> Array:
        return np.maximum(self.alone, self.floors)

    @property
    def is_narrow(self) -> npt.NDArray[np.bool_]:
        return self.alone < self.floors / 2

    def pass_gate(self, gain: float) -> npt.NDArray[np.bool_]:
        """Tell in which runs the gate on carry-over passes."""
        if self.carried is None:
            return np.ones(len(self.errors), dtype=bool)
        number = self.carried.shape[1]
        reach = stats.t.ppf(1 - ALPHA, number - 1) * self.carried.std(axis=1, ddof=1) / math.sqrt(number)
        margin = np.maximum(math.log1p(SMALLEST), np.abs(self.errors - math.log1p(gain)) - self.alone)
        return np.asarray(np.abs(self.carried.mean(axis=1)) + reach <= margin)

    def find_coverage(self, widths: Array) -> tuple[float, float]:
        """Return the coverage of all intervals, and that of narrow ones, which is NaN if they are too few."""
        covers = np.abs(self.errors) <= widths
        narrow = covers[self.is_narrow]
        return float(np.mean(covers)), float(np.mean(narrow)) if len(narrow) >= FEWEST_NARROW else math.nan

    def find_faster(self, widths: Array, gain: float) -> float:
        """Return the share of runs whose interval lies wholly beyond the smallest effect, at a true gain."""
        is_beyond = self.errors - math.log1p(gain) + widths < -math.log1p(SMALLEST)
        return float(np.mean(is_beyond & self.pass_gate(gain)))

    def find_misses(self) -> list[str]:
        if self.case.after_switch:
            false = self.find_faster(self.widths, 0.0)
            return [f"{self.case.name}: {false:.5f} of runs without a gain are faster"] if false else []
        coverage, narrow = self.find_coverage(self.widths)
        lost = self.find_faster(self.alone, LARGER) - self.find_faster(self.widths, LARGER)
        bars = [("coverage", coverage, 0.94, 1.0), ("false faster", self.find_faster(self.widths, SMALLEST), 0, 0.028)]
        if not self.case.is_noisy:
            bars.append(("lost power", lost, 0, 0.005))
        if not self.case.between and not math.isnan(narrow):
            bars.append(("coverage of narrow intervals", narrow, 0.93, 1.0))
        name = f"{self.case.name}, {self.case.sessions} sessions"
        return [f"{name}: {what} is {value:.4f}, expected {low} to {high}"
                for what, value, low, high in bars if not low <= value <= high]  # fmt: skip


def hodges_lehmann(values: Array) -> Array:
    """Return the Hodges-Lehmann estimates over the last axis."""
    first, second = np.triu_indices(values.shape[-1])
    return np.asarray(np.median((values[..., first] + values[..., second]) / 2, axis=-1))


def simulate(case: Case, num_runs: int = NUM_RUNS, seed: int = SEED) -> Outcome:
    source = np.random.default_rng([seed, *case.name.encode(), case.sessions, round(10 * case.between)])
    schedules = [make_schedule(case.measure, number) for number in range(NUM_SCHEDULES)]
    parts = []
    for start in range(0, num_runs, CHUNK):
        effects, gaps = [], []
        for place in range(case.sessions):
            picks = source.integers(NUM_SCHEDULES, size=min(CHUNK, num_runs - start))
            times = draw_times(case, schedules, picks, source)
            effects.append(find_block_effects(Case() if place else case, schedules, times, picks, case.period_steps))
            gaps.append(find_gaps(schedules, times, picks))
        parts.append((*estimate(effects), np.stack(gaps, axis=1)))
    errors, alone, floors, carried = (np.concatenate(column) for column in zip(*parts, strict=True))
    has_gate = case.period_steps == 1
    return Outcome(case=case, errors=errors, alone=alone, floors=floors, carried=carried if has_gate else None)


def draw_times(case: Case, schedules: Sequence[Schedule], picks: Picks, source: np.random.Generator) -> Array:
    """Return log step times (run, step) of one session of each run, without an effect of the variant."""
    shape = len(picks), len(schedules[0].rollouts)
    noise = source.standard_t(case.tail, shape) if case.tail else source.normal(size=shape)
    for step in range(1, shape[1]) if case.correlation else ():
        noise[:, step] = case.correlation * noise[:, step - 1] + math.sqrt(1 - case.correlation**2) * noise[:, step]
    times = case.step_sd * noise + math.log(5) * (source.random(shape) < case.stalls)
    times += _draw_drift(case, shape, source)
    variants = np.array([[rollout.variant for rollout in schedule.rollouts] for schedule in schedules])
    enabled = (variants == "enabled").astype(float)[picks]
    spread = case.between * case.step_sd / math.sqrt(case.blocks)
    times += enabled * source.normal(scale=spread or 1e-300, size=(shape[0], 1))
    is_first = np.diff(enabled, axis=1, prepend=0.0) > 0
    return np.asarray(times - case.after_switch * is_first)


def _draw_drift(case: Case, shape: tuple[int, int], source: np.random.Generator) -> Array:
    steps = np.arange(shape[1])
    share = steps / shape[1]
    if case.drift == "linear":
        return np.broadcast_to(0.5 * share, shape)
    if case.drift == "quadratic":
        return np.broadcast_to(0.2 * (2 * share - 1) ** 2, shape)
    if case.drift == "waves":
        turns = np.multiply.outer(1 / np.array([180, 480, 1200]), 2 * math.pi * 5 * steps)[:, None]
        return np.asarray(0.05 * np.sin(turns + source.uniform(0, 2 * math.pi, size=(3, shape[0], 1))).sum(axis=0))
    if case.drift == "random walk":
        return np.cumsum(source.normal(scale=0.01, size=shape), axis=1)
    return np.zeros(shape)


def find_block_effects(
    case: Case, schedules: Sequence[Schedule], times: Array, picks: Picks, period_steps: int
) -> Array:
    """Return the effects (run, block) of the blocks that ``case`` leaves."""
    steps, signs = [], []
    for schedule in schedules:
        kept = list_kept(case, schedule)
        steps.append([schedule.steps_of_blocks[block][period_steps - 1 :: period_steps] for block in kept])
        signs.append([[0.5 if label == "B" else -0.5 for label in schedule.blocks[block].order] for block in kept])
    return np.asarray((_take(times, steps, picks) * np.array(signs)[picks]).sum(axis=-1))


def find_gaps(schedules: Sequence[Schedule], times: Array, picks: Picks) -> Array:
    """Return how the second step of a block differs from its third, in ABBA minus in BAAB, of each run."""
    sides = []
    for order in ORDERS:
        steps = []
        for schedule in schedules:
            blocks = [number for number in list_kept(Case(), schedule) if schedule.blocks[number].order == order]
            steps.append([schedule.steps_of_blocks[number][1:3] for number in blocks])
        fewest = min(map(len, steps))
        found = _take(times, [rows[:fewest] for rows in steps], picks)
        sides.append(hodges_lehmann(found[..., 0] - found[..., 1]))
    return np.asarray(sides[0] - sides[1])


def _take(times: Array, steps: Sequence[object], picks: Picks) -> Array:
    """Return each run's times at the ``steps`` of its schedule."""
    index = np.array(steps)[picks]
    return np.take_along_axis(times, index.reshape(len(picks), -1), axis=1).reshape(index.shape)


def list_kept(case: Case, schedule: Schedule) -> list[int]:
    """Return the comparing blocks that are not void."""
    blocks = [number for number, block in enumerate(schedule.blocks) if not block.is_control]
    wanted = [number for number in blocks if schedule.blocks[number].order == case.lost_order]
    lost = wanted[: case.lost] if case.lost_order else blocks[1 : 1 + case.lost]
    return [number for number in blocks if number not in lost]


def estimate(sessions: Sequence[Array]) -> tuple[Array, Array, Array]:
    """Return each run's log ratio, the half width from its sessions and the floor from its blocks."""
    effects = [hodges_lehmann(values) for values in sessions]
    together = np.stack(effects, axis=1)
    number, total = len(sessions), sum(values.shape[1] for values in sessions)
    residuals = [np.abs(values - effect[:, None]) for values, effect in zip(sessions, effects, strict=True)]
    spread = SD_PER_MAD * np.median(np.concatenate(residuals, axis=1), axis=1) * math.sqrt(total / (total - number))
    share = math.sqrt(sum(1 / values.shape[1] for values in sessions)) / number
    alone = stats.t.ppf(1 - ALPHA / 2, number - 1) * together.std(axis=1, ddof=1) / math.sqrt(number)
    return together.mean(axis=1), alone, stats.t.ppf(1 - ALPHA / 2, total - number) * spread * share


def render_table(outcomes: Sequence[Outcome]) -> str:
    """Return Markdown; in each column the sessions alone (rules 1) come first, then the rule with the floor."""
    lines = [
        "| noise | sessions | spread | coverage | narrow | coverage of narrow | false `faster` | `faster` at 1.5 % |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for item in outcomes:
        old, new = ([*item.find_coverage(widths), *(item.find_faster(widths, gain) for gain in (SMALLEST, LARGER))]
                    for widths in (item.alone, item.widths))  # fmt: skip
        shown = ["–" if math.isnan(one) else f"{100 * one:.1f} → {100 * other:.1f}"
                 for one, other in zip(old, new, strict=True)]  # fmt: skip
        shown.insert(1, f"{100 * np.mean(item.is_narrow):.1f}")
        row = [item.case.name, str(item.case.sessions), f"{item.case.between:g} ×", *shown]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate the rules of the crossover design.")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="per case")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(argv)
    outcomes = [simulate(case, options.runs, options.seed) for case in CASES]
    sys.stdout.write(render_table([outcome for outcome in outcomes if not outcome.case.after_switch]))
    for item in outcomes:
        if item.case.after_switch:
            without = replace(item, carried=None).find_faster(item.widths, 0.0)
            found = f"{100 * without:.1f} % of runs without the gate, {100 * item.find_faster(item.widths, 0.0):.3f} %"
            sys.stdout.write(f"{item.case.name}, spread {item.case.between:g} ×, no gain: faster in {found} with it\n")
    misses = [miss for outcome in outcomes for miss in outcome.find_misses()]
    sys.stdout.write("".join(f"missed: {miss}\n" for miss in misses))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
