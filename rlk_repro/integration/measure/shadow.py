"""Compute a microbatch of a baseline step by the routes of both variants, and measure their difference.

The comparison uses detached logits, because a second backward pass through the model would add to the model's
gradients.  Both routes compute the first rows' log-probs; later rows use the baseline's log-probs.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from rlk_repro.integration.measure.ledger import Ledger
from rlk_repro.integration.measure.profile import StepProfile
from rlk_repro.integration.route.api import NO_CALLS, Turn
from rlk_repro.integration.route.batch import CurrentBatch
from rlk_repro.integration.route.log_probs import Shard
from rlk_repro.integration.route.rl_kernel import RouteFailed, find_failures
from rlk_repro.integration.route.watch import Watch
from rlk_repro.operators import Refusal

AS_TRAINED: Final = "as trained"
PEAKED: Final = "peaked"
SCALES: Final = {AS_TRAINED: 1.0, PEAKED: 50.0}
"""Factors that scale logits: a factor above 1 shows errors that the nearly uniform logits of random weights hide."""
MAX_ROWS: Final = 2048
"""Largest number of rows to compare: a real model's logits take gigabytes, and a comparison holds several copies."""
MAX_WHOLE_BYTES: Final = 2 << 30
"""Largest size of the logits, in bytes, for comparing an operator that serves the whole loss: it needs all rows."""
NUM_BUFFERS: Final = 6
"""A comparison needs memory for this many tensors, each as large as the compared logits."""
MAX_ERROR: Final = 300


@dataclass(frozen=True)
class _Microbatch:
    """``call`` holds the arguments of the log-prob function."""

    args: Any
    batch: Mapping[str, Any]
    logits: torch.Tensor
    reducer: Any
    call: Mapping[str, Any]
    log_probs: torch.Tensor
    entropy: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        return min(MAX_ROWS, len(self.log_probs))


@dataclass
class _Calls:
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, op: str, count: Mapping[str, int]) -> None:
        self.counts.setdefault(op, Counter(NO_CALLS)).update(count)

    def refuse_call(self, op: str, refusal: Refusal) -> None:
        raise RouteFailed(f"{op}: a call cannot be served: {refusal}")


class ShadowStep:
    """Compares the routes in each shadow step, for the first microbatch that computes gradients.

    With ``is_loss_routed`` an operator serves the whole loss.
    """

    def __init__(
        self, profile: StepProfile, ledger: Ledger, watch: Watch, turn: Turn, batch: CurrentBatch, *,
        is_loss_routed: bool, refusal: str,
    ) -> None:  # fmt: skip
        self._profile, self._ledger, self._watch, self._turn, self._batch = profile, ledger, watch, turn, batch
        self._is_loss_routed, self._refusal = is_loss_routed, refusal
        self._step: int | None = None
        self._is_listening = False
        self._seen: tuple[Mapping[str, Any], torch.Tensor, torch.Tensor | None] | None = None
        self._answer: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._find_log_probs: Callable[..., Any] = lambda: None
        self._find_loss: Callable[..., Any] = lambda: None

    def begin_step(self, step: int | None) -> None:
        """Begin a step; ``step`` is its number if it is a shadow step, otherwise None."""
        self._step, self._seen = step, None

    def follow_log_probs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the trainer's log-prob function: keep its result, or return log-probs that a comparison already has."""
        self._find_log_probs, signature = function, inspect.signature(function)

        def compute(*args: Any, **kwargs: Any) -> Any:
            if self._answer is not None:
                return self._answer
            result = function(*args, **kwargs)
            if self._is_listening and torch.is_grad_enabled():
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                log_probs, entropy = result
                self._seen = bound.arguments, log_probs.detach(), None if entropy is None else entropy.detach()
            return result

        return functools.update_wrapper(compute, function, updated=())

    def follow_loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._find_loss = function

        def compute(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
            self._is_listening = self._step is not None
            try:
                result = function(args, batch, logits, sum_of_sample_mean)
            finally:
                self._is_listening = False
            if self._step is not None and self._seen is not None and len(self._seen[1]):
                step, (call, own, entropy) = self._step, self._seen
                self.begin_step(None)
                with self._apart():
                    self._compare(
                        step, _Microbatch(args, batch, logits.detach(), sum_of_sample_mean, call, own, entropy)
                    )
            return result

        return functools.update_wrapper(compute, function, updated=())

    @contextmanager
    def _apart(self) -> Iterator[None]:
        # without these hooks, activation recomputation would also count the tensors that the comparison saves
        keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        is_enabled = self._turn.is_enabled
        with self._profile.paused(), self._watch.aside(), torch.enable_grad(), keep:
            try:
                yield
            finally:
                self._turn.is_enabled, self._turn.aside, self._answer = is_enabled, None, None

    def _compare(self, step: int, microbatch: _Microbatch) -> None:
        """Either all ranks of a group compare, or no rank does."""
        problem = self._refusal
        for case in SCALES:
            if not self._refusal:
                problem = _hear_ranks(problem or self._find_obstacle(microbatch), microbatch.call)
            record: dict[str, Any] = {}
            if not problem:
                try:
                    record = self._compare_case(case, microbatch)
                except find_failures() as error:
                    problem = describe_error(error)
            self._ledger.write("shadow", step=step, case=case, **({"error": problem} if problem else record))

    def _find_obstacle(self, microbatch: _Microbatch) -> str:
        """As a test, allocate the needed memory and free it."""
        logits = microbatch.call["logits"]
        size = logits[: microbatch.num_rows].nbytes
        if self._is_loss_routed:
            size = microbatch.logits.nbytes
            if size > MAX_WHOLE_BYTES:
                return f"an operator that serves the whole loss needs {size} bytes of logits, limit {MAX_WHOLE_BYTES}"
        try:
            _ = [torch.empty(size, dtype=torch.uint8, device=logits.device) for _ in range(NUM_BUFFERS)]
        except (RuntimeError, MemoryError) as error:
            return describe_error(error)
        return ""

    def _compare_case(self, case: str, microbatch: _Microbatch) -> dict[str, Any]:
        self._turn.aside = _Calls()
        baseline, one = self._compute(case, microbatch)
        self._turn.aside = calls = _Calls()
        self._turn.is_enabled = True
        enabled, other = self._compute(case, microbatch)
        self._turn.is_enabled = False
        name = "policy loss" if case == AS_TRAINED or self._is_loss_routed else "alternating sum of log-probs"
        return {
            "calls": calls.counts,
            "loss": {"name": name, "baseline": _finite(one), "enabled": _finite(other)},
            **{what: _find_gap(baseline[what], enabled[what]) for what in baseline},
        }

    def _compute(self, case: str, microbatch: _Microbatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rows = slice(microbatch.num_rows)
        mask = microbatch.call["log_prob_keep_mask"]
        leaf = _scale(microbatch.call["logits"].detach()[rows], case)
        call = {
            **microbatch.call,
            "logits": leaf,
            "tokens": microbatch.call["tokens"][rows],
            "log_prob_keep_mask": None if mask is None else mask[rows],
        }
        with self._batch.hold(microbatch.args, microbatch.batch, len(microbatch.log_probs)):
            with torch.no_grad():
                passed, _ = self._find_log_probs(**call | {"with_entropy": False})
            log_probs, entropy = self._find_log_probs(**call)
        find_loss = functools.partial(self._find_loss, microbatch.args, microbatch.batch)
        if self._is_loss_routed:
            leaf = _scale(microbatch.logits, case)
            loss, _ = find_loss(leaf, microbatch.reducer)
        elif case == AS_TRAINED:
            self._answer = (_complete(log_probs, microbatch.log_probs), _complete(entropy, microbatch.entropy))
            loss, _ = find_loss(microbatch.logits, microbatch.reducer)
            self._answer = None
        else:
            # scaled logits move log-probs so far from the old policy's that a clipped loss's gradient can be 0
            loss = log_probs[::2].sum() - log_probs[1::2].sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        found = {"log_probs": log_probs.detach(), "log_probs_no_grad": passed, "logits_grad": gradient}
        return found, loss.detach()


def _scale(logits: torch.Tensor, case: str) -> torch.Tensor:
    """Scale the logits for a case; for factor 1 the result is a view of ``logits``."""
    scaled = logits if case == AS_TRAINED else (logits.float() * SCALES[case]).to(logits.dtype)
    return scaled.detach().requires_grad_()


def _complete(rows: Any, whole: torch.Tensor | None) -> Any:
    return None if whole is None else torch.cat([rows, whole[len(rows) :]])


def _hear_ranks(problem: str, call: Mapping[str, Any]) -> str:
    """If one rank of the group cannot compare, no rank compares."""
    shard = Shard.of(call["tp_group"])
    if shard.size == 1:
        return problem
    is_fine = torch.tensor([not problem], dtype=torch.int32, device=call["logits"].device)
    dist.all_reduce(is_fine, dist.ReduceOp.MIN, group=shard.group)
    return problem or ("" if is_fine.item() else "another rank of the tensor-parallel group cannot compare")


def _find_gap(baseline: torch.Tensor, enabled: torch.Tensor) -> dict[str, Any]:
    gap = (enabled.float() - baseline.float()).abs_()
    low, high = baseline.aminmax()
    return {
        "max_abs": _finite(gap.max()),
        "mean_abs": _finite(gap.mean()),
        "max_abs_baseline": _finite(torch.maximum(-low, high)),
        "n": gap.numel(),
    }


def _finite(value: torch.Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def describe_error(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:MAX_ERROR]
