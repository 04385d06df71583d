"""The routes, by operator; an operator without a route falls back, or is refused in mode ``require``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch

from rlk_repro.integration.route import batch_invariant, log_probs
from rlk_repro.integration.route.api import Call, Route, RouteContext, RouteFactory
from rlk_repro.integration.route.batch_invariant import WarmUp
from rlk_repro.integration.route.grpo_loss import make_grpo_loss_route
from rlk_repro.integration.route.linear_logp import make_linear_logp_route
from rlk_repro.integration.route.log_probs import (
    FirstCallCheck,
    Operators,
    Selected,
    Shard,
    ValueCheck,
    find_foreign_id,
)
from rlk_repro.integration.route.rl_kernel import LoadedOperator, load_batch_invariant, load_operator
from rlk_repro.operators import COMPILED_LOGP, SM90_BATCH_INVARIANT, Platform, Reason, Refusal

Run: TypeAlias = Callable[[Call, torch.Tensor, Shard], Selected]


def make_logp_route(context: RouteContext) -> Route | Refusal:
    """Return the route for log-probs without gradient: a kernel that reads the logits once."""
    loaded = load_batch_invariant("logp", context.case.platform)
    if loaded is not None:
        return _make_batch_invariant_route("logp", loaded, context)
    loaded = load_operator("logp", context.case.platform)
    if isinstance(loaded, Refusal):
        return loaded
    logp = loaded.op.online_fp32

    def run(call: Call, logits: torch.Tensor, shard: Shard) -> Selected:
        return log_probs.select_no_grad(logp, logits, call["tokens"], shard, with_entropy=call["with_entropy"])

    return _make_route("logp", loaded, context, run)


def make_ratio_kl_route(context: RouteContext) -> Route | Refusal:
    """Return the route for log-probs with gradient.

    Without RL-Kernel's ``batch_invariant_logp`` it is the old log-prob plus the logarithm of the ratio new / old.
    """
    loaded = load_batch_invariant("ratio_kl", context.case.platform)
    if loaded is not None:
        return _make_batch_invariant_route("ratio_kl", loaded, context)
    loaded = load_operator("ratio_kl", context.case.platform)
    if isinstance(loaded, Refusal):
        return loaded
    operators, source = _find_operators(loaded, context.case.platform)
    loaded = replace(loaded, version=f"{loaded.version}, held against {source}")
    select = functools.partial(log_probs.select_with_grad, operators)
    warm_up = WarmUp(lambda rows, tokens: select(rows, tokens, Shard(0, 1, None), with_entropy=False)[0])
    takes_hint = operators.logp_of_far is not None and context.case.context_parallel == 1

    def run(call: Call, logits: torch.Tensor, shard: Shard) -> Selected:
        if logits.is_cuda:
            warm_up.run(logits)
        is_hinted = takes_hint and shard.size == 1 and not call["with_entropy"]
        hint = context.batch.find_old_log_probs(len(logits)) if is_hinted else None
        return select(logits, call["tokens"], shard, with_entropy=call["with_entropy"], hint=hint)

    return _make_route("ratio_kl", loaded, context, run)


def _make_batch_invariant_route(name: str, loaded: LoadedOperator | Refusal, context: RouteContext) -> Route | Refusal:
    """Return the route of RL-Kernel's newer log-prob for the calls of ``name``."""
    if isinstance(loaded, Refusal):
        return loaded
    is_sm90 = loaded.implementation == SM90_BATCH_INVARIANT
    values = FirstCallCheck(batch_invariant.find_sm90_value_refusal if is_sm90 else log_probs.find_value_refusal)
    warm_up = WarmUp(loaded.op)

    def check(logits: torch.Tensor, tokens: torch.Tensor, shard: Shard) -> Refusal | None:
        refusal = batch_invariant.find_sm90_refusal(logits) if is_sm90 else None
        return refusal or values.find_refusal(logits, tokens, shard)

    def run(call: Call, logits: torch.Tensor, shard: Shard) -> Selected:
        if logits.is_cuda:
            warm_up.run(logits)
        return batch_invariant.select(loaded.op, logits, call["tokens"], shard, with_entropy=call["with_entropy"])

    return _make_route(name, loaded, context, run, check)


def _find_operators(ratio_kl: LoadedOperator, platform: str) -> tuple[Operators, str]:
    """Choose the operators, and name the source of the old log-probs."""
    logp = load_operator("logp", platform)
    if isinstance(logp, Refusal):
        return Operators(ratio_kl=ratio_kl.op, logp=log_probs.select_by_moments), "torch"
    plain = Operators(ratio_kl=ratio_kl.op, logp=logp.op.online_fp32)
    if platform == Platform.CPU:
        return plain, logp.implementation
    mending = Operators(ratio_kl=plain.ratio_kl, logp=plain.logp, logp_of_far=_make_logp_of_far(logp.op))
    device = torch.device("cuda", torch.cuda.current_device())
    if log_probs.can_mend(mending, device):
        return mending, f"the old log-probs and {logp.implementation}"
    return plain, logp.implementation


def _make_logp_of_far(op: Any) -> log_probs.LogPOfRows:
    """The kernel starts one block of threads per row; a block whose index is -1 ends at once."""

    def find(logits: torch.Tensor, columns: torch.Tensor, is_near: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(logits), device=logits.device)
        result: torch.Tensor = op.online_indexed_fp32(logits, columns, rows.masked_fill_(is_near, -1))
        return result

    return find


def make_compiled_logp_route(context: RouteContext) -> Route | Refusal:
    # torch's compiler takes a second to import, and most runs do not use it
    from rlk_repro.integration.route import torch_compile

    check = FirstCallCheck(find_foreign_id).find_refusal
    return _make_route(COMPILED_LOGP, torch_compile.LOADED, context, torch_compile.run, check)


def _make_route(
    name: str, loaded: LoadedOperator, context: RouteContext, run: Run, check: ValueCheck | None = None
) -> Route:
    """The route serves calls of vime's log-prob function: from logits [T, V] to log-probs [T, 1] and entropy."""
    is_on_device = context.case.platform != Platform.CPU
    find_refusal = check or FirstCallCheck().find_refusal

    def refuse(call: Call) -> Refusal | None:
        logits: torch.Tensor = call["logits"]
        if call["log_prob_keep_mask"] is not None:
            return Refusal(Reason.TOP_P_REPLAY)
        if call["with_entropy"] and call["with_entropy_grad"] and logits.requires_grad and torch.is_grad_enabled():
            return Refusal(Reason.ENTROPY_GRADIENT)
        form = log_probs.find_form_refusal(logits, is_on_device=is_on_device)
        if form is not None or not len(logits):
            return form
        return find_refusal(logits, call["tokens"], Shard.of(call["tp_group"]))

    def compute(call: Call) -> Any:
        logits, shard = call["logits"].contiguous(), Shard.of(call["tp_group"])
        if not len(logits):
            return context.native(**call)
        selected, entropy = run(call, logits, shard)
        context.watch.add(name, call["tokens"], shard.size * logits.shape[1], selected)
        return selected.unsqueeze(-1), entropy

    return Route(implementation=loaded.implementation, version=loaded.version, refuse=refuse, run=compute)


ROUTES: Final[Mapping[str, RouteFactory]] = {
    "logp": make_logp_route,
    "ratio_kl": make_ratio_kl_route,
    "grpo_loss": make_grpo_loss_route,
    "linear_logp": make_linear_logp_route,
    COMPILED_LOGP: make_compiled_logp_route,
}
