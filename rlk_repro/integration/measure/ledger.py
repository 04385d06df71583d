"""Which implementation an operator's calls resolve to and why, how often it ran, and the file that says so.

A fallback has a reason that was known before the call; an error inside an implementation is never one.  The routes
themselves are in ``routes``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from rlk_repro.base.disk import open_stream
from rlk_repro.base.errors import CheckFailed, Problem, SpecError
from rlk_repro.base.files import dump_json_line
from rlk_repro.integration.route.old_log_probs import CurrentBatch
from rlk_repro.integration.route.rl_kernel import Provenance
from rlk_repro.integration.route.watch import Watch
from rlk_repro.operators import OPERATORS, OPS_SCHEMA, Case, Operator, Reason, Refusal, find_refusal
from rlk_repro.rundir.paths import ops_file

logger = logging.getLogger(__name__)

RL_KERNEL_PACKAGE: Final = "rl_engine"
Call: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What an operator resolved to.  In a fallback ``implementation`` is the trainer's module, ``version`` empty.

    ``provenance`` is RL-Kernel's own account, where it dispatched by contract.
    """

    op: str
    implementation: str
    version: str
    reason: str
    is_rl_kernel: bool
    provenance: Provenance | None = None


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
class Claim:
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


class OpsWriter:
    """The ops file of one rank: one JSON object a line, each flushed, in a file that this process created."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Create the file.

        Raises:
            SpecError: it is there already: lines of two processes must not mix.
        """
        path = ops_file(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._stream = open_stream(path, "xb")
        except FileExistsError:
            raise SpecError(
                Problem(
                    str(path),
                    "is there already, written by another process",
                    expected="a folder of its own for every trial",
                    hint="point RLK_REPRO_OPS_DIR elsewhere, or move the old files away",
                )
            ) from None

    def write(self, event: str, **fields: Any) -> None:
        self._stream.write(f"{dump_json_line({'event': event, **fields})}\n".encode())
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class Ledger:
    """Decisions, each once, and counts per operator; written to the ops file where there is one.

    ``own`` is what calls fall back to, the trainer's module.
    """

    def __init__(self, writer: OpsWriter | None, *, ops: Sequence[str], own: str, is_fallback_allowed: bool) -> None:
        self.decisions: list[Decision] = []
        self._writer, self._own, self._is_fallback_allowed = writer, own, is_fallback_allowed
        self._step = {op: Count() for op in ops}
        self._total = {op: Count() for op in ops}
        self._num_steps = 0

    def open(self, **fields: Any) -> None:
        self._write("install", schema=OPS_SCHEMA, ops=list(self._total), **fields)

    def decide(self, op: str, found: Route | Refusal) -> None:
        """Record what ``op`` resolved to, unless that is recorded already; a fallback is also a warning."""
        if isinstance(found, Route):
            decision = Decision(
                op=op,
                implementation=found.implementation,
                version=found.version,
                reason="",
                is_rl_kernel=True,
                provenance=found.provenance,
            )
        else:
            decision = Decision(op=op, implementation=self._own, version="", reason=str(found), is_rl_kernel=False)
        if decision in self.decisions:
            return
        self.decisions.append(decision)
        if decision.is_rl_kernel:
            logger.info("rlk-repro: %s: %s %s", op, decision.implementation, decision.version)
        else:
            logger.warning("rlk-repro: %s: falls back to %s: %s", op, self._own, decision.reason)
        fields = dataclasses.asdict(decision)
        self._write("decision", **{name: value for name, value in fields.items() if value is not None})

    def find_rl_kernel(self, op: str) -> Decision | None:
        """The decision that RL-Kernel serves ``op``, if that is what was decided."""
        return next((item for item in self.decisions if item.op == op and item.is_rl_kernel), None)

    def refuse_call(self, op: str, refusal: Refusal) -> None:
        """Record why a call falls back.

        Raises:
            CheckFailed: the mode forbids it.
        """
        if not self._is_fallback_allowed:
            problem = Problem(op, f"a call cannot be served: {refusal}", expected="no fallback, the mode is require")
            raise CheckFailed(problem)
        self.decide(op, refusal)

    def count(self, op: str, count: Count) -> None:
        self._step[op].add(count)
        self._total[op].add(count)

    def end_step(
        self, step: int, timers: Mapping[str, float], memory: Mapping[str, int], odd: Mapping[str, str]
    ) -> None:
        """Record a step; ``odd`` is what was wrong with RL-Kernel's answers, by operator.

        Raises:
            CheckFailed: something was, and the mode forbids going on.
        """
        self._write("step", step=step, timers=timers, memory=memory, calls=_as_json(self._step), odd=odd)
        self._step = {op: Count() for op in self._step}
        self._num_steps += 1
        for op, what in odd.items():
            logger.error("rlk-repro: %s: step %d: %s", op, step, what)
        if odd and not self._is_fallback_allowed:
            raise CheckFailed(*(Problem(f"{op}, step {step}", what, hint="run the baseline to see whether the logits "
                                        "were at fault") for op, what in odd.items()))  # fmt: skip

    def record_kernels(self, names: Sequence[str]) -> None:
        """The kernels that a profiler saw on the device, in one pass over everything that was measured."""
        self._write("kernels", names=list(names))

    def close(self) -> None:
        self._write("end", num_steps=self._num_steps, calls=_as_json(self._total))
        if self._writer is not None:
            self._writer.close()

    def _write(self, event: str, **fields: Any) -> None:
        if self._writer is not None:
            self._writer.write(event, **fields)


def _as_json(counts: Mapping[str, Count]) -> dict[str, dict[str, int]]:
    return {op: dataclasses.asdict(count) for op, count in counts.items()}


def dispatch_calls(native: Callable[..., Any], claims: Sequence[Claim], ledger: Ledger) -> Callable[..., Any]:
    """Wrap the trainer's function: a call goes to the first claim that serves it and does not refuse, else to it.

    The function must have a parameter ``logits`` [..., T, V]; T is what counts as tokens.
    """
    signature = inspect.signature(native)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        logits: torch.Tensor = bound.arguments["logits"]
        needs_grad = torch.is_grad_enabled() and logits.requires_grad
        for claim in claims:
            name = claim.operator.name
            if not claim.operator.serves(needs_grad=needs_grad):
                continue
            if claim.route is None:
                ledger.count(name, Count(fallbacks=1))
            elif (refusal := claim.route.refuse(bound.arguments)) is not None:
                ledger.refuse_call(name, refusal)
                ledger.count(name, Count(fallbacks=1))
            else:
                result = claim.route.run(bound.arguments)
                ledger.count(name, Count(calls=1, tokens=logits.shape[-2]))
                return result
        return native(*args, **kwargs)

    return functools.update_wrapper(dispatch, native, updated=())
