"""RL-Kernel's operators: the calls that each operator serves, its platforms and its RL-Kernel classes.

For an unknown name RL-Kernel returns a native operator (plain PyTorch), so the returned class is always checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

OPS_SCHEMA: Final = 1


class Platform(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"


class Reason(StrEnum):
    """The reasons to refuse an operator before it is called; errors in the operator's calls are not refusals."""

    PLATFORM = "has no accepted implementation on this platform"
    TENSOR_PARALLEL = "needs the whole vocabulary on one rank"
    CONTEXT_PARALLEL = "needs whole sequences on one rank"
    NO_SUCH_CALL = "this run needs no reference or old-policy pass"
    ENTROPY_GRADIENT = "computes no gradient of the entropy bonus"
    ENTROPY_METRIC = "does not compute the entropy that this run reports"
    TOP_P_REPLAY = "cannot leave out the columns that top-p sampling removed"
    TEMPERATURE = "would round the hidden states after dividing them by the temperature"
    LOSS_OPTIONS = "does not support these loss options"
    LOSS_TYPE = "serves the policy loss only"
    OUTPUT_LAYER = "needs access to the hidden states before the output layer"
    LOGITS = "needs hidden states, and this call has logits"
    NOT_IMPORTABLE = "RL-Kernel cannot be imported"
    NOT_ACCEPTED = "resolved to an implementation that is not accepted"
    GENERATION = "is not in this version of RL-Kernel"
    NOT_DISPATCHED = "RL-Kernel's own dispatch refuses the operator"
    DTYPE = "does not accept logits of this dtype"
    DEVICE = "needs the logits on the device for which RL-Kernel chose the operator"
    FOREIGN_ID = "a token id lies outside the vocabulary"
    NEGATIVE_INFINITY = "logits of -inf would become NaN in its kernels"


class Calls(StrEnum):
    NO_GRAD = "without gradient"
    GRAD = "with gradient"
    ALL = "all"


@dataclass(frozen=True)
class Refusal:
    reason: Reason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else str(self.reason)


@dataclass(frozen=True)
class Implementation:
    """An operator class of RL-Kernel; ``backend`` is its name in RL-Kernel's ``OpBackend`` or dispatch.

    ``symbols`` are compiled functions that must exist; ``kernels`` are substrings of the class's kernel names.  A
    native implementation is plain PyTorch; a run that uses it gets no verdict on speed.
    """

    class_name: str
    backend: str
    is_native: bool = False
    needs_whole_vocabulary: bool = False
    symbols: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The loss options that decide which operators compute exactly the run's loss; the defaults are vime's."""

    has_no_grad_pass: bool = True
    has_entropy_gradient: bool = False
    is_top_p_replayed: bool = False
    is_clip_symmetric: bool = True
    kl_loss_type: str | None = None
    has_other_terms: bool = False
    loss_type: str = "policy_loss"
    rollout_temperature: float = 1.0
    has_multi_token_prediction: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    platform: str
    tensor_parallel: int = 1
    context_parallel: int = 1
    loss: LossOptions = LossOptions()
    has_entropy_metric: bool = True
    has_output_layer: bool = True


Rule: TypeAlias = Callable[[Case], Refusal | None]


def _needs_no_grad_pass(case: Case) -> Refusal | None:
    return None if case.loss.has_no_grad_pass else Refusal(Reason.NO_SUCH_CALL)


def _needs_no_entropy_gradient(case: Case) -> Refusal | None:
    return Refusal(Reason.ENTROPY_GRADIENT) if case.loss.has_entropy_gradient else None


def _needs_every_column(case: Case) -> Refusal | None:
    return Refusal(Reason.TOP_P_REPLAY) if case.loss.is_top_p_replayed else None


def _needs_one_rank(case: Case) -> Refusal | None:
    if case.tensor_parallel > 1:
        return Refusal(Reason.TENSOR_PARALLEL, f"tensor parallel size {case.tensor_parallel}")
    if case.context_parallel > 1:
        return Refusal(Reason.CONTEXT_PARALLEL, f"context parallel size {case.context_parallel}")
    return None


def _needs_plain_loss(case: Case) -> Refusal | None:
    if not case.loss.is_clip_symmetric:
        return Refusal(Reason.LOSS_OPTIONS, "asymmetric clip")
    if case.loss.kl_loss_type is not None:
        return Refusal(Reason.LOSS_OPTIONS, f"KL type {case.loss.kl_loss_type} from stored log-probs")
    return Refusal(Reason.LOSS_OPTIONS, "correction terms") if case.loss.has_other_terms else None


def _needs_output_layer(case: Case) -> Refusal | None:
    if not case.has_output_layer:
        return Refusal(Reason.OUTPUT_LAYER, "this workload has no output layer")
    return Refusal(Reason.OUTPUT_LAYER, "multi-token prediction") if case.loss.has_multi_token_prediction else None


def _needs_policy_loss(case: Case) -> Refusal | None:
    return None if case.loss.loss_type == "policy_loss" else Refusal(Reason.LOSS_TYPE, case.loss.loss_type)


def _needs_no_entropy_metric(case: Case) -> Refusal | None:
    return Refusal(Reason.ENTROPY_METRIC) if case.has_entropy_metric else None


def _needs_no_temperature(case: Case) -> Refusal | None:
    value = case.loss.rollout_temperature
    return None if value == 1 else Refusal(Reason.TEMPERATURE, f"{value:g}")


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator; ``implementations`` holds, by platform, the classes that count as RL-Kernel."""

    name: str
    function: str
    calls: Calls
    implementations: Mapping[str, tuple[Implementation, ...]]
    rules: tuple[Rule, ...] = ()
    excludes: frozenset[str] = frozenset()
    is_opt_in: bool = False

    def serves(self, *, needs_grad: bool) -> bool:
        return self.calls is Calls.ALL or (self.calls is Calls.GRAD) == needs_grad

    def find_implementation(self, platform: str, name: str) -> Implementation | None:
        accepted = self.implementations.get(platform, ())
        return next((item for item in accepted if name in {item.class_name, item.backend}), None)


def _native(class_name: str, backend: str) -> tuple[Implementation, ...]:
    return (Implementation(class_name, backend, is_native=True),)


_ONLINE_LOGP: Final = ("fused_logp", "fused_logp_forward_online_fp32")
_ONLINE_KERNEL: Final = ("fused_logp_forward_online_kernel",)
_SELECTED_LOG_PROBS: Final = "calculate_log_probs_and_entropy"
_TRITON_LINEAR_LOGP: Final = Implementation(
    "TritonLinearLogpOp", "TRITON_LINEAR_LOGP", needs_whole_vocabulary=True, kernels=("_linear_logp_fwd_kernel",)
)
_SM90_SYMBOL: Final = "fused_linear_logp_sm90"
_SM90_LINEAR_LOGP: Final = Implementation(
    "FusedLinearLogpSM90Op", "CUDA_FUSED_LINEAR_LOGP_SM90", symbols=(_SM90_SYMBOL,), kernels=(f"{_SM90_SYMBOL}_kernel",)
)
_RATIO_KL_KERNELS: Final = ("_ratio_kl_fwd_kernel", "_ratio_kl_bwd_kernel")
_TRITON_RATIO_KL: Final = (Implementation("TritonRatioKLOp", "TRITON_RATIO_KL", kernels=_RATIO_KL_KERNELS),)
_TRITON_GRPO_LOSS: Final = (Implementation("TritonGRPOLossOp", "TRITON_GRPO_LOSS", kernels=_RATIO_KL_KERNELS),)
_HIP_LOGP: Final = ("hip_deterministic_logp_tile_stats", "hip_deterministic_logp_backward")
_VOCAB_PARALLEL_KERNELS: Final = ("_vocab_tile_stats_kernel", "_vocab_logp_backward_kernel")
_TRITON_VOCAB_PARALLEL_LOGP: Final = Implementation(
    "TritonVocabParallelLogprobOp", "triton-vocab-parallel-logp-ws2", kernels=_VOCAB_PARALLEL_KERNELS
)

OPERATORS: Final[Mapping[str, Operator]] = {
    operator.name: operator
    for operator in (
        Operator(
            name="logp",
            function=_SELECTED_LOG_PROBS,
            calls=Calls.NO_GRAD,
            implementations={
                Platform.CUDA: (
                    Implementation(
                        "FusedLogpGenericOp", "CUDA_FUSED_LOGP_GENERIC", symbols=_ONLINE_LOGP, kernels=_ONLINE_KERNEL
                    ),
                    Implementation(
                        "FusedLogpSM90Op", "CUDA_FUSED_LOGP_SM90", symbols=_ONLINE_LOGP, kernels=_ONLINE_KERNEL
                    ),
                ),
                Platform.CPU: _native("NativeLogpOp", "PYTORCH_NATIVE"),
            },
            rules=(_needs_no_grad_pass, _needs_every_column),
        ),
        Operator(
            name="ratio_kl",
            function=_SELECTED_LOG_PROBS,
            calls=Calls.GRAD,
            implementations={
                Platform.CUDA: _TRITON_RATIO_KL,
                Platform.ROCM: _TRITON_RATIO_KL,
                Platform.CPU: _native("NativeRatioKLOp", "PYTORCH_RATIO_KL"),
            },
            rules=(_needs_no_entropy_gradient, _needs_every_column),
        ),
        Operator(
            name="grpo_loss",
            function="policy_loss_function",
            calls=Calls.GRAD,
            implementations={
                Platform.CUDA: _TRITON_GRPO_LOSS,
                Platform.ROCM: _TRITON_GRPO_LOSS,
                Platform.CPU: _native("NativeGRPOLossOp", "PYTORCH_GRPO_LOSS"),
            },
            rules=(_needs_one_rank, _needs_no_entropy_gradient, _needs_every_column, _needs_plain_loss),
            excludes=frozenset({"ratio_kl", "linear_logp"}),
            is_opt_in=True,
        ),
        Operator(
            name="linear_logp",
            function=_SELECTED_LOG_PROBS,
            calls=Calls.ALL,
            implementations={
                Platform.CUDA: (_TRITON_LINEAR_LOGP, _SM90_LINEAR_LOGP),
                Platform.ROCM: (_TRITON_LINEAR_LOGP,),
                Platform.CPU: _native("NativeLinearLogpOp", "PYTORCH_LINEAR_LOGP"),
            },
            rules=(
                _needs_output_layer,
                _needs_policy_loss,
                _needs_no_entropy_gradient,
                _needs_no_entropy_metric,
                _needs_every_column,
                _needs_no_temperature,
            ),
            excludes=frozenset({"logp", "ratio_kl", "grpo_loss"}),
            is_opt_in=True,
        ),
        Operator(
            name="vocab_parallel_logp",
            function=_SELECTED_LOG_PROBS,
            calls=Calls.ALL,
            implementations={
                Platform.CUDA: (_TRITON_VOCAB_PARALLEL_LOGP,),
                Platform.ROCM: (
                    Implementation("RocmVocabParallelLogprobOp", "rocm-vocab-parallel-logp-ws2", symbols=_HIP_LOGP),
                    _TRITON_VOCAB_PARALLEL_LOGP,
                ),
                Platform.CPU: _native("VocabParallelLogprobOp", "pytorch-vocab-parallel-logp-ws2"),
            },
            rules=(_needs_no_entropy_gradient, _needs_every_column),
            excludes=frozenset({"logp", "ratio_kl", "grpo_loss", "linear_logp"}),
            is_opt_in=True,
        ),
    )
}
DEFAULT_OPS: Final = tuple(name for name, operator in OPERATORS.items() if not operator.is_opt_in)


def find_refusal(op: str, case: Case) -> Refusal | None:
    """Return the first reason, apart from missing software, why ``op`` cannot run in this case; None if it can run."""
    operator = OPERATORS[op]
    offered = operator.implementations.get(case.platform)
    if offered is None:
        return Refusal(Reason.PLATFORM, case.platform)
    refusals = (rule(case) for rule in operator.rules)
    first = next((refusal for refusal in refusals if refusal is not None), None)
    return first or find_split_refusal(offered, case)


def find_split_refusal(implementations: Sequence[Implementation], case: Case) -> Refusal | None:
    if case.tensor_parallel == 1 or not all(item.needs_whole_vocabulary for item in implementations):
        return None
    what = f"{implementations[0].class_name} is plain PyTorch with tensor parallel size {case.tensor_parallel}"
    return Refusal(Reason.TENSOR_PARALLEL, what)


def find_conflicts(ops: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs of operators that would serve the same call, each pair once."""
    names = sorted(set(ops))
    return [
        (one, other)
        for one in names
        for other in names
        if one < other and (other in OPERATORS[one].excludes or one in OPERATORS[other].excludes)
    ]


def read_loss_options(options: Mapping[str, Any]) -> LossOptions:
    """Read a trainer's options, by vime's argument names; an absent option has vime's default."""
    kl_loss_coef = options.get("kl_loss_coef") or 0.0
    return LossOptions(
        has_no_grad_pass=_has_reference_pass(options) or has_old_policy_pass(options),
        has_entropy_gradient=bool(options.get("entropy_coef")),
        is_top_p_replayed=options.get("rollout_top_p", 1.0) != 1.0,
        is_clip_symmetric=options.get("eps_clip_high") in {None, options.get("eps_clip", 0.2)},
        kl_loss_type=options.get("kl_loss_type", "k1") if options.get("use_kl_loss") and kl_loss_coef else None,
        has_other_terms=any(options.get(name) for name in _CORRECTIONS) or not _is_plain_estimator(options),
        loss_type=options.get("loss_type", "policy_loss"),
        rollout_temperature=options.get("rollout_temperature", 1.0),
        has_multi_token_prediction=bool(options.get("mtp_num_layers")),
    )


_ADVANTAGES: Final = "compute_advantages_and_returns"
_CORRECTIONS: Final = (
    "use_tis", "use_opsm", "use_opd", "use_unbiased_kl", "get_mismatch_metrics", "custom_pg_loss_reducer_function_path"
)  # fmt: skip


def _is_plain_estimator(options: Mapping[str, Any]) -> bool:
    named = (options.get("loss_type", "policy_loss"), options.get("advantage_estimator", "grpo"))
    return named == ("policy_loss", "grpo")


def _has_reference_pass(options: Mapping[str, Any]) -> bool:
    return bool(options.get(_ADVANTAGES, True) and any(map(options.get, ("use_kl_loss", "kl_coef", "use_opd"))))


def has_old_policy_pass(options: Mapping[str, Any]) -> bool:
    """Whether vime runs an old-policy pass with these options."""
    has_stored = options.get("use_rollout_logprobs") and not options.get("get_mismatch_metrics")
    if has_stored or not options.get(_ADVANTAGES, True):
        return False
    obstacles = ("get_mismatch_metrics", "keep_old_actor", "use_critic", "use_opd", "kl_coef")
    return (
        _num_steps_per_rollout(options) > 1
        or any(options.get(name) for name in obstacles)
        or options.get("loss_type", "policy_loss") != "policy_loss"
        or options.get("advantage_estimator") in {"gspo", "ppo"}
        or bool(options.get("use_routing_replay") and not options.get("use_rollout_routing_replay"))
    )


def _num_steps_per_rollout(options: Mapping[str, Any]) -> int:
    if options.get("num_steps_per_rollout"):
        return int(options["num_steps_per_rollout"])
    num_samples = options.get("rollout_batch_size", 0) * options.get("n_samples_per_prompt", 1)
    return int(num_samples // options["global_batch_size"]) if options.get("global_batch_size") else 1
