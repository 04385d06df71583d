"""Makes a finished run directory without running anything: plan, logs in vime's dialect, ops files, manifest.

For tests of what comes after the trials.  The numbers are a deterministic function of seed and variant.
"""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import dump_json_line, write_json, write_text
from rlk_repro.base.findings import Finding
from rlk_repro.base.resources import data_dir, profile_folders
from rlk_repro.base.units import format_utc
from rlk_repro.bundle.archive import ArchiveWriter, Member
from rlk_repro.bundle.gzip_stream import GzipWriter
from rlk_repro.bundle.seal import pack, seal
from rlk_repro.bundle.verify import verify
from rlk_repro.plan import Plan, Trial, make_plan, make_record
from rlk_repro.rundir.manifest import Manifest, Section, Unknown
from rlk_repro.rundir.paths import RunDir, TrialDir
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack, parse_overrides
from rlk_repro.spec.values import ENABLED
from tests.conftest import WEIRD_NAMES

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
    facts: dict[str, Section] = {"gpu": {"count": 1, "driver": "580.159.04", "rocm_version": Unknown("no AMD GPU")}}
    run_dir = write_plan(root, plan, facts)
    for trial in plan.trials:
        _write_trial(run_dir.trial(trial.name), plan, trial, recipe)
    if change is not None:
        change(run_dir)
    return run_dir


def write_plan(root: Path, plan: Plan, facts: dict[str, Section]) -> RunDir:
    """What a run directory holds beside its trials: the authors' files, the plan and the records of one node."""
    run_dir = RunDir(root)
    for path, source in (
        (run_dir.run_yaml, data_dir("jobs") / f"{plan.run.run}.yaml"),
        (run_dir.stack_yaml, data_dir("manifests") / "stacks" / f"{plan.stack.stack}.yaml"),
        (run_dir.hardware_yaml, data_dir("jobs") / "hardware" / f"{plan.hardware.hardware}.yaml"),
        (run_dir.profile_yaml, data_dir("jobs") / "profiles" / "local.yaml"),
    ):
        write_text(path, source.read_text())
    write_json(run_dir.plan, make_record(plan, run_dir.run_id))
    write_json(run_dir.node("node0").manifest, Manifest(node="node0", sections=facts).to_json())
    write_records(run_dir, plan)
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


# A small run directory as a job leaves it, and ways to rewrite its bundle byte by byte.


RUN_ID = "20261120-133000-smoke"
TRIAL = "00-p0-baseline"
LOG = f"trials/{TRIAL}/stdout.log"
ODD_NAMES = (*WEIRD_NAMES, "back\\slash", "\\n", "carriage\rreturn", " lead", "x" * 255, "not-utf-8-\udcff", "c:colon")


def make_run_dir(parent: Path) -> RunDir:
    """Unsealed: our JSON, logs, odd names, empty and incompressible content, and what is never packed."""
    run_dir = RunDir(parent / RUN_ID)
    noise = random.Random(0)
    for path in (run_dir.submission, run_dir.node("n0").manifest):
        _write(path, json.dumps({"schema": 1}).encode())
    _write(run_dir.plan, json.dumps({"schema": 1, "run_id": RUN_ID}).encode())
    _write(run_dir.run_yaml, b"run: smoke\n")
    for name, status in ((TRIAL, "ok"), ("01-p0-enabled", "failed")):
        trial = run_dir.trial(name)
        lines = (f"step {step}: {{'perf/step_time': {noise.random()}}}\n" for step in range(50))
        _write(trial.stdout, "".join(lines).encode())
        _write(trial.ops_file(0), b"")
        _write(trial.exit, json.dumps({"schema": 1, "status": status}).encode())
    _write(run_dir.trial("02-p1-enabled").stdout, b"died before its exit record\n")
    _write(run_dir.rollouts / "0.bin", noise.randbytes(1500))
    for name in ODD_NAMES:
        _write(run_dir.scheduler / name, name.encode("utf-8", "surrogateescape"))
    _write(run_dir.scheduler / "/".join(["deep" * 10] * 6) / "long path", b"beyond 100 bytes\n")
    for path in (run_dir.lock, run_dir.report / "index.html", run_dir.root / "job" / ".partial-x"):
        _write(path, b"never packed")
    return run_dir


def read_tar(bundle: Path) -> bytes:
    return gzip.decompress(bundle.read_bytes())


def write_as_packed(bundle: Path, tar: bytes) -> Path:
    """Put any tar into our own gzip container."""
    with bundle.open("wb") as stream:
        writer = GzipWriter(stream)
        writer.write(tar)
        writer.close()
    return bundle


def rewrite(
    bundle: Path, target: Path, *, removed: Collection[str] = (), added: Mapping[str, bytes] | None = None
) -> Path:
    """The same archive without some files and with others, in our container."""
    with tarfile.open(bundle) as old, target.open("wb") as stream:
        kept = [(info.name, cast("IO[bytes]", old.extractfile(info)).read()) for info in old]
        new = ArchiveWriter(stream)
        for name, data in [*(item for item in kept if item[0] not in removed), *(added or {}).items()]:
            new.add(Member(name=name, size_bytes=len(data)), [data])
        new.close()
    return target


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# The findings of ``verify`` as a list, for tests that expect no id.


def verify_bundle(path: Path) -> list[Finding]:
    return list(verify(path).findings)
