"""Results for the tests of reports: one per verdict and per way a run can go wrong, analysed from made-up logs."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import dump_json_line, write_json, write_text
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.resources import profile_folders
from rlk_repro.plan import make_plan
from rlk_repro.rundir.operator_results import OperatorResult
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, DecisionSummary
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack
from tests.support.make_run import Recipe, make_exit, make_run, write_plan

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


# Makes finished runs of the operator tier without running anything: two processes, their records, and the analysis.


NUM_SWEEPS = 2
LOGP = {"operator": "logp", "num_tokens": 9216, "vocab_size": 151936, "hidden_size": None, "dtype": "float32",
        "density": 1.0, "work": "forward"}  # fmt: skip
RATIO_KL = LOGP | {"operator": "ratio_kl", "density": 0.5, "work": "forward_backward"}
LINEAR = LOGP | {"operator": "linear_logp", "num_tokens": 4096, "hidden_size": 2048, "dtype": "bfloat16"}
KERNEL = "void (anonymous namespace)::fused_logp_online_kernel<float, 128>(float const*, long const*, float*, int)"


@dataclass(frozen=True, kw_only=True)
class MadeCell:
    """One cell: seconds of a call, or the status and reason that stand instead."""

    case: Mapping[str, Any]
    implementation: str
    kind: str
    class_name: str = ""
    seconds: float = 0.0
    status: str = "pass"
    reason: str = ""
    error: float | None = 1.7e-6
    gradient_error: float | None = None
    peak_extra_bytes: int | None = 0
    kernels: tuple[str, ...] = ()


CELLS = (
    MadeCell(case=LOGP, implementation="vime", kind="vime", class_name="vime.utils.ppo_utils", seconds=0.0140,
             peak_extra_bytes=5_600_000_000, kernels=("vectorized_elementwise_kernel",)),
    MadeCell(case=LOGP, implementation="rl-kernel-online", kind="fused", class_name="FusedLogpGenericOp.online_fp32",
             seconds=0.0018, kernels=(KERNEL,)),
    MadeCell(case=LOGP, implementation="rl-kernel-native", kind="native", class_name="NativeLogpOp", seconds=0.0150,
             peak_extra_bytes=11_200_000_000, kernels=("cunn_SoftMaxForward",)),
    MadeCell(case=LOGP, implementation="liger", kind="peer", status="blocked", reason="liger_kernel is not installed"),
    MadeCell(case=RATIO_KL, implementation="vime", kind="vime", class_name="vime.utils.ppo_utils", seconds=0.0210,
             gradient_error=2e-7),
    MadeCell(case=RATIO_KL, implementation="rl-kernel", kind="fused", class_name="TritonRatioKLOp", seconds=0.0058,
             gradient_error=3e-7),
    MadeCell(case=RATIO_KL, implementation="torch-compile", kind="peer", status="oom",
             reason="OutOfMemoryError: CUDA out of memory. Tried to allocate 5.22 GiB."),
    MadeCell(case=LINEAR, implementation="vime", kind="vime", class_name="vime.utils.ppo_utils", seconds=0.0183),
    MadeCell(case=LINEAR, implementation="rl-kernel", kind="fused", class_name="FusedLinearLogpSM90Op", seconds=0.0271),
    MadeCell(case=LINEAR, implementation="cut-cross-entropy", kind="peer", status="failed",
             reason="CompilationError: at 12:8"),
)  # fmt: skip


def make_operator_run(
    root: Path, cells: tuple[MadeCell, ...] = CELLS, change: Callable[[RunDir], None] | None = None
) -> RunDir:
    """A run directory with both processes; the second is one percent slower.  ``change`` is applied last."""
    plan = make_plan(
        run=load_run("operators-smoke"),
        stack=load_stack("host"),
        hardware=load_hardware("h200"),
        profile=load_profile("local", profile_folders("local")),
    )
    run_dir = write_plan(root, plan, {"gpu": {"count": 1, "driver": "580.159.04"}})
    for trial in plan.trials:
        folder = run_dir.trial(trial.name)
        write_text(folder.stdout, "\n".join(_log_lines(cells, 1 + trial.index / 100)) + "\n")
        write_json(folder.command, {"schema": 1, "argv": ["python", "-m", "rlk_repro.bench.operators"]})
        write_json(folder.env, {"schema": 1, "env": {}})
        write_json(folder.libraries_file(0), {"schema": 1, "torch": "2.13.0", "packages": {}, "sources": {}})
        write_json(folder.exit, make_exit(trial, duration_s=9.0))
    if change is not None:
        change(run_dir)
    return run_dir


def _log_lines(cells: tuple[MadeCell, ...], slowness: float) -> Iterator[str]:
    prefix = "2026-11-20T13:00:00.000Z [2026-11-20 13:00:00] harness.py:1 - "
    device = {"event": "device", "name": "NVIDIA H200", "bytes_per_s": 4.3e12 / slowness,
              "flops_per_s": {"bfloat16": 7.9e14}}  # fmt: skip
    yield f"{prefix}operator {dump_json_line(device)}"
    for sweep in range(NUM_SWEEPS):
        for cell in cells:
            yield f"{prefix}operator {dump_json_line(_make_time(cell, sweep, slowness))}"
        yield f"{prefix}perf {sweep}: {{'perf/step_time': {4.5 * slowness}}}"
    for cell in cells:
        if cell.status == "pass":
            of_case = _list_fields(cell, "case", "implementation", "status", "reason")
            found = _list_fields(cell, "error", "gradient_error", "kernels")
            check = {"event": "check", "is_repeatable": True} | of_case | found
            yield f"{prefix}operator {dump_json_line(check)}"


def _make_time(cell: MadeCell, sweep: int, slowness: float) -> dict[str, Any]:
    samples = [cell.seconds * slowness * factor for factor in (1.0, 1.02, 0.99)] if cell.seconds else []
    version = "0.1.0" if cell.class_name else ""
    time = {"event": "time", "sweep": sweep, "version": version, "samples_s": samples, "floor_s": 0.0013}
    peak = {"peak_extra_bytes": cell.peak_extra_bytes if samples else None}
    return time | peak | _list_fields(cell, "case", "implementation", "kind", "class_name", "status", "reason")


def _list_fields(cell: MadeCell, *names: str) -> dict[str, Any]:
    return {name: getattr(cell, name) for name in names}


@cache
def operators() -> Analysis:
    """Fused, native, peer; passed, blocked, out of memory and failed."""
    with tempfile.TemporaryDirectory() as folder:
        return analyse(make_operator_run(Path(folder) / "20261120-091500-7f3a"))


@cache
def hostile_operators() -> Analysis:
    """Texts that no process of ours prints; analysis files may hold them all the same."""

    def rename(result: OperatorResult) -> OperatorResult:
        return replace(
            result,
            case=replace(result.case, operator=HOSTILE, dtype=HOSTILE, work=HOSTILE),
            implementation=HOSTILE,
            class_name=HOSTILE,
            version=HOSTILE,
            kernels=(HOSTILE, "(anonymous namespace)", "::", ""),
            trials=tuple(replace(trial, reason=HOSTILE) for trial in result.trials),
        )

    analysis = operators()
    return replace(analysis, operators=tuple(map(rename, analysis.operators)))


EXAMPLES: Final[dict[str, Callable[[], Analysis]]] = {
    **{name: partial(made, name) for name in RECIPES},
    "hostile": hostile,
    "operators": operators,
    "hostile-operators": hostile_operators,
}
