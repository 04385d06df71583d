"""Make a trainer's environment; variants differ only in declared switches and in the folders of their records."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.paths import RunDir
from rlk_repro.schedule import make_schedule
from rlk_repro.sources import PINNED, CodeSource
from rlk_repro.spec import FromEnv
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.switches import (
    AGREEMENT_RECORD,
    DEMO_WAIT,
    ENGINES_DIR,
    ENTROPY_METRIC,
    GC_FREEZE,
    OPS_DIR,
    SCHEDULED,
    SWITCH,
    SWITCH_BASELINE_OPS,
    SWITCH_COMMIT,
    SWITCH_MODE,
    SWITCH_OPS,
    SWITCH_SCHEDULE,
    VARIANT_SWITCHES,
)
from rlk_repro.workloads.api import Command

THREADS: Final = "OMP_NUM_THREADS"
FIXED_ENV: Final = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", THREADS: "1"}

# One of these variables in the user's shell could turn a baseline into an enabled trial, or change both variants.
DECLARED: Final = VARIANT_SWITCHES | {
    *(OPS_DIR, ENGINES_DIR),
    *(ENTROPY_METRIC, GC_FREEZE, AGREEMENT_RECORD, DEMO_WAIT),
}

# The flag or key by which a user changes each variable.
SWITCHES: Final = {
    SWITCH: "--variants",
    SWITCH_MODE: "--set rl_kernel.mode=…",
    SWITCH_OPS: "--set rl_kernel.ops=[…]",
    SWITCH_BASELINE_OPS: "--set rl_kernel.baseline_implementation=…",
    SWITCH_SCHEDULE: "--set measure.design=…",
    SWITCH_COMMIT: "the key `rl_kernel.commits` in the run",
    ENTROPY_METRIC: "--set entropy_metric=…",
    GC_FREEZE: "--set gc_freeze=…",
    **dict.fromkeys((AGREEMENT_RECORD, DEMO_WAIT), "the key `switch` in the run"),
}

# With one of these variables from the user's shell, the trainer could join another Ray cluster or use a proxy.
ASTRAY: Final = frozenset(
    {"RAY_ADDRESS", "RAY_NAMESPACE", "RAY_AUTH_TOKEN", "http_proxy", "https_proxy", "all_proxy"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
)

# Many containers set this variable. With it, every process of every trial compiles all files that it imports.
UNCOMPILED: Final = "PYTHONDONTWRITEBYTECODE"

MNNVL: Final = "NCCL_MNNVL_ENABLE"
_SWITCH: Final = r"[01]"
_NUMBER: Final = r"\d{1,9}"
_WORDS: Final = r"[A-Za-z0-9^,_]{1,100}"
RUN_ENV: Final[Mapping[str, str]] = {
    **dict.fromkeys(("NCCL_CUMEM_ENABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE"), _SWITCH),
    **dict.fromkeys(("NCCL_SHM_DISABLE", "HSA_ENABLE_IPC_MODE_LEGACY", "HSA_NO_SCRATCH_RECLAIM"), _SWITCH),
    **dict.fromkeys(("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"), _SWITCH),
    **dict.fromkeys((AGREEMENT_RECORD, DEMO_WAIT), _SWITCH),
    **dict.fromkeys(("NVTE_UNFUSED_ATTN", "NVTE_USE_CUTLASS_GROUPED_GEMM"), _SWITCH),
    **dict.fromkeys(("TORCH_NCCL_AVOID_RECORD_STREAMS", "VLLM_BATCH_INVARIANT"), _SWITCH),
    **dict.fromkeys(("VLLM_ROCM_USE_AITER", "VLLM_USE_DEEP_GEMM", "VLLM_USE_FLASHINFER_SAMPLER"), _SWITCH),
    **dict.fromkeys(("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "NCCL_MAX_NCHANNELS"), _NUMBER),
    **dict.fromkeys(("NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS"), _NUMBER),
    **dict.fromkeys(("NCCL_ALGO", "NCCL_DEBUG", "NCCL_PROTO", "VLLM_ATTENTION_BACKEND"), _WORDS),
    "CUBLAS_WORKSPACE_CONFIG": r":\d{1,6}:\d{1,3}",
    "PYTORCH_CUDA_ALLOC_CONF": r"[a-z_0-9]+:(True|False|[\d.]+)(,[a-z_0-9]+:(True|False|[\d.]+))*",
}
"""The variables that a run may set, each with a pattern for its values.  Other variables could load foreign code."""


def find_run_problems(where: str, env: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each variable that only a profile may set, and for each value whose form is wrong."""
    problems = []
    for name, value in sorted(env.items()):
        pattern = RUN_ENV.get(name)
        if pattern is None:
            expected, hint = ", ".join(sorted(RUN_ENV)), "a profile may set any variable under env"
            what = "a run may not set this variable"
            problems.append(Problem(f"{where}.{name}", what, expected=expected, hint=hint))
        elif re.fullmatch(pattern, value) is None:
            problems.append(Problem(f"{where}.{name}", "wrong value", got=value, expected=f"one like {pattern}"))
    return problems


def trial_env(plan: Plan, trial: Trial, run_dir: RunDir) -> dict[str, str]:
    """Return the variables that rlk-repro sets for a trial: record folders, metrics, declared switches."""
    folder = run_dir.trial(trial.name)
    env = {OPS_DIR: str(folder.ops.absolute())}
    if plan.run.workload.compares_engines:
        env[ENGINES_DIR] = str(folder.engines.absolute())
    if plan.num_gpus >= 2:
        # NCCL logs at its start how ranks are connected.  The log holds addresses and is never packed.
        log = folder.libraries.absolute() / ".partial-nccl-%h-%p.log"
        env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(log)}
    if not plan.run.entropy_metric:
        env[ENTROPY_METRIC] = "0"
    if plan.run.gc_freeze:
        # gc.freeze makes the next step longer; a session whose periods have one step would score this step
        scores_next = plan.is_crossover and plan.run.measure.period_steps == 1
        env[GC_FREEZE] = str(max(1, plan.run.measure.warmup_steps - scores_next))
    return env | switch_env(plan, trial)


def switch_env(plan: Plan, trial: Trial) -> dict[str, str]:
    """Return the variables that select the trial's variant; a session also gets its schedule."""
    schedule = {SWITCH_SCHEDULE: make_schedule(plan.run.measure, trial.seed).text} if plan.is_crossover else {}
    if plan.run.switch is not None and schedule:
        return {**dict.fromkeys(plan.run.switch.baseline, SCHEDULED), **schedule}
    if plan.run.switch is not None:
        return plan.run.switch.variables_of(trial.variant)
    if not plan.run.is_routed(trial.variant):
        return {}
    ops = ",".join(plan.ops_of(trial.variant))
    switches = {SWITCH: "1", SWITCH_MODE: plan.run.rl_kernel.mode, SWITCH_OPS: ops, **schedule}
    if plan.is_crossover and plan.ops_of(BASELINE):
        switches[SWITCH_BASELINE_OPS] = ",".join(plan.ops_of(BASELINE))
    if commit := plan.run.rl_kernel.find_commit(trial.variant):
        switches[SWITCH_COMMIT] = commit
    return switches


def profile_env(plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """Return the profile's variables: those with a value, and those that get the value of a variable of the node agent.

    The profile's network interface applies to all traffic between nodes, not only to Ray's.
    """
    items, interface = plan.profile.env.items(), plan.profile.ray.interface
    sockets = {} if interface is None else {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    own = {name: value for name, value in sockets.items() if name not in plan.profile.env}
    plain = own | {name: value for name, value in items if isinstance(value, str)}
    return plain, {name: value.from_env for name, value in items if isinstance(value, FromEnv)}


def trainer_module(plan: Plan, argv: Sequence[str], own: Mapping[str, str]) -> Command:
    plain, from_env = profile_env(plan)
    return Command(argv=(sys.executable, "-m", *argv), env={**plain, **FIXED_ENV, **own}, from_env=from_env)


def find_env_problems(plan: Plan) -> list[Problem]:
    """Find variables that a profile or an own switch may not set, because the launcher sets them."""
    where = f"profile {plan.profile.profile}: env"
    forced, reason = plan.profile.env.get(MNNVL), "on one node NCCL fails with it where no IMEX channel is"
    unneeded = [Problem(f"{where}.{MNNVL}", reason, got=forced, expected="no such key: NCCL looks for NVLink itself")]
    found = unneeded if forced == "1" and plan.layout.num_nodes == 1 and plan.num_gpus > 1 else []
    found = found + [
        Problem(f"{where}.{name}", "is set by the launcher", expected="another variable")
        for name in sorted(plan.profile.env.keys() & (FIXED_ENV.keys() | DECLARED | plan.switches))
    ]
    if plan.run.switch is None:
        return found
    for name in sorted(plan.switches & (DECLARED - {AGREEMENT_RECORD, DEMO_WAIT})):
        hint = f"to change it, use {SWITCHES[name]}" if name in SWITCHES else None
        found.append(Problem(f"run {plan.run.run}: switch.{name}", "is set by the launcher", hint=hint))
    return found


def find_trainer_path(plan: Plan, inherited: str = "") -> str:
    """Return where the baseline's trainer imports from: the switch's checkouts, then the profile's PYTHONPATH."""
    path = profile_env(plan)[0].get("PYTHONPATH", inherited)
    return os.pathsep.join([*find_checkouts(plan, BASELINE).values(), *filter(None, [path])])


def find_foreign_switch(plan: Plan) -> list[Problem]:
    """Find the variables of another person's switch that are not on the list, because they could load foreign code."""
    found: list[Problem] = []
    switch = plan.run.switch
    if switch is not None:
        for variant in (BASELINE, ENABLED):
            found += find_run_problems(f"run {plan.run.run}: switch.{variant}", switch.variables_of(variant))
    return found


def find_checkouts(plan: Plan, variant: str) -> dict[CodeSource, str]:
    """Return the folders from which this variant imports the code bases that the user's switch names."""
    switch = plan.run.switch
    named = {} if switch is None else switch.variables_of(variant)
    return {source: named[source.variable] for source in PINNED if source.variable in named}


def resolve_env(command: Command, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the trainer's whole environment; raise SpecError if variables that ``from_env`` names are not set."""
    problems = [
        Problem(f"environment variable {name}", "is not set", expected="a value", hint=f"export {name}=…")
        for name in sorted(set(command.from_env.values()) - environ.keys())
    ]
    if problems:
        raise SpecError(*problems)
    left_out = DECLARED | {UNCOMPILED} | (ASTRAY if command.needs_ray else frozenset())
    inherited = {name: value for name, value in environ.items() if name not in left_out}
    named = {name: environ[source] for name, source in command.from_env.items()}
    env = inherited | dict(command.env) | named
    # the checkouts that a trial names come before all other folders from which Python imports
    folders = [command.env[source.variable] for source in PINNED if source.variable in command.env]
    if folders:
        env["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [env.get("PYTHONPATH")])])
    return env
