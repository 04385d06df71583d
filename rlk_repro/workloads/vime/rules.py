"""Find what vime, Megatron-LM or vLLM would refuse after minutes, or silently change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from rlk_repro.base.errors import Problem
from rlk_repro.base.findings import Finding, Level
from rlk_repro.division import Division, divide, find_least_microbatch, list_microbatches, vime_of
from rlk_repro.plan import Plan
from rlk_repro.workloads.arguments import find_untimed_problems
from rlk_repro.workloads.environment import find_run_problems
from rlk_repro.workloads.vime.arguments import Files, list_decided
from rlk_repro.workloads.vime.memory import estimate_memory

_NO_FILES: Final = Files(model=Path(), checkpoint=Path(), prompts=Path(), rollouts="")
ROOM_GIB: Final = 10.0
"""The driver and NCCL took up to 6 GiB of measured runs, and the estimate erred by up to 4 GiB."""
FULL_OF_WEIGHTS: Final = 0.9
MOST_TOKENS: Final = 10**8  # the largest accepted length of a sequence, far beyond the limit of any model

# A benchmark may not use these flags: they add time to some steps, write checkpoints of hundreds of gigabytes, publish
# results, or change what is trained.
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("eval-interval", "eval-prompt-data", "eval-config", "eval-function-path"), "evaluates between steps"
    ),
    **dict.fromkeys(("save", "save-interval", "save-hf", "async-save", "release-train"), "saves checkpoints"),
    **dict.fromkeys(("profile", "memory-recorder", "record-memory-history"), "profiles; set what_for instead"),
    **dict.fromkeys(("save-debug-train-data", "save-debug-rollout-data", "dump-details"), "writes files between steps"),
    **dict.fromkeys(("use-wandb", "wandb-key", "use-tensorboard"), "publishes results or logs them elsewhere"),
    **dict.fromkeys(("ci-test", "check-weight-update-equal"), "runs checks between steps"),
    **dict.fromkeys(("load", "start-rollout-id", "num-epoch"), "makes the trials of a run differ"),
    **dict.fromkeys(("debug-rollout-only", "rollout-external-engine-addrs"), "leaves out training or generation"),
    **dict.fromkeys(("load-debug-rollout-data-subsample", "partial-rollout"), "changes the training samples"),
    **dict.fromkeys(("loss-type", "custom-loss-function-path"), "replaces the loss that is measured"),
    **dict.fromkeys(("custom-config-path", "yaml-cfg"), "reads more arguments from an unchecked file"),
}
Rule: TypeAlias = Callable[[Plan, Division], Iterator[Problem]]


def find_problems(plan: Plan) -> list[Problem]:
    """Return the problems that ``FIRST_RULES`` find; without any, the problems that ``RULES`` find."""
    division = divide(plan)
    first = [problem for rule in FIRST_RULES for problem in rule(plan, division)]
    return first or [problem for rule in RULES for problem in rule(plan, division)]


def find_warnings(plan: Plan) -> list[Finding]:
    return [*_warn_of_memory(plan), *_warn_of_settings(plan)]


def _where(plan: Plan, name: str) -> str:
    return f"run {plan.run.run}: {name}"


def _layout_place(plan: Plan, name: str) -> str:
    return _where(plan, f"layouts.{plan.hardware.hardware}.{name}")


def _placement_place(plan: Plan, name: str) -> str:
    return _where(plan, f"workload.placements.{plan.hardware.hardware}.{name}")


def _check_platform(plan: Plan, division: Division) -> Iterator[Problem]:
    if not division.num_gpus:
        where = _layout_place(plan, "gpus_per_node")
        yield Problem(where, "vime trains on GPUs", got=division.layout.gpus_per_node, expected="1 or more")
    if "vime" not in plan.stack.pins:
        where, hint = f"stack {plan.stack.stack}: pins.vime", "--stack 2026-07"
        yield Problem(where, "missing, but needed to check the flags", expected="a commit", hint=hint)


def _check_division(plan: Plan, division: Division) -> Iterator[Problem]:
    layout, number = division.layout, division.placement.rollout_num_gpus
    where = _placement_place(plan, "rollout_num_gpus")
    if layout.num_nodes == 1 and number >= layout.gpus_per_node > 0:
        yield Problem(where, "leaves no GPU for the training", got=number, expected=f"less than {layout.gpus_per_node}")
    elif layout.num_nodes > 1 and (number % max(layout.gpus_per_node, 1) or number >= division.num_gpus):
        expected = f"a multiple of {layout.gpus_per_node} (whole nodes), below {division.num_gpus}"
        yield Problem(where, "this number of GPUs cannot be taken from these nodes", got=number, expected=expected)


def _check_parallel(plan: Plan, division: Division) -> Iterator[Problem]:
    number = division.actor_num_gpus
    if number % division.model_parallel:
        what = f"the product of tensor, pipeline and context parallel sizes is {division.model_parallel}"
        yield Problem(_layout_place(plan, "tensor_parallel"), what, expected=f"a divisor of the {number} training GPUs")
    if number % division.expert_model_parallel:
        what = f"the product of expert, expert tensor and pipeline parallel sizes is {division.expert_model_parallel}"
        yield Problem(_layout_place(plan, "expert_parallel"), what, expected=f"a divisor of the {number} training GPUs")


FIRST_RULES: Final[tuple[Rule, ...]] = (_check_platform, _check_division, _check_parallel)


def _check_model(plan: Plan, division: Division) -> Iterator[Problem]:
    model, layout = vime_of(plan).model, division.layout
    splits = [
        ("tensor_parallel", "num-attention-heads", layout.tensor_parallel),
        ("tensor_parallel", "num-query-groups", layout.tensor_parallel),
        ("pipeline_parallel", "num-layers", layout.pipeline_parallel),
        ("expert_parallel", "num-experts", layout.expert_parallel),
    ]
    for name, flag, parts in splits:
        size = model.size(flag)
        if size and size % parts:
            yield Problem(
                _layout_place(plan, name), f"does not divide {flag}", got=parts, expected=f"a divisor of {size}"
            )
    placement = division.placement
    sizes = {"expert_parallel": layout.expert_parallel, "expert_tensor_parallel": placement.expert_tensor_parallel}
    if not model.num_experts and max(sizes.values()) > 1:
        yield Problem(_layout_place(plan, "expert_parallel"), "a dense model has no experts",
                      got=sizes, expected="1 for both settings")  # fmt: skip
    if model.num_experts and layout.tensor_parallel > 1 and not placement.sequence_parallel:
        yield Problem(_placement_place(plan, "sequence_parallel"), "experts with tensor parallelism need this setting",
                      got=False, expected="true")  # fmt: skip


def _check_batch(plan: Plan, division: Division) -> Iterator[Problem]:
    size = vime_of(plan).grpo.global_batch_size
    if size % division.data_parallel:
        yield Problem(_where(plan, "workload.grpo.global_batch_size"), "does not fit the number of data parallel ranks",
                      got=size, expected=f"a multiple of {division.data_parallel}")  # fmt: skip


def _check_tokens(plan: Plan, division: Division) -> Iterator[Problem]:
    workload, most = vime_of(plan), division.placement.max_tokens_per_gpu
    longest, fewest = workload.grpo.max_sample_len, find_least_microbatch(plan)
    if most < fewest:
        what = f"is too small for the longest sample ({longest} tokens)"
        where = _placement_place(plan, "max_tokens_per_gpu")
        yield Problem(where, what, got=most, expected=f"{fewest} or more")
    model_len = _written(plan, "vllm-max-model-len")
    # an agreement run gives vLLM each sample as a prompt, and vLLM then needs room for one more token
    least = longest + (workload.what_for == "agreement")
    # vLLM also accepts texts such as "8k", which this rule refuses.
    if model_len is not None and not (isinstance(model_len, int) and least <= model_len <= MOST_TOKENS):
        what = f"does not fit the longest sample ({longest} tokens)"
        yield Problem(_where(plan, "workload.arguments.vllm-max-model-len"), what, got=model_len,
                      expected=f"a number from {least} to {MOST_TOKENS}")  # fmt: skip

    padding = _written(plan, "data-pad-size-multiplier")
    if padding is not None and not (isinstance(padding, int) and 1 <= padding <= most):
        yield Problem(_where(plan, "workload.arguments.data-pad-size-multiplier"), "does not fit a microbatch",
                      got=padding, expected=f"a number from 1 to {most}")  # fmt: skip


def _check_engines(plan: Plan, division: Division) -> Iterator[Problem]:
    if not vime_of(plan).generates(plan.run.lane):
        return
    size, layout = division.placement.rollout_num_gpus_per_engine, division.layout
    where = _placement_place(plan, "rollout_num_gpus_per_engine")
    if division.rollout_num_gpus % size:
        expected = f"a divisor of the {division.rollout_num_gpus} GPUs that generate"
        yield Problem(where, "does not divide the number of GPUs that generate", got=size, expected=expected)
    elif size % layout.gpus_per_node and layout.gpus_per_node % size:
        expected = f"a divisor or a multiple of {layout.gpus_per_node}"
        yield Problem(where, "engines of this size cannot share a node's GPUs", got=size, expected=expected)


def _check_experts(plan: Plan, division: Division) -> Iterator[Problem]:  # noqa: ARG001
    """Refuse vLLM kernels that choose experts themselves: they report expert 0, and vime would replay that expert.

    https://github.com/vllm-project/vllm/issues/44116
    """
    workload = vime_of(plan)
    if not workload.grpo.use_rollout_routing_replay or not workload.generates(plan.run.lane):
        return
    kernel = _written(plan, "vllm-moe-backend")
    if kernel != "triton":
        what = "is not known to report the chosen experts, which routing replay needs"
        yield Problem(_where(plan, "workload.arguments.vllm-moe-backend"), what, got=kernel, expected="triton")


def _check_rollouts(plan: Plan, division: Division) -> Iterator[Problem]:  # noqa: ARG001
    """If a file is missing, vime silently loads file 0 instead."""
    stored = vime_of(plan).rollouts
    if stored is None:
        return
    where = _where(plan, "workload.rollouts")
    if plan.run.lane == "live":
        yield Problem(
            where, "the live lane generates its own rollouts", got=stored.name, expected="no rollouts, or another lane"
        )
    elif stored.num_files < plan.run.measure.num_stored:
        yield Problem(f"{where}.num_files", "is too small: vime would train on file 0 again", got=stored.num_files,
                      expected=f"{plan.run.measure.num_stored} or more, one per step")  # fmt: skip


def _check_arguments(plan: Plan, division: Division) -> Iterator[Problem]:  # noqa: ARG001
    decided = list_decided(plan, _NO_FILES, Path())
    written = [(f"workload.{'.'.join(place)}.", flags) for place, flags in vime_of(plan).all_arguments()]
    own = [name[2:] for name in plan.switches if name.startswith("--")]
    for place, flags in (*written, ("switch.--", sorted(own))):
        for flag in flags:
            where = _where(plan, f"{place}{flag}")
            if flag in decided:
                yield Problem(where, "follows from other settings", expected="a run without this flag")
            elif flag in REFUSED:
                yield Problem(where, REFUSED[flag], expected="a run without this flag")


def _check_env(plan: Plan, division: Division) -> Iterator[Problem]:
    yield from find_run_problems(_placement_place(plan, "env"), division.placement.env)


def _check_growth(plan: Plan, division: Division) -> Iterator[Problem]:
    """In every step, the samples of a data parallel rank must fit in one microbatch."""
    microbatches, most = list_microbatches(plan), division.placement.max_tokens_per_gpu
    (first, _), (last, num_tokens) = microbatches[0], microbatches[-1]
    if most < num_tokens:
        yield Problem(_placement_place(plan, "max_tokens_per_gpu"), "does not hold the longest samples of a step",
                      got=most, expected=f"{num_tokens} or more")  # fmt: skip
    if first < 1:
        what = f"is too large for {len(microbatches)} rollouts of at most {last} tokens a response"
        yield Problem(_where(plan, "workload.rollouts_growth"), what, got=vime_of(plan).rollouts_growth,
                      expected=f"at most {(last - 1) // (len(microbatches) - 1)}")  # fmt: skip
    if plan.run.lane != "train-only":
        what = "does not fit what_for: largest-microbatch, whose rollouts prepare makes"
        yield Problem(_where(plan, "lane"), what, got=plan.run.lane, expected="train-only")


def _check_purpose(plan: Plan, division: Division) -> Iterator[Problem]:
    yield from find_untimed_problems(plan)
    what_for = vime_of(plan).what_for
    if what_for == "memory-history":
        expected = "largest-microbatch, or a profiler of your own"
        where = _where(plan, "workload.what_for")
        yield Problem(where, "was removed in version 0.3", got=what_for, expected=expected)
    if what_for == "agreement" and vime_of(plan).grpo.num_steps_per_rollout == 1:
        where = _where(plan, "workload.grpo.num_steps_per_rollout")
        what = "with 1 step per rollout, vime skips the old-policy pass, but agreement runs record this pass"
        yield Problem(where, what, got=1, expected="2 or more")
    if vime_of(plan).fills_memory:
        yield from _check_growth(plan, division)
    is_deterministic = what_for in {"agreement", "deterministic"}
    if is_deterministic and plan.hardware.platform == "rocm" and plan.run.lane != "train-only":
        where = _where(plan, "workload.what_for")
        # vLLM 0.25.1 and the ROCm commit have this limit, which https://github.com/vllm-project/vllm/pull/52231 lifts.
        what = "the pinned vLLM has deterministic inference for NVIDIA GPUs only"
        yield Problem(where, what, got=what_for, expected="another value, or lane train-only")


def _check_operators(plan: Plan, division: Division) -> Iterator[Problem]:  # noqa: ARG001
    if plan.run.rl_kernel.mode != "require" or not plan.routed:
        return
    for op, reason in plan.explain_operators().items():
        if reason:
            what = f"is required, but not eligible here ({reason})"
            expected = f"rl_kernel.ops_on.{plan.hardware.hardware} without {op}"
            yield Problem(_where(plan, f"rl_kernel.ops: {op}"), what, expected=expected)


RULES: Final[tuple[Rule, ...]] = (
    _check_operators,
    _check_model,
    _check_batch,
    _check_tokens,
    _check_engines,
    _check_experts,
    _check_rollouts,
    _check_arguments,
    _check_env,
    _check_purpose,
)


def _written(plan: Plan, flag: str) -> Any:
    return vime_of(plan).arguments_on(plan.hardware.hardware).get(flag)


def _warn_of_memory(plan: Plan) -> Iterator[Finding]:
    estimate, limit = estimate_memory(plan), plan.hardware.gpu_memory_gib
    division = divide(plan)
    train = estimate.reserved_gib
    if division.is_colocated and not division.placement.offload and plan.run.lane != "train-only":
        train += division.placement.vllm_gpu_memory_utilization * limit
    if train > limit - ROOM_GIB and not vime_of(plan).fills_memory:
        found, most = f"about {train:.0f} GiB ({estimate})", f"at most {limit - ROOM_GIB:.0f} GiB"
        yield Finding(Level.WARNING, "memory of a training GPU", most, found)
    room = division.placement.vllm_gpu_memory_utilization * limit
    if plan.run.lane != "train-only" and estimate.engine_weights_gib > FULL_OF_WEIGHTS * room:
        found = f"about {estimate.engine_weights_gib:.0f} GiB of weights"
        yield Finding(Level.WARNING, "memory of an engine's GPU", f"weights well below {room:.0f} GiB", found)


def _warn_of_settings(plan: Plan) -> Iterator[Finding]:
    workload = vime_of(plan)
    if workload.grpo.num_steps_per_rollout == 1:
        found = "1: vime skips the old-policy pass and every ratio is 1"
        yield Finding(Level.WARNING, "num_steps_per_rollout", "2 or more to measure log-prob and ratio time", found)
    if not workload.grpo.use_kl_loss:
        yield Finding(Level.WARNING, "use_kl_loss", "true to measure the reference pass", "false")
    for what, source in (("model", workload.model.source), ("data", workload.data.source)):
        if source.kind == "hub" and source.revision is None:
            found = "not pinned: the hub's current revision is used and recorded"
            yield Finding(Level.WARNING, f"workload.{what}.source.revision", "a commit", found)
