"""Results for the tests of reports: one per verdict and per way a run can go wrong, analysed from made-up logs."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, DecisionSummary
from tests.support.make_run import Recipe, make_run

HOSTILE: Final = (
    "<script>alert('x')</script> \"quoted\" `tick` | pipe\nnew\tline \x1b[31mred ünï 漢字 \u202edlrow [bold]"
)
RUN_ID: Final = "20261120-091500-7f3a"


def size(pairs: int, control_pairs: int = 0, scored_steps: int = 5, warmup_steps: int = 1) -> tuple[str, ...]:
    sizes = {"pairs": pairs, "control_pairs": control_pairs, "scored_steps": scored_steps, "warmup_steps": warmup_steps}
    return tuple(f"measure.{name}={value}" for name, value in sizes.items())


LARGE: Final = size(6, 4, 20, 2)


def keep_step_time(run_dir: RunDir) -> None:
    """Leave only the step time in the logs, with one hole."""
    for trial in run_dir.trial_dirs():
        text = trial.stdout.read_text()
        times = re.findall(r"(\S+ .*perf \d+: \{).*('perf/step_time': \S+\})", text)
        lines = [first + last for number, (first, last) in enumerate(times) if number != 3 or "03-" not in trial.name]
        trial.stdout.write_text("".join(f"{line}\n" for line in lines))
        trial.ops_file(0).write_text(re.sub(r'"(timers|memory)":\{[^}]*\}', r'"\1":{}', trial.ops_file(0).read_text()))


def stop_early(run_dir: RunDir) -> None:
    """One trial out of memory, one killed, one that never started, one fallen back half-way."""
    shutil.rmtree(run_dir.trial("19-p6-baseline").path)
    ops = run_dir.trial("09-p3-enabled").ops_file(0)
    ops.write_text(ops.read_text().replace('"fallbacks":0', '"fallbacks":2'))


RECIPES: Final[Mapping[str, tuple[Recipe, Callable[[RunDir], None] | None]]] = {
    "faster": (Recipe(settings=LARGE, speedup=1.05), None),
    "slower": (Recipe(settings=LARGE, speedup=0.92), None),
    "equivalent": (Recipe(settings=LARGE, noise=0.001), None),
    "inconclusive": (Recipe(settings=size(3), speedup=1.2), None),
    "not-comparable": (Recipe(settings=size(6), speedup=1.2, reward_drop=0.2), None),
    "all-fallback": (Recipe(settings=size(2), hardware="cpu", is_routed=False), None),
    "with-failures": (
        Recipe(settings=LARGE, failed={"01-p1-enabled": "out of memory", "11-p4-baseline": "interrupted"}),
        stop_early,
    ),
    "missing-metrics": (Recipe(settings=size(6), speedup=1.2), keep_step_time),
    "huge": (Recipe(settings=size(41, 0, 240, 2), speedup=1.2), None),
    "small": (Recipe(settings=size(2, 0, 3)), None),
}


@cache
def made(name: str) -> Analysis:
    recipe, change = RECIPES[name]
    with tempfile.TemporaryDirectory() as folder:
        analysis = analyse(make_run(Path(folder) / RUN_ID, recipe, change))
    return replace(analysis, experiment_hash="e1" * 32, plan_hash="f2" * 32)


def faster() -> Analysis:
    return made("faster")


def small() -> Analysis:
    """Return the example of the Markdown golden: two pairs, three scored steps."""
    return made("small")


@cache
def hostile() -> Analysis:
    """Every free text of a run holds markup, quotes, control and right-to-left characters."""
    analysis = made("small")
    bad = DecisionSummary(
        op=HOSTILE, implementation=HOSTILE, reason=HOSTILE, is_rl_kernel=True, calls=1, tokens=1, fallbacks=0
    )
    trials = [
        replace(trial, name=f"{trial.name}-{HOSTILE}", reason=HOSTILE, proof_reason=HOSTILE, decisions=(bad,))
        for trial in analysis.trials
    ]
    pairs = [
        replace(pair, pair=f"{pair.pair}{HOSTILE}", reason=HOSTILE, control_reason=HOSTILE,
                first=f"{pair.first}-{HOSTILE}", second=f"{pair.second}-{HOSTILE}")
        for pair in analysis.pairs
    ]  # fmt: skip
    return replace(
        analysis,
        run=HOSTILE,
        run_id=HOSTILE,
        hardware=HOSTILE,
        stack=HOSTILE,
        facts={HOSTILE: HOSTILE},
        trials=tuple(trials),
        pairs=tuple(pairs),
        gates=tuple(replace(gate, detail=HOSTILE) for gate in analysis.gates),
        verdict=replace(analysis.verdict, headline=HOSTILE, reasons=(HOSTILE,)),
        notes=(HOSTILE,),
        findings=(Finding(Level.BLOCKING, HOSTILE, HOSTILE, HOSTILE),),
    )


def operators() -> Analysis:
    """Return a run of the operator tier, made from logs."""
    from tests.support import operator_examples

    return operator_examples.operators()


def hostile_operators() -> Analysis:
    from tests.support import operator_examples

    return operator_examples.hostile_operators()


def _lazily(name: str) -> Callable[[], Analysis]:
    return lambda: made(name)


EXAMPLES: Final[dict[str, Callable[[], Analysis]]] = {
    **{name: _lazily(name) for name in RECIPES},
    "hostile": hostile,
    "operators": operators,
    "hostile-operators": hostile_operators,
}
