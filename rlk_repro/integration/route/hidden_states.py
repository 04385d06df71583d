"""Define ``HiddenStates``, a tensor in the place of logits, which code may move and inspect but not compute with.

The trainer passes this tensor, in place of the logits, from the output layer to the log-prob function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from rlk_repro.integration.route.errors import RouteFailed

_MOVES: Final = frozenset({"contiguous", "float", "squeeze", "transpose", "view_as"})
"""Methods that a trainer calls on logits and that do not change the values."""
_LOOKS: Final = frozenset({"__get__", "__len__", "__repr__", "dim", "get_device", "is_contiguous", "size"})
"""Methods that only inspect the tensor; torch reads attributes (shape, dtype, device, grad_fn) by ``__get__``."""


@dataclass(frozen=True)
class Head:
    """Turns hidden states [.., D] into this rank's logits [.., V]: ``weight`` [V, D], and ``bias`` [V] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


class HiddenStates(torch.Tensor):
    """Hidden states [.., D] in the dtype of ``head``'s weight; a cast to float32 and back loses no digits.

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
