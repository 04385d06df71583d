"""Compute log-probs with torch.compile, which a user would try before a library of kernels.

A call must run compiled code: a graph break or too many compilations raise torch's own error, because the whole graph
is compiled, and a call that torch ran eagerly for another reason raises ``RouteFailed``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch

from rlk_repro.integration.route.api import Call
from rlk_repro.integration.route.log_probs import Selected, Shard, check_result
from rlk_repro.integration.route.moments import find_moments
from rlk_repro.integration.route.rl_kernel import LoadedOperator, RouteFailed
from rlk_repro.operators import COMPILED_LOGP

BACKEND: Final = "inductor"
_VERSION: Final = f"{torch.__version__} ({BACKEND})"
LOADED: Final = LoadedOperator(op=None, implementation="torch.compile", version=_VERSION)


def select_no_grad(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


def select_with_grad(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    values = logits.float()
    return values.gather(1, tokens.unsqueeze(1)).squeeze(1) - values.logsumexp(-1)


class CompiledFunction:
    """A function that is compiled as one graph; ``num_runs`` counts the calls of its compiled code."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        from torch import _dynamo as dynamo  # takes two seconds, and most trials compile nothing

        self.num_runs = 0
        self._dynamo = dynamo
        self._compiled = torch.compile(function, fullgraph=True, backend=self._compile)

    def _compile(self, graph: Any, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self._dynamo.utils.counters["frames"]["total"] += 1  # torch does not count frames of whole graphs
        compiled = self._dynamo.lookup_backend(BACKEND)(graph, inputs)

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return compiled(*args)

        return run

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return log-probs [T] float32 of ``tokens`` [T] for any number T of rows of ``logits`` [T, V].

        Raises:
            RouteFailed: torch did not run the compiled code.
        """
        for tensor in (logits, tokens):
            self._dynamo.maybe_mark_dynamic(tensor, 0)  # avoids a compilation for each number of rows
        num_before = self.num_runs
        # on a CPU the module tier switches torch's compiler off for both variants' own functions
        on_cpu = nullcontext() if logits.is_cuda else self._dynamo.config.patch(disable=False)
        with on_cpu:
            result = self._compiled(logits, tokens)
        if self.num_runs != num_before + 1:
            what = "torch ran the call without its compiled code"
            raise RouteFailed(f"{COMPILED_LOGP}: {what}, expected TORCH_COMPILE_DISABLE unset")
        return result


@functools.cache
def load_functions() -> tuple[CompiledFunction, CompiledFunction]:
    """Return the functions without and with gradient; each compiles at its first call."""
    return CompiledFunction(select_no_grad), CompiledFunction(select_with_grad)


def run(call: Call, logits: torch.Tensor, _: Shard) -> Selected:
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    log_probs = load_functions()[needs_grad](logits, call["tokens"])
    check_result(COMPILED_LOGP, log_probs, call["tokens"], needs_grad=needs_grad)
    return log_probs, find_moments(logits.detach()).entropy if call["with_entropy"] else None
