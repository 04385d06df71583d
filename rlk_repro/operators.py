"""The operators of each implementation: the calls that each serves, its platforms and its accepted classes.

``OPERATORS`` are RL-Kernel's.  For an unknown name RL-Kernel returns a native operator (plain
PyTorch), so the returned class is always checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from rlk_repro.loss_options import LossOptions

OPS_SCHEMA: Final = 1
RL_KERNEL: Final = "rl-kernel"
TORCH_COMPILE: Final = "torch-compile"
TRAINER: Final = "trainer"
TITLES: Final = {RL_KERNEL: "RL-Kernel", TORCH_COMPILE: "torch.compile"}
"""What can serve the trainer's operators in its place, and the name of each in sentences."""


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
    OTHER_CLASS = "RL-Kernel would silently call another of its classes"
    STREAM = "its kernel runs on the device's default stream only"


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
    native implementation is plain PyTorch; a run that uses it gets no verdict on speed.  ``registered`` is the name in
    RL-Kernel's registry, if it is not the operator's own.
    """

    class_name: str
    backend: str
    registered: str = ""
    is_native: bool = False
    needs_whole_vocabulary: bool = False
    symbols: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    platform: str
    tensor_parallel: int = 1
    context_parallel: int = 1
    loss: LossOptions = field(default_factory=LossOptions)
    has_entropy_metric: bool = True
    has_output_layer: bool = True
    commit: str = ""
    """The commit of RL-Kernel that the stack pins; empty if the stack pins none."""


Rule: TypeAlias = Callable[[Case], Refusal | None]


def _needs_no_grad_pass(case: Case) -> Refusal | None:
    return None if case.loss.has_no_grad_pass else Refusal(Reason.NO_SUCH_CALL)


def _needs_no_entropy_gradient(case: Case) -> Refusal | None:
    return Refusal(Reason.ENTROPY_GRADIENT) if case.loss.has_entropy_gradient else None


def _needs_every_column(case: Case) -> Refusal | None:
    return Refusal(Reason.TOP_P_REPLAY) if case.loss.is_top_p_replayed else None


def _needs_whole_vocabulary(case: Case) -> Refusal | None:
    size = case.tensor_parallel
    return Refusal(Reason.TENSOR_PARALLEL, f"tensor parallel size {size}") if size > 1 else None


def _needs_one_rank(case: Case) -> Refusal | None:
    if case.context_parallel > 1 and case.tensor_parallel == 1:
        return Refusal(Reason.CONTEXT_PARALLEL, f"context parallel size {case.context_parallel}")
    return _needs_whole_vocabulary(case)


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
    served_by: str = RL_KERNEL

    def serves(self, *, needs_grad: bool) -> bool:
        return self.calls is Calls.ALL or (self.calls is Calls.GRAD) == needs_grad

    def list_offered(self, platform: str, commit: str) -> tuple[Implementation, ...]:
        """Return the implementations on a platform; those that a pinned commit of RL-Kernel lacks are left out."""
        offered = self.implementations.get(platform, ())
        if HAS_BATCH_INVARIANT_LOGP.get(commit, True):
            return offered
        return tuple(item for item in offered if item.registered != BATCH_INVARIANT_LOGP)

    def find_registered(self, backends: Container[str]) -> str:
        """Return the name to ask RL-Kernel's registry for; ``backends`` are the members of its enum ``OpBackend``."""
        for implementations in self.implementations.values():
            for item in implementations:
                if item.registered and item.backend in backends:
                    return item.registered
        return self.name

    def find_implementation(self, platform: str, name: str) -> Implementation | None:
        accepted = self.implementations.get(platform, ())
        return next((item for item in accepted if name in {item.class_name, item.backend}), None)


def _native(class_name: str, backend: str) -> tuple[Implementation, ...]:
    return (Implementation(class_name, backend, is_native=True),)


BATCH_INVARIANT_LOGP: Final = "batch_invariant_logp"
"""The registry's name of RL-Kernel's newer log-prob, which has a gradient.  Where an RL-Kernel has it, it serves the
calls of ``logp`` and of ``ratio_kl``.
"""
HAS_BATCH_INVARIANT_LOGP: Final[Mapping[str, bool]] = {
    "202f0e30e56729d10f74586e37166fac91c00ac6": False,
    "027c8095357e4a9d32ebaa6ed1985dc93dacc028": True,
}
"""Whether a commit of RL-Kernel has it, for the commits that stacks pin."""
SM90_BATCH_INVARIANT: Final = "BatchInvariantLogpSM90Op"
_SM90_BATCH_INVARIANT_SYMBOL: Final = "batch_invariant_logp_sm90"


def _batch_invariant(*backward: str) -> dict[str, tuple[Implementation, ...]]:
    """Return the classes of ``batch_invariant_logp`` by platform; ``backward`` is the kernel of the backward pass."""
    sm90 = Implementation(
        SM90_BATCH_INVARIANT,
        "CUDA_BATCH_INVARIANT_LOGP_SM90",
        registered=BATCH_INVARIANT_LOGP,
        symbols=(_SM90_BATCH_INVARIANT_SYMBOL,),
        kernels=(f"{_SM90_BATCH_INVARIANT_SYMBOL}_kernel", *backward),
    )
    triton = Implementation(
        "TritonBatchInvariantLogpOp",
        "TRITON_BATCH_INVARIANT_LOGP",
        registered=BATCH_INVARIANT_LOGP,
        kernels=("_batch_invariant_logp_kernel", *backward),
    )
    native = Implementation(
        "NativeBatchInvariantLogpOp", "PYTORCH_BATCH_INVARIANT_LOGP", registered=BATCH_INVARIANT_LOGP, is_native=True
    )
    return {Platform.CUDA: (sm90, triton), Platform.ROCM: (triton,), Platform.CPU: (native,)}


_NO_GRAD_BATCH_INVARIANT: Final = _batch_invariant()
# the backward pass is Triton's in both classes
_GRAD_BATCH_INVARIANT: Final = _batch_invariant("_batch_invariant_logp_bwd_kernel")
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
                    *_NO_GRAD_BATCH_INVARIANT[Platform.CUDA],
                ),
                Platform.ROCM: _NO_GRAD_BATCH_INVARIANT[Platform.ROCM],
                Platform.CPU: (
                    *_native("NativeLogpOp", "PYTORCH_NATIVE"),
                    *_NO_GRAD_BATCH_INVARIANT[Platform.CPU],
                ),
            },
            rules=(_needs_no_grad_pass, _needs_every_column),
        ),
        Operator(
            name="ratio_kl",
            function=_SELECTED_LOG_PROBS,
            calls=Calls.GRAD,
            implementations={
                Platform.CUDA: (*_TRITON_RATIO_KL, *_GRAD_BATCH_INVARIANT[Platform.CUDA]),
                Platform.ROCM: (*_TRITON_RATIO_KL, *_GRAD_BATCH_INVARIANT[Platform.ROCM]),
                Platform.CPU: (
                    *_native("NativeRatioKLOp", "PYTORCH_RATIO_KL"),
                    *_GRAD_BATCH_INVARIANT[Platform.CPU],
                ),
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
KERNELS: Final = frozenset(
    part
    for operator in OPERATORS.values()
    for implementations in operator.implementations.values()
    for item in implementations
    for part in item.kernels
)
"""Parts of the names of all of RL-Kernel's kernels in the table."""
DEFAULT_OPS: Final = tuple(name for name, operator in OPERATORS.items() if not operator.is_opt_in)
COMPILED_LOGP: Final = "compiled_logp"
_INDUCTOR: Final = (Implementation("torch.compile", "inductor"),)
ALL_OPERATORS: Final[Mapping[str, Operator]] = {
    **OPERATORS,
    COMPILED_LOGP: Operator(
        name=COMPILED_LOGP,
        function=_SELECTED_LOG_PROBS,
        calls=Calls.ALL,
        implementations=dict.fromkeys(Platform, _INDUCTOR),
        rules=(_needs_whole_vocabulary, _needs_no_entropy_gradient, _needs_every_column),
        is_opt_in=True,
        served_by=TORCH_COMPILE,
    ),
}


def is_of_other(op: str, reason: str) -> bool:
    """Whether a decision on ``op`` lets another implementation than RL-Kernel serve; a fallback has a reason."""
    return not reason and op in ALL_OPERATORS and ALL_OPERATORS[op].served_by != RL_KERNEL


def name_implementations(ops: Iterable[str]) -> str:
    """Return what serves these operators, like ``RL-Kernel and torch.compile``; RL-Kernel without a known operator."""
    found = dict.fromkeys(TITLES[ALL_OPERATORS[op].served_by] for op in ops if op in ALL_OPERATORS)
    return " and ".join(found) or TITLES[RL_KERNEL]


def find_refusal(op: str, case: Case) -> Refusal | None:
    """Return the first reason, apart from missing software, why ``op`` cannot run in this case; None if it can run."""
    operator = ALL_OPERATORS[op]
    offered = operator.list_offered(case.platform, case.commit)
    if not offered:
        pinned = f", RL-Kernel {case.commit[:12]}" if case.platform in operator.implementations else ""
        return Refusal(Reason.PLATFORM, f"{case.platform}{pinned}")
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
    return [(one, other) for one, other in itertools.combinations(sorted(set(ops)), 2) if _exclude(one, other)]


def _exclude(one: str, other: str) -> bool:
    first, second = ALL_OPERATORS[one], ALL_OPERATORS[other]
    return other in first.excludes or one in second.excludes or first.served_by != second.served_by
