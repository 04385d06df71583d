"""Log-probs by RL-Kernel's ``linear_logp``, straight from hidden states: no whole logits exist, forward or backward.

Megatron's output layer is told to hand over what it is given, as ``HiddenStates``; the route multiplies.  From then on
there is nothing to fall back to: a call that the route cannot serve stops, in every mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.integration.measure.installation import Installation, check_signatures
from rlk_repro.integration.measure.ledger import Call, Route, RouteContext
from rlk_repro.integration.route.hidden_states import Head, HiddenStates
from rlk_repro.integration.route.log_probs import Shard, check_result, find_form_refusal
from rlk_repro.integration.route.rl_kernel import load_operator
from rlk_repro.operators import OPERATORS, Platform, Reason, Refusal, find_split_refusal

NAME: Final = "linear_logp"
SM90: Final = "FusedLinearLogpSM90Op"
SM90_COLUMNS: Final = 32
"""The hidden size must be a multiple; for others, and other dtypes than bfloat16, that class delegates in silence."""

# as of Megatron-LM 1dcf0daf
WRAPPERS: Final = ("DistributedDataParallel", "Float16Module")
LAYERS: Final = {
    "ColumnParallelLinear": "(self, input_, weight, runtime_gather_output)",
    "LinearCrossEntropyModule": "(self, input_, weight, runtime_gather_output, output_cross_entropy_loss, labels, "
    "reduction, ignore_index)",
}


def make_linear_logp_route(context: RouteContext) -> Route | Refusal:
    """Log-probs [T, 1] of [T, D] hidden states, with gradient to them and to the head's weight and bias; T > 0."""
    loaded = load_operator(NAME, context.case.platform)
    if isinstance(loaded, Refusal):
        return loaded
    implementation = OPERATORS[NAME].find_implementation(context.case.platform, loaded.implementation)
    assert implementation is not None, "load_operator has looked"
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
            what = f"a call cannot be served: {refusal}"
            raise CheckFailed(Problem(NAME, what, expected="one that can: its logits were never computed"))
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
    """Where the class would hand over to another one without a word."""
    is_fit = weight.dtype == torch.bfloat16 and weight.shape[1] % SM90_COLUMNS == 0
    if implementation != SM90 or is_fit:
        return None
    return Refusal(Reason.NOT_ACCEPTED, f"{SM90} delegates {weight.dtype} of hidden size {weight.shape[1]}")


def defer_output_layers(installation: Installation, chunks: Iterable[Any]) -> None:
    """Have the output layers of a Megatron model hand over hidden states where ``linear_logp`` runs; all or none.

    Raises:
        CheckFailed: one of them cannot, and the mode forbids a fallback.
        EnvironmentMissing: the layer is not that of the Megatron that this was written for.
    """
    decision = installation.ledger.find_rl_kernel(NAME)
    if decision is None:
        return
    layers = []
    for chunk in chunks:
        found = find_output_layer(chunk, decision.implementation)
        if isinstance(found, Refusal):
            installation.ledger.refuse_call(NAME, found)
            return
        layers += [] if found is None else [found]
    for layer in layers:
        installation.rebind(layer, "forward", functools.partial(_hand_over, layer), "hands over hidden states")


def find_output_layer(chunk: Any, implementation: str) -> Any:
    """The output layer of a model chunk, None where the pipeline has put it elsewhere, or why it cannot be deferred."""
    model = chunk
    while hasattr(model, "module"):
        if type(model).__name__ not in WRAPPERS:
            return Refusal(Reason.OUTPUT_LAYER, f"{type(model).__name__} is around the model")
        model = model.module
    if not getattr(model, "post_process", True):
        return None
    layer: Any = getattr(model, "output_layer", None)
    kind = type(layer).__name__
    if kind not in LAYERS:
        return Refusal(Reason.OUTPUT_LAYER, f"{type(model).__name__} has {'none' if layer is None else f'a {kind}'}")
    check_signatures(type(layer), {"forward": LAYERS[kind]})
    config = layer.config
    obstacles = {
        "multi-token prediction": config.mtp_num_layers,
        "its weight's gradient is deferred": config.defer_embedding_wgrad_compute,
        "its output is gathered": layer.gather_output,
        "its bias is kept back": layer.skip_bias_add,
        "its gradient is not reduced": layer.disable_grad_reduce,
    }
    found = [what for what, is_so in obstacles.items() if is_so]
    if found:
        return Refusal(Reason.OUTPUT_LAYER, ", ".join(found))
    weight = model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
    return find_weight_refusal(weight, implementation) or layer


def _hand_over(layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Around the layer's ``forward``, whose arguments it takes: its input with the weight, in place of the product."""

    @functools.wraps(forward)
    def hand_over(
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **fused: Any,
    ) -> tuple[HiddenStates, None]:
        if runtime_gather_output or fused.get("output_cross_entropy_loss"):
            asked = "gathered logits" if runtime_gather_output else "a fused loss"
            what = "the output layer was asked for something else"
            raise CheckFailed(Problem(NAME, what, got=asked, expected="this rank's logits"))
        if layer.sequence_parallel:
            input_ = _gather_rows(input_, layer.tp_group)
        return HiddenStates.of(input_, Head(layer.weight if weight is None else weight, layer.bias)), None

    return hand_over


def _gather_rows(hidden: torch.Tensor, group: Any) -> torch.Tensor:
    """All rows, from those of each rank.  The operator adds its gradient up over the ranks; on the way back each takes
    its own rows of that sum, and nothing is added up again."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    rows: torch.Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
    return rows
