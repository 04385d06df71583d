"""Compute log-probs from hidden states with RL-Kernel's ``linear_logp``, which never holds the full logits in memory.

Without logits no fallback is possible: a call that the route cannot serve stops the run in every mode.
"""

from __future__ import annotations

from typing import Final

import torch

from rlk_repro.integration.route.api import Call, Route, RouteContext
from rlk_repro.integration.route.errors import RouteFailed
from rlk_repro.integration.route.hidden_states import HiddenStates
from rlk_repro.integration.route.log_probs import Shard, check_result, find_form_refusal
from rlk_repro.integration.route.rl_kernel import load_operator
from rlk_repro.operators import OPERATORS, Platform, Reason, Refusal, find_split_refusal

NAME: Final = "linear_logp"
SM90: Final = "FusedLinearLogpSM90Op"
SM90_COLUMNS: Final = 32
"""RL-Kernel's SM90 class needs bfloat16 and a hidden size that this number divides; else it calls another class."""


def make_linear_logp_route(context: RouteContext) -> Route | Refusal:
    """Return the route from hidden states [T, D] to log-probs [T, 1], with gradients of states and weight; T > 0."""
    loaded = load_operator(NAME, context.case.platform)
    if isinstance(loaded, Refusal):
        return loaded
    implementation = OPERATORS[NAME].find_implementation(context.case.platform, loaded.implementation)
    assert implementation is not None, "load_operator accepts only classes of the table"
    split = find_split_refusal([implementation], context.case)
    if split is not None:
        return split
    is_on_device = context.case.platform != Platform.CPU

    def refuse(call: Call) -> Refusal | None:
        if not isinstance(call["logits"], HiddenStates):
            return Refusal(Reason.LOGITS)
        weight = call["logits"].head.weight
        refusal = (
            _find_call_refusal(call)
            or find_weight_refusal(weight, loaded.implementation)
            or find_form_refusal(weight, is_on_device=is_on_device)
        )
        if refusal is not None:
            expected = "a call that the route supports, because a fallback would need logits"
            raise RouteFailed(f"{NAME}: a call cannot be served: {refusal}, expected {expected}")
        return None

    def run(call: Call) -> tuple[torch.Tensor, None]:
        hidden, head = call["logits"].recover(), call["logits"].head
        tokens, shard, num_columns = call["tokens"], Shard.of(call["tp_group"]), len(head.weight)
        selected = loaded.op(
            hidden,
            head.weight,
            tokens,
            head.bias,
            tp_group=shard.group,
            vocab_start_index=shard.rank * num_columns,
            global_vocab_size=shard.size * num_columns,
        )
        check_result(NAME, selected, tokens, needs_grad=torch.is_grad_enabled() and hidden.requires_grad)
        context.watch.add(NAME, tokens, shard.size * num_columns, selected)
        return selected.unsqueeze(-1), None

    return Route(implementation=loaded.implementation, version=loaded.version, refuse=refuse, run=run)


def _find_call_refusal(call: Call) -> Refusal | None:
    if call["log_prob_keep_mask"] is not None:
        return Refusal(Reason.TOP_P_REPLAY)
    return Refusal(Reason.ENTROPY_METRIC) if call["with_entropy"] else None


def find_weight_refusal(weight: torch.Tensor, implementation: str) -> Refusal | None:
    """Return a refusal if RL-Kernel's class would silently call another class of RL-Kernel for this weight."""
    is_fit = weight.dtype == torch.bfloat16 and weight.shape[1] % SM90_COLUMNS == 0
    if implementation != SM90 or is_fit:
        return None
    what = f"{SM90} passes {weight.dtype} weights of hidden size {weight.shape[1]} to another class of RL-Kernel"
    return Refusal(Reason.NOT_ACCEPTED, what)
