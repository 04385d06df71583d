"""Compute the whole policy loss with RL-Kernel's ``grpo_loss``, if its formula is exactly the trainer's loss.

The trainer's own function computes the loss value and the metrics, and the operator computes only the gradient.  The
operator takes the mean over all tokens, but the trainer multiplies each token's loss by a weight w >= 0.  The route
multiplies the token's advantage A by w instead, with the same result: min(r wA, clip(r) wA) = w min(rA, clip(r) A).
For the operator, each token is a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlk_repro.integration.route import log_probs
from rlk_repro.integration.route.api import Call, Route, RouteContext
from rlk_repro.integration.route.batch import find_old, pack, pack_tokens
from rlk_repro.integration.route.log_probs import FirstCallCheck, Shard
from rlk_repro.integration.route.rl_kernel import RouteFailed, load_operator
from rlk_repro.operators import Platform, Reason, Refusal


def make_grpo_loss_route(context: RouteContext) -> Route | Refusal:
    loaded = load_operator("grpo_loss", context.case.platform)
    if isinstance(loaded, Refusal):
        return loaded
    is_on_device, values = context.case.platform != Platform.CPU, FirstCallCheck()

    def refuse(call: Call) -> Refusal | None:
        logits: torch.Tensor = call["logits"]
        if not find_old(call["args"], call["batch"]):
            return Refusal(Reason.LOSS_OPTIONS, "no log-probs of the old policy in the batch")
        form = log_probs.find_form_refusal(logits, is_on_device=is_on_device)
        tokens = pack_tokens(call["batch"], logits.shape[1])
        return form or values.find_refusal(logits[0], tokens, Shard(0, 1, None))

    def run(call: Call) -> tuple[torch.Tensor, Any]:
        args, batch, logits = call["args"], call["batch"], call["logits"]
        with torch.no_grad():
            value, metrics = context.native(args, batch, logits.detach(), call["sum_of_sample_mean"])
        surrogate = _compute_surrogate(loaded.op, args, batch, logits, call["sum_of_sample_mean"])
        tokens = pack_tokens(batch, logits.shape[1])
        context.watch.add("grpo_loss", tokens, logits.shape[2], -surrogate.detach().abs().reshape(1))
        return value + (surrogate - surrogate.detach()), metrics

    return Route(implementation=loaded.implementation, version=loaded.version, refuse=refuse, run=run)


def _compute_surrogate(
    op: Any, args: Any, batch: Mapping[str, Any], logits: torch.Tensor, reducer: Any
) -> torch.Tensor:
    """Return the policy loss of one microbatch of [1, T, V] logits; it equals the trainer's up to rounding."""
    rows = logits.squeeze(0)
    if args.rollout_temperature != 1.0:
        rows = rows / args.rollout_temperature
    weights = _find_weights(reducer, batch["response_lengths"], rows.device)
    advantages = [one * weight for one, weight in zip(batch["advantages"], weights, strict=True)]
    mask = pack([weight != 0 for weight in weights], batch, len(rows)).unsqueeze(1)
    rows = rows.contiguous().unsqueeze(1)
    loss, _, _ = op.apply(
        rows,
        rows.detach(),
        pack_tokens(batch, len(rows)).unsqueeze(1),
        pack(find_old(args, batch), batch, len(rows)).unsqueeze(1),
        pack(advantages, batch, len(rows)),
        mask,
        clip_eps=args.eps_clip,
        beta=0.0,
    )
    if not loss.requires_grad:
        raise RouteFailed("grpo_loss: returned a result without gradient, expected one with a gradient")
    result: torch.Tensor = loss * mask.sum()
    return result


def _find_weights(reducer: Any, response_lengths: Sequence[int], device: torch.device) -> Sequence[torch.Tensor]:
    """The reducer is a weighted sum, so its gradient gives the weight of each token."""
    tokens = torch.zeros(sum(response_lengths), device=device, requires_grad=True)
    with torch.enable_grad():
        (weights,) = torch.autograd.grad(reducer(tokens), tokens)
    return torch.split(weights, list(response_lengths))
