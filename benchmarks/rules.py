"""Simulate the rules of the crossover design with NumPy: 20,000 runs for each case of noise.

    python -m benchmarks.rules          # the table of docs/statistics.md

Only the noise is made here: effects, intervals, floors and carry-over are those of the package.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from benchmarks.verdicts import list_missed
from rlk_repro.analysis.sessions import Session, find_carry_over
from rlk_repro.plan import Trial
from rlk_repro.schedule import Schedule, make_schedule
from rlk_repro.spec import Measure
from rlk_repro.statistics.crossover import hodges_lehmann, measure_noise
from rlk_repro.statistics.stats import STEP_TIME, t_interval, t_quantile

SEED: Final = 20261129
NUM_RUNS: Final = 20_000
CHUNK: Final = 2_000
NUM_SCHEDULES: Final = 64
SMALLEST: Final = 0.01
LARGER: Final = 0.015
ALPHA: Final = 0.05
TRIAL: Final = Trial(index=0, pair="s1", variant="crossover", is_control=False, seed=0)
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
        reach = t_quantile(1 - 2 * ALPHA, number - 1) * self.carried.std(axis=1, ddof=1) / math.sqrt(number)
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
        return list_missed(f"{self.case.name}, {self.case.sessions} sessions", bars)


def simulate(case: Case, num_runs: int = NUM_RUNS) -> Outcome:
    source = np.random.default_rng([SEED, *case.name.encode(), case.sessions, round(10 * case.between)])
    schedules = [make_schedule(case.measure, number) for number in range(NUM_SCHEDULES)]
    runs: list[list[float]] = []
    while len(runs) < num_runs:
        columns = []
        for place in range(case.sessions):
            picks = source.integers(NUM_SCHEDULES, size=min(CHUNK, num_runs - len(runs)))
            times = np.exp(draw_times(case, schedules, picks, source)).tolist()
            lossy = Case() if place else case
            chosen = [schedules[pick] for pick in picks]
            columns.append([_make_session(lossy, *item) for item in zip(chosen, times, strict=True)])
        runs += [estimate(sessions) for sessions in zip(*columns, strict=True)]
    errors, alone, floors, *carried = np.array(runs).T
    return Outcome(
        case=case, errors=errors, alone=alone, floors=floors, carried=np.array(carried).T if carried else None
    )


def _make_session(case: Case, schedule: Schedule, times: Sequence[float]) -> Session:
    faults = dict.fromkeys(list_lost(case, schedule), "void")
    arms = cast("Any", ())  # of a session, only the effects of its blocks count here
    return Session(trial=TRIAL, schedule=schedule, values={STEP_TIME: times}, faults=faults, arms=arms, rules=2)


def estimate(sessions: Sequence[Session]) -> list[float]:
    """Return a run's log ratio, the half widths of its sessions and of its blocks, and each session's carry-over."""
    blocks = [session.effects(STEP_TIME) or [] for session in sessions]
    alone, noise = t_interval(list(map(hodges_lehmann, blocks)), 1 - ALPHA), measure_noise(blocks)
    assert alone is not None
    assert noise is not None
    has_gate = sessions[0].schedule.period_steps == 1
    carried = [find_carry_over(session) or 0.0 for session in sessions if has_gate]
    return [alone.estimate, alone.high - alone.estimate, noise.half_width(1 - ALPHA), *carried]


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


def list_lost(case: Case, schedule: Schedule) -> list[int]:
    """Return the comparing blocks that are void."""
    blocks = [number for number, block in enumerate(schedule.blocks) if not block.is_control]
    if case.lost_order:
        return [number for number in blocks if schedule.blocks[number].order == case.lost_order][: case.lost]
    return blocks[1 : 1 + case.lost]


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


def main() -> int:
    outcomes = [simulate(case) for case in CASES]
    sys.stdout.write(render_table([outcome for outcome in outcomes if not outcome.case.after_switch]))
    for item in outcomes:
        if item.case.after_switch:
            without = replace(item, carried=None).find_faster(item.widths, 0.0)
            found = f"{100 * without:.1f} % of runs without the gate, {100 * item.find_faster(item.widths, 0.0):.3f} %"
            sys.stdout.write(f"{item.case.name}, spread {item.case.between:g} ×, no gain: faster in {found} with it\n")
    misses = [miss for outcome in outcomes for miss in outcome.find_misses()]
    sys.stdout.write("".join(f"missed: {miss}\n" for miss in misses))
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
