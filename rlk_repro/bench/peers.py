"""List implementations by other projects, if installed: torch, torch.compile, Liger, cut-cross-entropy.

No comparison of variants uses these implementations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch.nn import functional

from rlk_repro.bench.cases import POLICY_OPERATORS, CaseTensors, needs_grad
from rlk_repro.bench.implementation import (
    BenchedImplementation,
    Builder,
    Ready,
    as_tensor,
    block,
    clip_losses,
    find_attribute,
    find_version,
    reduce_losses,
)
from rlk_repro.integration.route.torch_compile import select_no_grad, select_with_grad
from rlk_repro.rundir.operator_results import OperatorKind

MAX_RECOMPILES: Final = 1024
LIGER: Final = "liger_kernel.transformers.functional"
Select: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _select_from_hidden(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return select_no_grad(functional.linear(hidden, weight), tokens)


def _compute_losses(select: Select, logits: torch.Tensor, inputs: CaseTensors) -> torch.Tensor:
    ratio = (_compile(select)(logits, inputs.tokens) - inputs.old_log_probs).exp()
    return reduce_losses(clip_losses(ratio, inputs), inputs)


@functools.cache
def _compile(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """With ``fullgraph``, torch raises an error after too many shapes; without it, torch would silently run uncompiled
    code.
    """
    config: Any = torch._dynamo.config  # noqa: SLF001  torch documents these settings and offers no other way to them
    for name in ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, MAX_RECOMPILES)
    return torch.compile(function, fullgraph=True, dynamic=False)


def _build_compiled(
    inputs: CaseTensors,
    select: Select = select_no_grad,
    how: str = "log_softmax + gather",
) -> Ready:
    if not inputs.tokens.is_cuda:
        raise block("nothing is compiled on a CPU, not even vime's own functions")
    if inputs.case.operator in POLICY_OPERATORS:
        forward, text = partial(_compute_losses, select, inputs.leaves[0], inputs), f"{how}, then the clip"
    elif inputs.hidden is None:
        forward, text = partial(_compile(select), inputs.leaves[0], inputs.tokens), how
    else:
        forward = partial(_compile(_select_from_hidden), *inputs.leaves, inputs.tokens)
        text = "linear + log_softmax + gather"
    return Ready(
        forward=forward, kind=OperatorKind.PEER, class_name=f"torch.compile: {text}", version=torch.__version__
    )


def _build_peer(inputs: CaseTensors, path: str, distribution: str, **options: Any) -> Ready:
    """The cross-entropy of a row is its negative log-prob."""
    function = find_attribute(path)

    def forward() -> torch.Tensor:
        losses = function(*inputs.leaves, inputs.tokens, reduction="none", **options)
        return -as_tensor(losses).float()

    version = find_version(distribution)
    return Ready(forward=forward, kind=OperatorKind.PEER, class_name=path, version=version)


def _build_liger(inputs: CaseTensors) -> Ready:
    if needs_grad(inputs.case):
        reason = "Liger overwrites the logits with their gradient, so later calls would get others"
        raise block(reason)
    return _build_peer(inputs, f"{LIGER}.liger_cross_entropy", "liger-kernel")


def _build_torch_linear(inputs: CaseTensors) -> Ready:
    options = find_attribute("torch.nn.LinearCrossEntropyOptions")
    path = "torch.nn.functional.linear_cross_entropy"
    return _build_peer(inputs, path, "torch", options=options())


def list_peers() -> tuple[BenchedImplementation, ...]:
    liger = f"{LIGER}.liger_fused_linear_cross_entropy"
    apple = "cut_cross_entropy.linear_cross_entropy"
    of_liger = partial(_build_peer, path=liger, distribution="liger-kernel")
    of_apple = partial(_build_peer, path=apple, distribution="cut-cross-entropy")
    logsumexp = partial(_build_compiled, select=select_with_grad, how="gather - logsumexp")
    return (
        *(_make("torch-compile-logsumexp", operator, logsumexp) for operator in ("logp", *POLICY_OPERATORS)),
        *(_make("torch-compile", operator, _build_compiled) for operator in ("logp", *POLICY_OPERATORS, "linear_logp")),
        _make("liger", "logp", _build_liger),
        _make("liger", "linear_logp", of_liger),
        _make("torch-chunked", "linear_logp", _build_torch_linear),
        _make("cut-cross-entropy", "linear_logp", of_apple),
    )


def _make(name: str, operator: str, build: Builder) -> BenchedImplementation:
    return BenchedImplementation(name=name, operator=operator, kind=OperatorKind.PEER, build=build)
