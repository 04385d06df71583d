"""The operators of each implementation: the calls that each serves, its platforms and its accepted classes.

``OPERATORS`` are RL-Kernel's.  For an unknown name RL-Kernel returns a native operator (plain
PyTorch), so the returned class is always checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

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
    """An operator class of RL-Kernel; ``backend`` is its name in RL-Kernel's ``OpBackend``.

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


def _find_obstacles(case: Case) -> list[Refusal]:
    """Return what could keep an operator from serving a case; each operator names the reasons that concern it."""
    loss, ranks, parts = case.loss, case.tensor_parallel, case.context_parallel
    found = (
        (not loss.has_no_grad_pass, Reason.NO_SUCH_CALL, ""),
        (parts > 1 and ranks == 1, Reason.CONTEXT_PARALLEL, f"context parallel size {parts}"),
        (ranks > 1, Reason.TENSOR_PARALLEL, f"tensor parallel size {ranks}"),
        (not case.has_output_layer, Reason.OUTPUT_LAYER, "this workload has no output layer"),
        (loss.has_multi_token_prediction, Reason.OUTPUT_LAYER, "multi-token prediction"),
        (loss.loss_type != "policy_loss", Reason.LOSS_TYPE, loss.loss_type),
        (loss.has_entropy_gradient, Reason.ENTROPY_GRADIENT, ""),
        (case.has_entropy_metric, Reason.ENTROPY_METRIC, ""),
        (loss.is_top_p_replayed, Reason.TOP_P_REPLAY, ""),
        (not loss.is_clip_symmetric, Reason.LOSS_OPTIONS, "asymmetric clip"),
        (loss.kl_loss_type is not None, Reason.LOSS_OPTIONS, f"KL type {loss.kl_loss_type} from stored log-probs"),
        (loss.has_other_terms, Reason.LOSS_OPTIONS, "correction terms"),
        (loss.rollout_temperature != 1, Reason.TEMPERATURE, f"{loss.rollout_temperature:g}"),
    )
    return [Refusal(reason, detail) for holds, reason, detail in found if holds]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator; ``implementations`` holds, by platform, the classes that count as what serves it.

    A case is refused for the reasons in ``refused_for``.
    """

    name: str
    function: str
    calls: Calls
    implementations: Mapping[str, tuple[Implementation, ...]]
    refused_for: frozenset[Reason] = frozenset()
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


def _native(class_name: str, backend: str, registered: str = "") -> tuple[Implementation, ...]:
    return (Implementation(class_name, backend, registered, is_native=True),)


def _by_platform(
    cuda: tuple[Implementation, ...], rocm: tuple[Implementation, ...], cpu: tuple[Implementation, ...]
) -> dict[str, tuple[Implementation, ...]]:
    return {Platform.CUDA: cuda, Platform.ROCM: rocm, Platform.CPU: cpu}


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
_SM90_NEWER: Final = "batch_invariant_logp_sm90"


def _list_newer(*backward: str) -> tuple[Implementation, ...]:
    """Return the GPU classes of ``batch_invariant_logp``: SM90, Triton; ``backward`` is the backward pass's kernel."""
    return (
        Implementation(SM90_BATCH_INVARIANT, "CUDA_BATCH_INVARIANT_LOGP_SM90", BATCH_INVARIANT_LOGP,
                       symbols=(_SM90_NEWER,), kernels=(f"{_SM90_NEWER}_kernel", *backward)),
        Implementation("TritonBatchInvariantLogpOp", "TRITON_BATCH_INVARIANT_LOGP", BATCH_INVARIANT_LOGP,
                       kernels=("_batch_invariant_logp_kernel", *backward)),
    )  # fmt: skip


_NEWER_NO_GRAD: Final = _list_newer()
_NEWER_GRAD: Final = _list_newer("_batch_invariant_logp_bwd_kernel")  # Triton's in both classes
_NEWER_NATIVE: Final = _native("NativeBatchInvariantLogpOp", "PYTORCH_BATCH_INVARIANT_LOGP", BATCH_INVARIANT_LOGP)
_ONLINE_LOGP: Final = tuple(
    Implementation(class_name, backend, symbols=("fused_logp", "fused_logp_forward_online_fp32"),
                   kernels=("fused_logp_forward_online_kernel",))
    for class_name, backend in (("FusedLogpGenericOp", "CUDA_FUSED_LOGP_GENERIC"),
                                ("FusedLogpSM90Op", "CUDA_FUSED_LOGP_SM90"))
)  # fmt: skip
_RATIO_KL_KERNELS: Final = ("_ratio_kl_fwd_kernel", "_ratio_kl_bwd_kernel")
_RATIO_KL: Final = Implementation("TritonRatioKLOp", "TRITON_RATIO_KL", kernels=_RATIO_KL_KERNELS)
_GRPO_LOSS: Final = Implementation("TritonGRPOLossOp", "TRITON_GRPO_LOSS", kernels=_RATIO_KL_KERNELS)
_LINEAR_LOGP: Final = Implementation(
    "TritonLinearLogpOp", "TRITON_LINEAR_LOGP", needs_whole_vocabulary=True, kernels=("_linear_logp_fwd_kernel",)
)
_SM90_LINEAR: Final = "fused_linear_logp_sm90"
_SM90_LINEAR_LOGP: Final = Implementation(
    "FusedLinearLogpSM90Op", "CUDA_FUSED_LINEAR_LOGP_SM90", symbols=(_SM90_LINEAR,), kernels=(f"{_SM90_LINEAR}_kernel",)
)
_LOG_PROBS: Final = "calculate_log_probs_and_entropy"
_FORMS: Final = frozenset({Reason.ENTROPY_GRADIENT, Reason.TOP_P_REPLAY})
"""No operator computes the entropy's gradient, or leaves out columns."""

OPERATORS: Final[Mapping[str, Operator]] = {
    operator.name: operator
    for operator in (
        Operator(
            name="logp",
            function=_LOG_PROBS,
            calls=Calls.NO_GRAD,
            implementations=_by_platform(
                cuda=_ONLINE_LOGP + _NEWER_NO_GRAD,
                rocm=_NEWER_NO_GRAD[1:],
                cpu=_native("NativeLogpOp", "PYTORCH_NATIVE") + _NEWER_NATIVE,
            ),
            refused_for=frozenset({Reason.NO_SUCH_CALL, Reason.TOP_P_REPLAY}),
        ),
        Operator(
            name="ratio_kl",
            function=_LOG_PROBS,
            calls=Calls.GRAD,
            implementations=_by_platform(
                cuda=(_RATIO_KL, *_NEWER_GRAD),
                rocm=(_RATIO_KL, *_NEWER_GRAD[1:]),
                cpu=_native("NativeRatioKLOp", "PYTORCH_RATIO_KL") + _NEWER_NATIVE,
            ),
            refused_for=_FORMS,
        ),
        Operator(
            name="grpo_loss",
            function="policy_loss_function",
            calls=Calls.GRAD,
            implementations=_by_platform(
                (_GRPO_LOSS,), (_GRPO_LOSS,), _native("NativeGRPOLossOp", "PYTORCH_GRPO_LOSS")
            ),
            refused_for=_FORMS | {Reason.CONTEXT_PARALLEL, Reason.TENSOR_PARALLEL, Reason.LOSS_OPTIONS},
            is_opt_in=True,
        ),
        Operator(
            name="linear_logp",
            function=_LOG_PROBS,
            calls=Calls.ALL,
            implementations=_by_platform(
                (_LINEAR_LOGP, _SM90_LINEAR_LOGP),
                (_LINEAR_LOGP,),
                _native("NativeLinearLogpOp", "PYTORCH_LINEAR_LOGP"),
            ),
            refused_for=_FORMS | {Reason.OUTPUT_LAYER, Reason.LOSS_TYPE, Reason.ENTROPY_METRIC, Reason.TEMPERATURE},
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
ALL_OPERATORS: Final[Mapping[str, Operator]] = {
    **OPERATORS,
    COMPILED_LOGP: Operator(
        name=COMPILED_LOGP,
        function=_LOG_PROBS,
        calls=Calls.ALL,
        implementations=dict.fromkeys(Platform, (Implementation("torch.compile", "inductor"),)),
        refused_for=_FORMS | {Reason.TENSOR_PARALLEL},
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
    first = next((item for item in _find_obstacles(case) if item.reason in operator.refused_for), None)
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
    do_overlap = first.calls is second.calls or Calls.ALL in {first.calls, second.calls}
    return do_overlap or first.served_by != second.served_by
