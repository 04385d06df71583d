"""Makes a finished run directory without running anything: plan, logs in vime's dialect, ops files, manifest.

For tests of what comes after the trials.  The numbers are a deterministic function of seed and variant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.clock import format_utc
from rlk_repro.base.files import dump_json_line, write_json, write_text
from rlk_repro.base.resources import data_dir, profile_folders
from rlk_repro.bundle.seal import pack, seal
from rlk_repro.plan import Plan, Trial, make_plan, make_record
from rlk_repro.rundir.manifest import Manifest, Section, Unknown
from rlk_repro.rundir.paths import RunDir, TrialDir
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack, parse_overrides
from rlk_repro.spec.values import ENABLED

CLASSES = {
    ("cpu", "logp"): "NativeLogpOp",
    ("cpu", "ratio_kl"): "NativeRatioKLOp",
    ("cuda", "logp"): "FusedLogpGenericOp",
    ("cuda", "ratio_kl"): "TritonRatioKLOp",
}
BEGIN_S = 1_795_179_600.0
SPACING_S = 20.0
FALLBACK = "RL-Kernel cannot be imported"
PREFIX = "2026-11-20T13:00:00.000Z [2026-11-20 13:00:00] x.py:1 - "


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the made-up trials measured."""

    settings: tuple[str, ...] = ("measure.scored_steps=4", "measure.warmup_steps=1")
    hardware: str = "h200"
    speedup: float = 1.0
    noise: float = 0.01
    reward_drop: float = 0.0
    is_routed: bool = True
    failed: dict[str, str] = field(default_factory=dict)
    variants: tuple[str, ...] = ("baseline", "enabled")


def make_plan_for(recipe: Recipe) -> Plan:
    overrides = parse_overrides(recipe.settings)
    return make_plan(
        run=load_run("smoke", overrides),
        stack=load_stack("host"),
        hardware=load_hardware(recipe.hardware),
        profile=load_profile("local", profile_folders("local")),
        overrides=overrides,
        variants=recipe.variants,
        is_exploratory=True,
    )


def make_run(root: Path, recipe: Recipe = Recipe(), change: Callable[[RunDir], None] | None = None) -> RunDir:
    """A run directory with every trial, not analysed; ``change`` is applied last."""
    plan = make_plan_for(recipe)
    run_dir = RunDir(root)
    for path, source in (
        (run_dir.run_yaml, data_dir("jobs") / "smoke.yaml"),
        (run_dir.stack_yaml, data_dir("manifests") / "stacks" / "host.yaml"),
        (run_dir.hardware_yaml, data_dir("jobs") / "hardware" / f"{recipe.hardware}.yaml"),
        (run_dir.profile_yaml, data_dir("jobs") / "profiles" / "local.yaml"),
    ):
        write_text(path, source.read_text())
    write_json(run_dir.plan, make_record(plan, run_dir.run_id))
    node = run_dir.node("node0")
    facts: dict[str, Section] = {"gpu": {"count": 1, "driver": "580.159.04", "rocm_version": Unknown("no AMD GPU")}}
    write_json(node.manifest, Manifest(node="node0", sections=facts).to_json())
    write_records(run_dir, plan)
    for trial in plan.trials:
        _write_trial(run_dir.trial(trial.name), plan, trial, recipe)
    if change is not None:
        change(run_dir)
    return run_dir


def write_records(run_dir: RunDir, plan: Plan) -> None:
    """What an agent leaves that ran the whole plan in one allocation, beside the trials."""
    write_json(run_dir.node("node0").preflight, {"schema": 1, "node": "node0", "allocation": "a", "findings": []})
    events = [("begin", BEGIN_S)]
    events += [("trial", BEGIN_S + SPACING_S * (trial.index + 1)) for trial in plan.trials]
    lines = [{"t": format_utc(t), "event": event, "allocation": "a", "node": "node0"} for event, t in events]
    write_text(run_dir.agent_log, "".join(f"{dump_json_line(line)}\n" for line in lines))


def make_exit(trial: Trial, status: str = "ok", duration_s: float = 3.5) -> dict[str, object]:
    """The exit record of a trial of such an agent."""
    begin_s = BEGIN_S + SPACING_S * trial.index
    return {"schema": 1, "status": status, "code": 0 if status == "ok" else 1, "signal": None,
            "reason": "" if status == "ok" else f"made to end with {status}", "allocation": "a",
            "started_at": format_utc(begin_s), "ended_at": format_utc(begin_s + duration_s),
            "duration_s": duration_s}  # fmt: skip


def finish_run(run_dir: RunDir) -> Path:
    """Analyse, seal and pack; the path of the bundle."""
    write_json(run_dir.analysis, analyse(run_dir).to_json())
    return reseal(run_dir)


def reseal(run_dir: RunDir) -> Path:
    """Redo checksums and bundle, as a forger would who changed a file."""
    run_dir.checksums.unlink(missing_ok=True)
    run_dir.bundle.unlink(missing_ok=True)
    seal(run_dir)
    return pack(run_dir)


def _write_trial(folder: TrialDir, plan: Plan, trial: Trial, recipe: Recipe) -> None:
    status = recipe.failed.get(trial.name, "ok")
    num_steps = plan.num_steps if status == "ok" else 2
    write_text(folder.stdout, "\n".join(_log_lines(plan, trial, recipe, num_steps)) + "\n")
    ops_lines = list_ops_lines(plan, trial, [10**9] * num_steps, is_routed=recipe.is_routed)
    write_text(folder.ops_file(0), "\n".join(ops_lines) + "\n")
    write_json(folder.command, {"schema": 1, "argv": ["python", "-m", "trainer", "--seed", str(trial.seed)]})
    write_json(
        folder.env, {"schema": 1, "env": {"RLK_REPRO_OPS_DIR": f"trials/{trial.name}/ops", "NCCL_DEBUG": "WARN"}}
    )
    sources = {"rl_engine": "5" * 40} if trial.variant == ENABLED and recipe.is_routed else {}
    libraries = {"schema": 1, "torch": "2.13.0", "packages": {"numpy": "2.4.6"}, "sources": sources}
    write_json(folder.libraries_file(0), libraries)
    write_json(folder.exit, make_exit(trial, status))


def _log_lines(plan: Plan, trial: Trial, recipe: Recipe, num_steps: int) -> Iterable[str]:
    rng = random.Random(f"{trial.seed}-{trial.variant}-{trial.index}")
    is_enabled = trial.variant == ENABLED and recipe.is_routed
    level = (1 + trial.seed % 7 / 100) * (1 + rng.gauss(0, recipe.noise)) / (recipe.speedup if is_enabled else 1)
    yield f"{PREFIX}Timer train start"
    for step in range(num_steps):
        step_time = level * (1 + rng.gauss(0, recipe.noise))
        reward = 0.5 + 0.01 * step - (recipe.reward_drop if is_enabled else 0) + rng.gauss(0, 0.001)
        yield f"{PREFIX}perf {step}: {{'rollout/response_len/mean': 5.0, 'perf/rollout_time': {step_time * 0.4}}}"
        yield f"{PREFIX}rollout {step}: {{'rollout/raw_reward': {reward}, 'rollout/response_lengths': 5.0}}"
        per_rollout = plan.run.workload.num_steps_per_rollout
        for number in range(step * per_rollout, (step + 1) * per_rollout):
            yield (
                f"{PREFIX}step {number}: {{'train/loss': 0.1, 'train/grad_norm': 1.5, 'train/kl_loss': 0.0, "
                f"'train/train_rollout_logprob_abs_diff': {0.01 + rng.gauss(0, 1e-5)}, 'train/step': {number}}}"
            )
        yield (
            f"{PREFIX}perf {step}: {{'perf/actor_train_time': {step_time * 0.5}, 'perf/train_time': {step_time * 0.6}, "
            f"'perf/train_wait_time': {step_time * 0.4}, 'perf/update_weights_time': 0.01, "
            f"'perf/actor_train_tok_per_s': 1000.0, 'perf/step_time': {step_time}}}"
        )


def list_ops_lines(plan: Plan, trial: Trial, peaks: Iterable[int], *, is_routed: bool) -> Iterable[str]:
    """The ops file of a trial with one step for each peak of memory."""
    platform, ops = plan.hardware.platform, plan.ops
    is_enabled = trial.variant == ENABLED
    yield dump_json_line({"event": "install", "schema": 1, "mode": "auto" if is_enabled else "off",
                          "is_requested": is_enabled, "ops": list(ops) if is_enabled else [], "rank": 0,
                          "world_size": 1, "trainer": "reference", "platform": platform})  # fmt: skip
    for op in ops if is_enabled else ():
        implementation = CLASSES[platform, op] if is_routed else "rlk_repro.refengine.core"
        decision = {"op": op, "implementation": implementation, "version": "1", "is_rl_kernel": is_routed}
        yield dump_json_line({"event": "decision", "reason": "" if is_routed else FALLBACK, **decision})
    calls = {"calls": 4, "tokens": 100, "fallbacks": 0} if is_routed else {"calls": 0, "tokens": 0, "fallbacks": 4}
    for step, peak in enumerate(peaks):
        yield dump_json_line({"event": "step", "step": step, "timers": {"log_probs_forward": 0.1},
                              "memory": {"peak_allocated_bytes": peak},
                              "calls": dict.fromkeys(ops, calls) if is_enabled else {}})  # fmt: skip
    yield dump_json_line({"event": "end"})
