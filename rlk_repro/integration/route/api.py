"""What a route is, how the one of an operator is found, and the wrapper that sends a trainer's calls to it.

A fallback has a reason that was known before the call; an error inside an implementation is never one.  This folder
needs torch and the table of operators and nothing else of the package: a trainer could take it over as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final, Protocol, TypeAlias

import torch

from rlk_repro.integration.route.batch import CurrentBatch
from rlk_repro.integration.route.rl_kernel import Provenance
from rlk_repro.integration.route.watch import Watch
from rlk_repro.operators import OPERATORS, Case, Operator, Reason, Refusal, find_refusal

RL_KERNEL_PACKAGE: Final = "rl_engine"
Call: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Route:
    """One operator in one trainer.  Both functions get a call's arguments by name, defaults filled in.

    ``refuse`` gives a reason known before the call, or None; ``run`` returns what the trainer's function would.
    """

    implementation: str
    version: str
    refuse: Callable[[Call], Refusal | None]
    run: Callable[[Call], Any]
    provenance: Provenance | None = None


@dataclass(frozen=True, kw_only=True)
class RouteContext:
    """What a route may build on: the case, the trainer's own function and its options, the batch whose loss is being
    computed, and who looks after the answers."""

    case: Case
    native: Callable[..., Any]
    args: Any
    batch: CurrentBatch = field(default_factory=CurrentBatch)
    watch: Watch = field(default_factory=Watch)


RouteFactory: TypeAlias = Callable[[RouteContext], Route | Refusal]


def resolve(op: str, context: RouteContext, routes: Mapping[str, RouteFactory]) -> Route | Refusal:
    """Find the route of ``op``: the table's rules first, then the route itself, then whether its class counts."""
    refusal = find_refusal(op, context.case)
    if refusal is not None:
        return refusal
    if op not in routes:
        return Refusal(Reason.NO_ROUTE if find_spec(RL_KERNEL_PACKAGE) else Reason.NOT_IMPORTABLE)
    route = routes[op](context)
    if isinstance(route, Route) and not OPERATORS[op].find_implementation(context.case.platform, route.implementation):
        return Refusal(Reason.NOT_ACCEPTED, route.implementation)
    return route


@dataclass(frozen=True)
class RoutedOperator:
    """An operator that was asked for, with its route; without one, every call it would serve is a fallback."""

    operator: Operator
    route: Route | None


@dataclass
class Count:
    """Calls that RL-Kernel served and rows of logits in them; calls it should have served and did not."""

    calls: int = 0
    tokens: int = 0
    fallbacks: int = 0

    def add(self, other: Count) -> None:
        self.calls += other.calls
        self.tokens += other.tokens
        self.fallbacks += other.fallbacks


class Recorder(Protocol):
    """Keeps the record of what the calls of operators came to."""

    def count(self, op: str, count: Count) -> None:
        """Add to the counts of ``op``."""

    def refuse_call(self, op: str, refusal: Refusal) -> None:
        """Note why a call falls back; raise where no call may."""


@dataclass
class Turn:
    """Whether it is RL-Kernel's turn; while it is not, every call goes to the trainer's own function, uncounted.

    ``aside`` takes the record of calls that are no calls of the step.
    """

    is_enabled: bool = True
    aside: Recorder | None = None


def dispatch_calls(
    native: Callable[..., Any], claims: Sequence[RoutedOperator], recorder: Recorder, turn: Turn
) -> Callable[..., Any]:
    """Wrap the trainer's function: a call goes to the first claim that serves it and does not refuse, else to it.

    The function must have a parameter ``logits`` [..., T, V]; T is what counts as tokens.
    """
    signature = inspect.signature(native)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if not turn.is_enabled:
            return native(*args, **kwargs)
        record = turn.aside or recorder
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        logits: torch.Tensor = bound.arguments["logits"]
        needs_grad = torch.is_grad_enabled() and logits.requires_grad
        for claim in claims:
            name = claim.operator.name
            if not claim.operator.serves(needs_grad=needs_grad):
                continue
            if claim.route is None:
                record.count(name, Count(fallbacks=1))
            elif (refusal := claim.route.refuse(bound.arguments)) is not None:
                record.refuse_call(name, refusal)
                record.count(name, Count(fallbacks=1))
            else:
                result = claim.route.run(bound.arguments)
                record.count(name, Count(calls=1, tokens=logits.shape[-2]))
                return result
        return native(*args, **kwargs)

    return functools.update_wrapper(dispatch, native, updated=())
