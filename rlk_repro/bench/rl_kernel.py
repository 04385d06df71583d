"""List RL-Kernel's operators as implementations: the registry's choice, and its plain PyTorch classes.

An operator counts as fused only if the table ``OPERATORS`` accepts its class, and its compiled symbols exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from rlk_repro.bench.cases import CLIP, FORWARD_BACKWARD, CaseTensors
from rlk_repro.bench.implementation import (
    BenchedImplementation,
    Ready,
    as_tensor,
    block,
    clip_losses,
    find_attribute,
)
from rlk_repro.integration.route.batch_invariant import find_sm90_refusal
from rlk_repro.integration.route.rl_kernel import (
    LoadedOperator,
    find_absent_symbols,
    find_version,
    load_batch_invariant,
    load_operator,
)
from rlk_repro.integration.switch import probe_platform
from rlk_repro.operators import BATCH_INVARIANT_LOGP, OPERATORS, SM90_BATCH_INVARIANT, Calls, Platform, Reason, Refusal
from rlk_repro.rundir.operator_results import OperatorKind

Use: TypeAlias = Callable[[Any, CaseTensors], torch.Tensor]

NATIVE: Final = "rl-kernel-native"
TRITON: Final = "rl-kernel-triton"
BATCH_INVARIANT: Final = "rl-kernel-batch-invariant"
TRITON_LINEAR_LOGP: Final = "rl_engine.kernels.ops.triton.loss.linear_logp.TritonLinearLogpOp"


class _LogpMethod(NamedTuple):
    """A method of the log-prob operator, and its compiled symbol; a sparse method computes only the requested rows."""

    name: str
    symbol: str
    is_sparse: bool = False


LOGP_METHODS: Final = {
    "rl-kernel-fp32": _LogpMethod("apply_fp32", "fused_logp_forward_fp32"),
    "rl-kernel-online": _LogpMethod("online_fp32", "fused_logp_forward_online_fp32"),
    "rl-kernel-indexed": _LogpMethod("indexed_fp32", "fused_logp_forward_indexed_fp32", is_sparse=True),
    "rl-kernel-online-indexed": _LogpMethod(
        "online_indexed_fp32", "fused_logp_forward_online_indexed_fp32", is_sparse=True
    ),
}


def _select(method: _LogpMethod, op: Any, inputs: CaseTensors) -> torch.Tensor:
    rows = (inputs.rows,) if method.is_sparse else ()
    return as_tensor(getattr(op, method.name)(inputs.leaves[0], inputs.tokens, *rows))


def _compute_ratios(op: Any, inputs: CaseTensors) -> torch.Tensor:
    (leaf,) = inputs.leaves
    # The second argument holds the reference logits.  They are the policy's own logits, so the KL is 0.
    ratio, _ = op(leaf, leaf.detach(), inputs.tokens, inputs.mask, inputs.old_log_probs)
    return clip_losses(ratio, inputs)


def _select_batch_invariant(op: Any, inputs: CaseTensors) -> torch.Tensor:
    return as_tensor(op(inputs.leaves[0], inputs.tokens))


def _compute_batch_invariant_ratios(op: Any, inputs: CaseTensors) -> torch.Tensor:
    ratio = (_select_batch_invariant(op, inputs) - inputs.old_log_probs).exp()
    return clip_losses(ratio, inputs)


def _compute_loss(op: Any, inputs: CaseTensors) -> torch.Tensor:
    shape = (inputs.num_samples, -1)
    logits = inputs.leaves[0].view(*shape, inputs.case.vocab_size)
    tokens, old, mask = (item.view(shape) for item in (inputs.tokens, inputs.old_log_probs, inputs.mask))
    loss, _, _ = op.apply(logits, logits.detach(), tokens, old, inputs.sample_advantages, mask, clip_eps=CLIP, beta=0.0)
    return as_tensor(loss)


def _select_from_hidden(op: Any, inputs: CaseTensors) -> torch.Tensor:
    return as_tensor(op(*inputs.leaves, inputs.tokens))


def _build_resolved(
    inputs: CaseTensors, *, use: Use, method: _LogpMethod | None = None, is_newer: bool = False
) -> Ready:
    """Take the operator of the case's name, or with ``is_newer`` RL-Kernel's ``batch_invariant_logp``."""
    case, operator = inputs.case, OPERATORS[inputs.case.operator]
    platform = probe_platform() if inputs.tokens.is_cuda else Platform.CPU
    loaded = load_batch_invariant(case.operator, platform) if is_newer else load_operator(case.operator, platform)
    if loaded is None:
        loaded = Refusal(Reason.GENERATION, BATCH_INVARIANT_LOGP)
    elif isinstance(loaded, LoadedOperator) and loaded.implementation == SM90_BATCH_INVARIANT:
        loaded = find_sm90_refusal(inputs.leaves[0]) or loaded
    if isinstance(loaded, Refusal):
        raise block(str(loaded))
    accepted = operator.find_implementation(platform, loaded.implementation)
    is_native = accepted is not None and accepted.is_native
    has_gradient = is_native or is_newer or operator.calls is not Calls.NO_GRAD
    if case.work == FORWARD_BACKWARD and not has_gradient:
        raise block(f"{loaded.implementation} computes no gradient")
    if method is not None and not is_native and find_absent_symbols((method.symbol,)):
        raise block(f"{loaded.implementation}: its extension lacks {method.symbol}")
    return Ready(
        forward=partial(use, loaded.op, inputs),
        kind=OperatorKind.NATIVE if is_native else OperatorKind.FUSED,
        class_name=loaded.implementation + (f".{method.name}" if method else ""),
        version=loaded.version,
    )


def _build_by_class(inputs: CaseTensors, *, path: str, kind: OperatorKind, use: Use) -> Ready:
    return Ready(
        forward=partial(use, find_attribute(path)(), inputs),
        kind=kind,
        class_name=path.rpartition(".")[2],
        version=find_version(),
    )


def list_operators() -> Iterator[BenchedImplementation]:
    for name, method in LOGP_METHODS.items():
        build = partial(_build_resolved, use=partial(_select, method), method=method)
        yield BenchedImplementation(name=name, operator="logp", build=build, is_sparse=method.is_sparse)
    newer: dict[str, Use] = {"logp": _select_batch_invariant, "ratio_kl": _compute_batch_invariant_ratios}
    for operator, use in newer.items():
        build = partial(_build_resolved, use=use, is_newer=True)
        yield BenchedImplementation(name=BATCH_INVARIANT, operator=operator, build=build)
    uses: dict[str, Use] = {
        "ratio_kl": _compute_ratios, "grpo_loss": _compute_loss, "linear_logp": _select_from_hidden
    }  # fmt: skip
    for operator, use in uses.items():
        yield BenchedImplementation(name="rl-kernel", operator=operator, build=partial(_build_resolved, use=use))
    triton = partial(_build_by_class, path=TRITON_LINEAR_LOGP, kind=OperatorKind.FUSED, use=_select_from_hidden)
    yield BenchedImplementation(name=TRITON, operator="linear_logp", build=triton)
    uses["logp"] = partial(_select, LOGP_METHODS["rl-kernel-fp32"])
    for operator, use in uses.items():
        native = next(item for item in OPERATORS[operator].implementations[Platform.CPU] if item.is_native)
        path = f"rl_engine.kernels.ops.pytorch.loss.{operator}.{native.class_name}"
        build = partial(_build_by_class, path=path, kind=OperatorKind.NATIVE, use=use)
        yield BenchedImplementation(name=NATIVE, operator=operator, build=build)
