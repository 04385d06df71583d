"""Make the arguments of vime's ``train.py`` and its environment from a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.division import Division, divide, vime_of
from rlk_repro.plan import Plan, Trial
from rlk_repro.spec import VimeModel
from rlk_repro.spec.vime import VimeData, VimeGrpo
from rlk_repro.workloads.arguments import setting_flags, spell_flags, switch_flags

INIT_PATH: Final = "rlk_repro.integration.vime.install"
WORKER: Final = "rlk_repro.integration.vllm_worker.LayerWatch"
FORGE: Final = "vime.rollout.forge_load.generate_rollout"
NUM_PROFILED_STEPS: Final = 3

# vime's own scripts set these flags for every model; a run may change them in its arguments.
USUAL: Final[Mapping[str, Any]] = {
    "accumulate-allreduce-grads-in-fp32": True,
    "attention-backend": "flash",
    "attention-dropout": 0.0,
    "attention-softmax-in-fp32": True,
    "balance-data": True,
    "hidden-dropout": 0.0,
    "lr-decay-style": "constant",
    "optimizer": "adam",
}
FULL_RECOMPUTE: Final[Mapping[str, Any]] = {
    "recompute-granularity": "full",
    "recompute-method": "uniform",
    "recompute-num-layers": 1,
}
CPU_OPTIMIZER: Final[Mapping[str, Any]] = {
    "optimizer-cpu-offload": True,
    "overlap-cpu-optimizer-d2h-h2d": True,
    "use-precision-aware-optimizer": True,
}
SOMETIMES: Final = frozenset(
    {
        "apply-chat-template",
        "colocate",
        "custom-rm-path",
        "debug-train-only",
        "deterministic-mode",
        "megatron-to-hf-mode",
    }
    | {"offload", "offload-train", "no-offload-train", "offload-rollout", "no-offload-rollout", "rm-type"}
    | {"sequence-parallel", "use-routing-replay", "vllm-enable-deterministic-inference", "vllm-worker-extension-cls"}
)
"""Flags that the launcher sets only under some settings."""
ENV: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
DETERMINISTIC_ENV: Final = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


@dataclass(frozen=True, kw_only=True)
class Files:
    """The paths of a run's files; vime replaces ``{rollout_id}`` in ``rollouts`` by a number."""

    model: Path
    checkpoint: Path
    prompts: Path
    rollouts: str


def render_arguments(plan: Plan, files: Files, *, trial: Trial, traces: Path) -> list[str]:
    planned = {**_common(plan, files, trial.seed), **_lane(plan, files), **_purpose(plan, traces)}
    return _to_words(switch_flags(plan, trial, planned))


def render_store_arguments(plan: Plan, files: Files, *, seed: int) -> list[str]:
    """Return the arguments of the live run that stores rollouts for another lane."""
    common = {**_common(plan, files, seed, lane="live"), "num-rollout": plan.run.measure.num_stored}
    return _to_words({**common, **_live(plan, files), "save-debug-rollout-data": files.rollouts})


def render_env(plan: Plan) -> dict[str, str]:
    """Return the environment of the driver and of every vime process."""
    workload = vime_of(plan)
    own = DETERMINISTIC_ENV if workload.what_for in {"agreement", "deterministic"} else {}
    # vime switches cuMem off in trainers and servers unless this is set; NCCL crosses nodes by NVLink only with cuMem
    fabric = {"NCCL_CUMEM_ENABLE": "1"} if plan.spans_nvlink else {}
    return {**ENV, **own, **fabric, **workload.placements[plan.hardware.hardware].env}


def list_decided(plan: Plan, files: Files, traces: Path) -> frozenset[str]:
    """Return the flags that follow from other settings; a run's ``arguments`` may not hold them."""
    decided = {
        **_decided(plan, files, 0, plan.run.lane),
        **_live(plan, files),
        **_forge(files),
        **_train_only(files),
        **_profiling(plan, traces),
    }
    settings = {name.replace("_", "-") for name in VimeGrpo.model_fields}
    return frozenset(decided) - USUAL.keys() | settings | SOMETIMES


def _common(plan: Plan, files: Files, seed: int, lane: str | None = None) -> dict[str, Any]:
    workload = vime_of(plan)
    written = workload.arguments_on(plan.hardware.hardware)
    if (lane or plan.run.lane) == "train-only":
        written = {
            flag: value for flag, value in written.items() if not flag.startswith(("vllm-", "no-vllm-", "router-"))
        }
    return {**USUAL, **workload.model.arguments, **_decided(plan, files, seed, lane or plan.run.lane), **written}


def _decided(plan: Plan, files: Files, seed: int, lane: str) -> dict[str, Any]:
    workload, division = vime_of(plan), divide(plan)
    return {
        "custom-megatron-init-path": INIT_PATH,
        "seed": seed,
        "rollout-seed": seed,
        "num-rollout": plan.num_steps,
        **_weights(workload.model, files),
        **setting_flags(workload.grpo),
        **_parallel(division),
        **_place(division, lane),
    }


def _weights(model: VimeModel, files: Files) -> dict[str, Any]:
    """Without the flag ``load``, vime starts from the reference weights."""
    if model.checkpoint == "bridge":
        return {"hf-checkpoint": files.model, "ref-load": files.model, "megatron-to-hf-mode": "bridge"}
    return {"hf-checkpoint": files.model, "ref-load": files.checkpoint}


def _parallel(division: Division) -> dict[str, Any]:
    layout, placement = division.layout, division.placement
    return {
        "tensor-model-parallel-size": layout.tensor_parallel,
        "pipeline-model-parallel-size": layout.pipeline_parallel,
        "context-parallel-size": layout.context_parallel,
        "expert-model-parallel-size": layout.expert_parallel,
        "expert-tensor-parallel-size": placement.expert_tensor_parallel,
        **({"sequence-parallel": True} if placement.sequence_parallel else {}),
        "use-dynamic-batch-size": True,
        "max-tokens-per-gpu": placement.max_tokens_per_gpu,
        **(FULL_RECOMPUTE if placement.recompute else {}),
        **(CPU_OPTIMIZER if placement.optimizer_cpu_offload else {}),
    }


def _place(division: Division, lane: str) -> dict[str, Any]:
    """Without these flags vime assumes 8 GPUs per node."""
    placement = division.placement
    where: dict[str, Any] = {
        "actor-num-nodes": division.actor_num_nodes,
        "actor-num-gpus-per-node": division.actor_num_gpus_per_node,
        "num-gpus-per-node": division.layout.gpus_per_node,
    }
    if lane == "train-only":
        return {**where, "rollout-num-gpus": 0}
    where |= {
        "rollout-num-gpus": division.rollout_num_gpus,
        "rollout-num-gpus-per-engine": placement.rollout_num_gpus_per_engine,
        "vllm-gpu-memory-utilization": placement.vllm_gpu_memory_utilization,
    }
    if division.is_colocated:
        where["colocate"] = True
        if not placement.offload:
            where |= {"no-offload-train": True, "no-offload-rollout": True}
    return where


def _lane(plan: Plan, files: Files) -> dict[str, Any]:
    if plan.run.lane == "train-only":
        return _train_only(files)
    return _live(plan, files) | (_forge(files) if plan.run.lane == "fixed-rollout" else {})


def _forge(files: Files) -> dict[str, Any]:
    """With these flags vime replaces the generated rollouts by stored ones."""
    return {"rollout-function-path": FORGE, "load-forge-rollout-data": files.rollouts}


def _train_only(files: Files) -> dict[str, Any]:
    return {
        "debug-train-only": True,
        "load-debug-rollout-data": files.rollouts,
        "disable-rollout-global-dataset": True,
    }


def _live(plan: Plan, files: Files) -> dict[str, Any]:
    data: VimeData = vime_of(plan).data
    reward = {"rm-type": data.rm_type} if data.custom_rm_path is None else {"custom-rm-path": data.custom_rm_path}
    template = {"apply-chat-template": True} if data.apply_chat_template else {}
    return {
        "prompt-data": files.prompts,
        "input-key": data.input_key,
        "label-key": data.label_key,
        **template,
        "rollout-shuffle": True,
        **reward,
    }


def _purpose(plan: Plan, traces: Path) -> dict[str, Any]:
    match vime_of(plan).what_for:
        case "timing" | "largest-microbatch" | "memory-history":
            return {}
        case "agreement" | "deterministic" as purpose:
            # vLLM 0.25.1 refuses to start its deterministic inference with FlashInfer, which vime's own recipe names
            vllm = {"vllm-enable-deterministic-inference": True, "vllm-attention-backend": "TRITON_ATTN"}
            if purpose == "agreement":
                # hooks on vLLM's layers run only where vLLM compiles no graphs
                vllm |= {"vllm-worker-extension-cls": WORKER, "vllm-enforce-eager": True}
            return {"deterministic-mode": True, **({} if plan.run.lane == "train-only" else vllm)}
        case "profiler":
            return _profiling(plan, traces)


def _profiling(plan: Plan, traces: Path) -> dict[str, Any]:
    first = plan.run.measure.warmup_steps
    return {
        "use-pytorch-profiler": True,
        "profile-step-start": first,
        "profile-step-end": first + NUM_PROFILED_STEPS,
        "profile-target": ("train_overall",),
        "tensorboard-dir": traces,
    }


def _to_words(arguments: Mapping[str, Any]) -> list[str]:
    return spell_flags(dict(sorted(arguments.items())))
