"""Define routes, by which an operator serves calls of a trainer's function, and wrap the function to use them.

A fallback has a reason that was known before the call; an error inside an implementation never causes a fallback.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import torch

from rlk_repro.integration.route.batch import CurrentBatch
from rlk_repro.integration.route.watch import Watch
from rlk_repro.operators import ALL_OPERATORS, Case, Operator, Reason, Refusal, find_refusal

Call: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Route:
    """The route of one operator in one trainer.

    ``refuse`` and ``run`` get the arguments of a call by name, defaults included.  ``run`` returns what the trainer's
    function would return.
    """

    implementation: str
    version: str
    refuse: Callable[[Call], Refusal | None]
    run: Callable[[Call], Any]


@dataclass(frozen=True, kw_only=True)
class RouteContext:
    """What a route may use: ``native`` is the trainer's own function, ``args`` are the trainer's options."""

    case: Case
    native: Callable[..., Any]
    args: Any
    batch: CurrentBatch = field(default_factory=CurrentBatch)
    watch: Watch = field(default_factory=Watch)


RouteFactory: TypeAlias = Callable[[RouteContext], Route | Refusal]
Claim: TypeAlias = tuple[Operator, Route | None]
"""A requested operator with its route; without a route, every call that the operator would serve is a fallback."""


def resolve(op: str, context: RouteContext, routes: Mapping[str, RouteFactory]) -> Route | Refusal:
    refusal = find_refusal(op, context.case)
    if refusal is not None:
        return refusal
    route = routes[op](context)
    operator, platform = ALL_OPERATORS[op], context.case.platform
    if isinstance(route, Route) and not operator.find_implementation(platform, route.implementation):
        return Refusal(Reason.NOT_ACCEPTED, route.implementation)
    return route


NO_CALLS: Final[Mapping[str, int]] = {"calls": 0, "tokens": 0, "fallbacks": 0}
"""Counts of calls that an operator served, of their rows of logits, and of calls that fell back."""


class Recorder(Protocol):
    def count(self, op: str, count: Mapping[str, int]) -> None: ...

    def refuse_call(self, op: str, refusal: Refusal) -> None:
        """Note why a call falls back; raise an error if the mode forbids fallbacks."""


@dataclass
class Turn:
    """Whether the enabled variant runs now; in the baseline the trainer's own function serves its calls.

    ``aside``, if set, records the calls that do not belong to the step.
    """

    is_enabled: bool = True
    aside: Recorder | None = None


def dispatch_calls(
    native: Callable[..., Any],
    enabled: Sequence[Claim],
    baseline: Sequence[Claim],
    recorder: Recorder,
    turn: Turn,
) -> Callable[..., Any]:
    """Wrap the trainer's function: a call goes to the first route that serves it, otherwise to the function itself.

    Each variant has claims of its own, and ``turn`` says whose turn it is.
    The function must have a parameter ``logits`` [..., T, V]; T is the number of tokens.
    """
    signature = inspect.signature(native)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        claims = enabled if turn.is_enabled else baseline
        if not claims:
            return native(*args, **kwargs)
        record = turn.aside or recorder
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        logits: torch.Tensor = bound.arguments["logits"]
        needs_grad = torch.is_grad_enabled() and logits.requires_grad
        for operator, route in claims:
            if not operator.serves(needs_grad=needs_grad):
                continue
            refusal = None if route is None else route.refuse(bound.arguments)
            if route is not None and refusal is None:
                result = route.run(bound.arguments)
                record.count(operator.name, {"calls": 1, "tokens": logits.shape[-2]})
                return result
            if refusal is not None:
                record.refuse_call(operator.name, refusal)
            record.count(operator.name, {"fallbacks": 1})
        return native(*args, **kwargs)

    return functools.update_wrapper(dispatch, native, updated=())
