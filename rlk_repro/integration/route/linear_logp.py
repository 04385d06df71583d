"""Compute log-probs from hidden states with RL-Kernel's ``linear_logp``, which never holds the full logits in memory.

Without logits no fallback is possible: a call that the route cannot serve stops the run in every mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from rlk_repro.integration.route.api import Call, Route, RouteContext
from rlk_repro.integration.route.log_probs import Shard, check_result, find_form_refusal
from rlk_repro.integration.route.rl_kernel import RouteFailed, load_operator
from rlk_repro.operators import OPERATORS, Platform, Reason, Refusal, find_split_refusal

NAME: Final = "linear_logp"
SM90: Final = "FusedLinearLogpSM90Op"
SM90_COLUMNS: Final = 32
"""RL-Kernel's SM90 class needs bfloat16 and a hidden size that this number divides; else it calls another class."""
_MOVES: Final = frozenset({"contiguous", "float", "squeeze", "transpose", "view_as"})
"""Methods that a trainer calls on logits and that do not change the values."""
_LOOKS: Final = frozenset({"__get__", "__len__", "__repr__", "dim", "get_device", "is_contiguous", "size"})
"""Methods that only inspect the tensor; torch reads attributes (shape, dtype, device, grad_fn) by ``__get__``."""


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
        refusal = find_weight_refusal(weight, loaded.implementation) or find_form_refusal(
            weight, is_on_device=is_on_device
        )
        if call["with_entropy"]:
            refusal = Refusal(Reason.ENTROPY_METRIC)
        if call["log_prob_keep_mask"] is not None:
            refusal = Refusal(Reason.TOP_P_REPLAY)
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


def find_weight_refusal(weight: torch.Tensor, implementation: str) -> Refusal | None:
    """Return a refusal if RL-Kernel's class would silently call another class of RL-Kernel for this weight."""
    is_fit = weight.dtype == torch.bfloat16 and weight.shape[1] % SM90_COLUMNS == 0
    if implementation != SM90 or is_fit:
        return None
    what = f"{SM90} passes {weight.dtype} weights of hidden size {weight.shape[1]} to another class of RL-Kernel"
    return Refusal(Reason.NOT_ACCEPTED, what)


@dataclass(frozen=True)
class Head:
    """Turns hidden states [.., D] into this rank's logits [.., V]: ``weight`` [V, D], and ``bias`` [V] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class HiddenStates(torch.Tensor):
    """Hidden states [.., D] in the dtype of ``head``'s weight; a cast to float32 and back loses no digits.

    The trainer passes this tensor, in place of the logits, from the output layer to the log-prob function.
    The only allowed arithmetic is ``sum``, which returns a plain tensor: vime adds 0 * logits.sum() to a loss without
    tokens.
    """

    head: Head

    @classmethod
    def of(cls, hidden: torch.Tensor, head: Head) -> HiddenStates:
        """Return ``hidden`` as ``HiddenStates``; gradients flow back through the result.

        Raises:
            RouteFailed: ``hidden`` and the weight have different dtypes, so casting back could lose digits.
        """
        if hidden.dtype != head.weight.dtype:
            raise RouteFailed(
                f"hidden states: have another dtype than the output layer's weight, got '{hidden.dtype}', "
                f"expected {head.weight.dtype}"
            )
        result = hidden.as_subclass(cls)
        result.head = head
        return result

    def recover(self) -> torch.Tensor:
        """Return the original hidden states as a plain tensor; the cast back to the weight's dtype changes no bit."""
        return self.as_subclass(torch.Tensor).to(self.head.weight.dtype)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name == "sum":
            return args[0].as_subclass(torch.Tensor).sum(*args[1:], **(kwargs or {}))
        if name not in _MOVES | _LOOKS:
            raise RouteFailed(
                f"linear_logp: hidden states were used as logits, got {name!r}, expected RL-Kernel's log-probs\n"
                "  hint: remove linear_logp from the requested operators"
            )
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, cls):
            result.head = next(value.head for value in args if isinstance(value, cls))
        return result
