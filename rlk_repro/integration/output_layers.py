"""Let a Megatron model's output layer return its input, which ``linear_logp`` multiplies by the layer's weight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.integration.measure.installation import Installation, check_signatures
from rlk_repro.integration.route.api import Turn
from rlk_repro.integration.route.linear_logp import NAME, Head, HiddenStates, find_weight_refusal
from rlk_repro.integration.vime_abi import OUTPUT_LAYERS, WRAPPERS
from rlk_repro.operators import Reason, Refusal


def defer_output_layers(installation: Installation, chunks: Iterable[Any]) -> None:
    """If ``linear_logp`` runs, make a Megatron model's output layers return hidden states: either all layers or none.

    Raises:
        CheckFailed: a layer cannot return hidden states, and the mode forbids a fallback.  EnvironmentMissing: the
        layer's ``forward`` has other parameters than in the pinned Megatron-LM.
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
        make = functools.partial(_hand_over, layer, installation.turn)
        installation.rebind(layer, "forward", make, "returns hidden states")


def find_output_layer(chunk: Any, implementation: str) -> Any:
    """Return a model chunk's output layer, None if another pipeline stage has it, or a Refusal if it cannot be used."""
    model = chunk
    while hasattr(model, "module"):
        if type(model).__name__ not in WRAPPERS:
            return Refusal(Reason.OUTPUT_LAYER, f"{type(model).__name__} is an unknown wrapper")
        model = model.module
    if not getattr(model, "post_process", True):
        return None
    layer: Any = getattr(model, "output_layer", None)
    kind = type(layer).__name__
    if kind not in OUTPUT_LAYERS:
        return Refusal(Reason.OUTPUT_LAYER, f"{type(model).__name__} has {'none' if layer is None else f'a {kind}'}")
    check_signatures(type(layer), {"forward": OUTPUT_LAYERS[kind]})
    config = layer.config
    obstacles = {
        "multi-token prediction": config.mtp_num_layers,
        "the layer defers its weight's gradient": config.defer_embedding_wgrad_compute,
        "the layer gathers its output": layer.gather_output,
        "the layer does not add its bias": layer.skip_bias_add,
        "the layer does not all-reduce its input's gradient": layer.disable_grad_reduce,
    }
    found = [what for what, is_so in obstacles.items() if is_so]
    if found:
        return Refusal(Reason.OUTPUT_LAYER, ", ".join(found))
    weight = model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
    return find_weight_refusal(weight, implementation) or layer


def _hand_over(layer: Any, turn: Turn, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def hand_over(
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **fused: Any,
    ) -> Any:
        if not turn.is_enabled:
            return forward(input_, weight, runtime_gather_output, **fused)
        if runtime_gather_output or fused.get("output_cross_entropy_loss"):
            asked = "gathered logits" if runtime_gather_output else "a fused loss"
            what = "the output layer's hidden states can replace only this rank's logits"
            raise CheckFailed(Problem(NAME, what, got=f"a request for {asked}", expected="a request for these logits"))
        if layer.sequence_parallel:
            input_ = _gather_rows(input_, layer.tp_group)
        return HiddenStates.of(input_, Head(layer.weight if weight is None else weight, layer.bias)), None

    return hand_over


def _gather_rows(hidden: torch.Tensor, group: Any) -> torch.Tensor:
    """The backward pass only keeps this rank's rows: ``linear_logp`` already sums the gradient over the ranks."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    rows: torch.Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
    return rows
