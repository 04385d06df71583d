"""Compute log-probs over a vocabulary that may be split over ranks, with operators that know one rank's columns only.

``logp`` returns l = log_softmax(logits)[id]; ``ratio_kl`` returns exp(l - old), with gradient.  T is the number of
packed rows, V is this rank's columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from rlk_repro.integration.route.moments import find_moments
from rlk_repro.integration.route.rl_kernel import RouteFailed
from rlk_repro.operators import Reason, Refusal

LogP: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LogPOfRows: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
RatioKL: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Selected: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Log-probs [T] float32, and entropies [T] without gradient if they are requested."""
ValueCheck: TypeAlias = Callable[[torch.Tensor, torch.Tensor, "Shard"], Refusal | None]

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
PROBED_COLUMNS: Final = 256
"""Number of first columns to check: a kernel returns NaN for a row only if one of these columns is -inf.

The online kernel reads these columns in the first two strides of its 128 threads.  The Triton kernel returns NaN
only if its whole first tile is -inf, and that tile begins with these columns.
"""
NEAR: Final = 8.0
"""Rows with |log-prob - old log-prob| below this are near: in them exp and log err by less than float32 rounding."""


@dataclass(frozen=True)
class Shard:
    """This rank's number among the ranks that share the vocabulary; ``group`` is None for a single rank."""

    rank: int
    size: int
    group: Any

    @classmethod
    def of(cls, group: Any) -> Shard:
        if group is None or dist.get_world_size(group) == 1:
            return cls(0, 1, None)
        return cls(dist.get_rank(group), dist.get_world_size(group), group)


@dataclass(frozen=True)
class Targets:
    """The tokens of a call; the operators compute log-probs within the shard, for one column per row (``columns``).

    If the vocabulary is not split, the columns are the tokens.  If the vocabulary is split, the logit minus the
    log-prob of any one column is the shard's normaliser.  The log-prob of a large logit has a small rounding error, so
    each row uses the column of the largest of its first ``PROBED_COLUMNS`` logits.
    """

    columns: torch.Tensor
    split: SplitTokens | None

    @classmethod
    def find(cls, logits: torch.Tensor, tokens: torch.Tensor, shard: Shard) -> Targets:
        logits = logits.detach()
        if shard.size == 1:
            return cls(tokens, None)
        largest, columns = logits[:, :PROBED_COLUMNS].max(dim=1)
        return cls(columns, SplitTokens.find(logits, tokens, shard, largest.float()))

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        return _pick(logits, self.columns) if self.split is None else self.split.asked_logits


@dataclass(frozen=True)
class SplitTokens:
    """The tokens as columns of this shard; where another rank holds the token, the column is 0 and ``is_own`` false."""

    columns: torch.Tensor
    is_own: torch.Tensor
    logits: torch.Tensor
    asked_logits: torch.Tensor

    @classmethod
    def find(cls, logits: torch.Tensor, tokens: torch.Tensor, shard: Shard, asked_logits: torch.Tensor) -> SplitTokens:
        columns = tokens - shard.rank * logits.shape[1]
        is_own = (columns >= 0) & (columns < logits.shape[1])
        columns = torch.where(is_own, columns, 0)
        return cls(columns, is_own, torch.where(is_own, _pick(logits, columns), 0.0), asked_logits)


def _pick(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, columns.unsqueeze(1)).squeeze(1).float()


def find_value_refusal(
    logits: torch.Tensor, tokens: torch.Tensor, shard: Shard, probed: Sequence[int] = ()
) -> Refusal | None:
    """Refuse values for which the kernels' result would differ from vime's; all ranks of the group get the same answer.

    ``probed`` are further columns in which -inf is refused.  This check waits for the device once.
    """
    if not len(logits):
        return None
    is_outside = ((tokens < 0) | (tokens >= shard.size * logits.shape[1])).any()
    columns = (tokens - shard.rank * logits.shape[1]).clamp(0, logits.shape[1] - 1)
    looked_at = [logits[:, :PROBED_COLUMNS], logits.gather(1, columns.unsqueeze(1)), logits[:, list(probed)]]
    is_infinite = torch.isneginf(torch.cat(looked_at, dim=1)).any()
    flags = torch.stack((is_outside, is_infinite)).to(torch.int32)
    if shard.size > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=shard.group)
    has_outside, has_infinite = flags.tolist()
    if has_outside:
        return Refusal(Reason.FOREIGN_ID)
    return Refusal(Reason.NEGATIVE_INFINITY) if has_infinite else None


def find_foreign_id(logits: torch.Tensor, tokens: torch.Tensor, shard: Shard) -> Refusal | None:
    """Refuse token ids outside the vocabulary; this check waits for the device."""
    is_outside = (tokens < 0) | (tokens >= shard.size * logits.shape[1])
    return Refusal(Reason.FOREIGN_ID) if bool(is_outside.any()) else None


class FirstCallCheck:
    """Checks each call's values until one call passes: if a run has invalid logits, its first call already has them."""

    def __init__(self, find: ValueCheck = find_value_refusal) -> None:
        self._find, self._is_passed = find, False

    def find_refusal(self, logits: torch.Tensor, tokens: torch.Tensor, shard: Shard) -> Refusal | None:
        if self._is_passed:
            return None
        with torch.no_grad():  # save no tensors: recomputing the loss skips this check, and torch would miss them
            refusal = self._find(logits, tokens, shard)
        self._is_passed = refusal is None
        return refusal


def find_form_refusal(logits: torch.Tensor, *, is_on_device: bool) -> Refusal | None:
    if logits.dtype not in DTYPES:
        return Refusal(Reason.DTYPE, str(logits.dtype))
    return Refusal(Reason.DEVICE, str(logits.device)) if logits.is_cuda != is_on_device else None


def select_no_grad(
    logp: LogP, logits: torch.Tensor, tokens: torch.Tensor, shard: Shard, *, with_entropy: bool
) -> Selected:
    """Return log-probs and, if requested, entropies; neither has a gradient.

    Args:
        logits: [T, V], contiguous, T > 0.
        tokens: [T] ids in the whole vocabulary.
    """
    targets = Targets.find(logits, tokens, shard)
    local = logp(logits, targets.columns)
    check_result("logp", local, tokens)
    entropy = find_moments(logits).entropy if with_entropy else None
    log_probs, _, entropy = _join(targets, local, entropy, shard)
    return log_probs, entropy


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The operators for log-probs with gradient.

    ``logp_of_far`` returns the exact log-prob of tokens whose old log-prob differs from it by more than ``NEAR``, and 0
    for other tokens.  It is None on a CPU, None if RL-Kernel's ``logp`` is refused, and None if ``can_mend`` fails.
    """

    ratio_kl: RatioKL
    logp: LogP
    logp_of_far: LogPOfRows | None = None


def select_with_grad(
    operators: Operators,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    shard: Shard,
    *,
    with_entropy: bool,
    hint: torch.Tensor | None = None,
) -> Selected:
    """Return log-probs with gradient to ``logits``, and entropies.

    The log-prob is computed as old + log(ratio), where any ``old`` is allowed.  If ``old`` is the log-prob itself, the
    ratio is 1 up to rounding, so exp and log lose no precision.  ``hint`` ([T]) holds log-probs of the old policy.
    If no entropies are requested, a hint close to the log-prob is used as ``old``, which saves a pass over the logits.
    """
    detached = logits.detach()
    targets = Targets.find(detached, tokens, shard)
    entropy = far = None
    if with_entropy:
        largest, log_sum, entropy = find_moments(detached)
        old = targets.pick(detached) - largest - log_sum
    elif hint is not None and operators.logp_of_far is not None and shard.size == 1:
        old, far = hint, operators.logp_of_far
    else:
        old = operators.logp(detached, targets.columns)
        check_result("logp", old, tokens)

    def select(leaf: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(targets.columns, dtype=torch.bool)
        ratio = operators.ratio_kl(leaf, leaf.detach(), targets.columns, mask, old)[0]
        check_result("ratio_kl", ratio, old, needs_grad=True)
        near = old if far is None else _mend_far_rows(ratio, old, leaf.detach(), targets.columns, far)
        return near + ratio.log()

    result: Selected = ShardLogProbs.apply(  # type: ignore[no-untyped-call]
        logits, targets, select, entropy, shard
    )
    return result


class ShardLogProbs(torch.autograd.Function):
    """Computes the gradient of log-probs by the operator's own gradient, and corrects it for a split vocabulary.

    ``select`` returns the shard's own log-probs [T].  Their gradient is e_c - p: p is the shard's softmax, e_c is 1 in
    the requested column.  The wanted gradient is e_t - w * p: w is the shard's share of the probability, and e_t is 1
    in the token's column.  So the wanted gradient is w times the operator's gradient, with two corrections per row.
    The corrections are written into the operator's gradient, so that no second tensor of its size is needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: Targets,
        select: Callable[[torch.Tensor], torch.Tensor],
        entropy: torch.Tensor | None,
        shard: Shard,
    ) -> Selected:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            local = select(leaf)
        log_probs, ctx.weights, entropy = _join(targets, local.detach(), entropy, shard)
        ctx.leaf, ctx.local, ctx.targets = leaf, local, targets
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _entropy: torch.Tensor | None = None) -> tuple[Any, ...]:
        local = ctx.local
        if local is None:
            raise RuntimeError("an earlier backward pass has used and freed the graph of these log-probs")
        split: SplitTokens | None = ctx.targets.split
        if split is None:
            (result,) = torch.autograd.grad(local, ctx.leaf, grad)
        else:
            own = grad * split.is_own.to(grad.dtype)
            grad = grad * ctx.weights
            (result,) = torch.autograd.grad(local, ctx.leaf, grad)
            result.scatter_add_(1, split.columns.unsqueeze(1), own.unsqueeze(1).to(result.dtype))
            result.scatter_add_(1, ctx.targets.columns.unsqueeze(1), -grad.unsqueeze(1).to(result.dtype))
        ctx.leaf = ctx.local = ctx.targets = None
        return result, None, None, None, None


def _mend_far_rows(
    ratio: torch.Tensor, old: torch.Tensor, logits: torch.Tensor, columns: torch.Tensor, logp_of_far: LogPOfRows
) -> torch.Tensor:
    """Return ``old``; where it differs from the exact log-prob by more than ``NEAR``, return the exact log-prob.

    Where ``old`` is replaced, ``ratio``, which is exp(log-prob - old), becomes 1.  The operator's backward pass reads
    this tensor, so its gradient is exact in these rows, even if the ratio was 0 after an underflow.
    """
    values = ratio.data
    is_near = (values > math.exp(-NEAR)) & (values < math.exp(NEAR))
    exact = logp_of_far(logits, columns, is_near)
    values.copy_(torch.where(is_near, values, 1.0))
    return torch.where(is_near, old, exact)


def can_mend(operators: Operators, device: torch.device) -> bool:
    """Whether these operators give torch's results on a small example whose old log-probs are far from exact."""
    assert operators.logp_of_far is not None
    logits = torch.linspace(-3, 3, 4 * 64, device=device).sin().reshape(4, 64)
    tokens = torch.tensor([5, 0, 63, 17], device=device)
    hint = torch.tensor([-4.0, -300.0, 300.0, float("nan")], device=device)
    results = []
    for is_expected in (False, True):
        leaf = logits.clone().requires_grad_()
        if is_expected:
            values = leaf.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        else:
            values, _ = select_with_grad(operators, leaf, tokens, Shard(0, 1, None), with_entropy=False, hint=hint)
        (grad,) = torch.autograd.grad(values, leaf, torch.tensor([1.0, -2.0, 0.5, 3.0], device=device))
        results.append((values.detach(), grad))
    return all(torch.allclose(one, other, atol=1e-5, rtol=0) for one, other in zip(*results, strict=True))


def _join(
    targets: Targets, local: torch.Tensor, entropy: torch.Tensor | None, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Combine the shards: return log-probs, this shard's share of the probability, and entropies.

    In shard r, a column has the logit a and the log-prob l, so the shard's log-sum-exp is n_r = a - l.  Let n be the
    log-sum-exp of all shards and w_r = exp(n_r - n): log_prob = target - n, entropy = sum w_r (entropy_r - log w_r).
    For precision, the largest of the shards' logits ``a`` is first subtracted; all ranks get bitwise equal results.
    """
    if targets.split is None:
        return local, None, entropy
    parts = [targets.split.asked_logits, local, targets.split.logits, targets.split.is_own.float()]
    if entropy is not None:
        parts.append(entropy)
    mine = torch.stack(parts)
    gathered = [torch.empty_like(mine) for _ in range(shard.size)]
    dist.all_gather(gathered, mine, group=shard.group)
    logits, locals_, tokens, is_own, *entropies = torch.stack(gathered, dim=1)
    top = logits.amax(dim=0)
    normalisers = (logits - top) - locals_
    total = normalisers.logsumexp(dim=0)
    log_weights = normalisers - total
    weights = log_weights.exp()
    log_probs = torch.where(is_own.bool(), tokens - top, 0.0).sum(dim=0) - total
    if entropies:
        entropy = _join_entropies(log_weights, entropies[0])
    return log_probs, weights[shard.rank], entropy


def _join_entropies(log_weights: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    """Return the entropy [T] over R shards from the shards' entropies and the logs of their probabilities, [R, T]."""
    # a shard whose weight is 0 has the log weight -inf; the clamp makes it add 0 and not NaN
    return (log_weights.exp() * (entropies - log_weights.clamp_min(torch.finfo(torch.float32).min))).sum(dim=0)


def select_by_moments(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return log-probs [T] by torch alone, for platforms on which RL-Kernel offers no ``logp``."""
    largest, log_sum, _ = find_moments(logits)
    return _pick(logits, columns) - largest - log_sum


def check_result(op: str, result: Any, like: torch.Tensor, *, needs_grad: bool = False) -> None:
    """Check that an operator's result has the documented shape, dtype and gradient; ``Watch`` checks its values."""
    if not isinstance(result, torch.Tensor) or result.shape != like.shape or result.dtype != torch.float32:
        got = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, torch.Tensor) else type(result).__name__
        expected = f"{tuple(like.shape)} torch.float32"
        raise RouteFailed(f"{op}: the result is not as documented, got {got!r}, expected {expected}")
    if needs_grad and not result.requires_grad:
        raise RouteFailed(f"{op}: returned a result without gradient, expected one with a gradient")
