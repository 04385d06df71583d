"""Compute log-probs with RL-Kernel's ``batch_invariant_logp``, with and without gradient, in one read of the logits.

On Hopper RL-Kernel chooses a class whose forward kernel loads by TMA (SM90); its backward kernel is Triton's.  If it
cannot take an input, it calls another class and reports nothing, so this module judges inputs before the call.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.autograd.graph import saved_tensors_hooks

from rlk_repro.integration.route.log_probs import (
    LogP,
    Selected,
    Shard,
    ShardLogProbs,
    Targets,
    check_result,
    find_value_refusal,
    select_no_grad,
)
from rlk_repro.integration.route.moments import find_moments
from rlk_repro.operators import BATCH_INVARIANT_LOGP, Reason, Refusal

SM90_DTYPES: Final = (torch.float32, torch.bfloat16)
SM90_ALIGNMENT: Final = 16
"""TMA needs rows whose size in bytes this number divides."""
SM90_TILE: Final = 4096
SM90_BOX: Final = 256
"""The SM90 kernel reads tiles of 4,096 columns, and at last a tail of less than 256."""
WARM_ROWS: Final = (16, 17)
"""Triton compiles a kernel twice: for numbers of rows that 16 divides, and for all others."""


def select(op: LogP, logits: torch.Tensor, tokens: torch.Tensor, shard: Shard, *, with_entropy: bool) -> Selected:
    """Return log-probs, with gradient if ``logits`` need one, and entropies.

    On one rank the operator's own graph becomes the trainer's.  On several, the shards' log-sum-exps are joined.

    Args:
        op: RL-Kernel's operator, from logits [T, V] and ids [T] to log-probs [T] with gradient.
        logits: [T, V], contiguous, T > 0.
        tokens: [T] ids in the whole vocabulary.
    """
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    if shard.size > 1 and not needs_grad:
        return select_no_grad(op, logits, tokens, shard, with_entropy=with_entropy)
    targets = Targets.find(logits, tokens, shard)
    entropy = find_moments(logits.detach()).entropy if with_entropy else None

    def select_local(leaf: torch.Tensor) -> torch.Tensor:
        local = op(leaf, targets.columns)
        check_result(BATCH_INVARIANT_LOGP, local, tokens, needs_grad=needs_grad)
        return local

    if shard.size == 1:
        return select_local(logits), entropy
    result: Selected = ShardLogProbs.apply(  # type: ignore[no-untyped-call]
        logits, targets, select_local, entropy, shard
    )
    return result


def find_sm90_refusal(logits: torch.Tensor) -> Refusal | None:
    """Refuse logits that the SM90 class would hand to another class, or that its kernel would read too early."""
    if torch.cuda.get_device_capability(logits.device)[0] != 9:
        return Refusal(Reason.OTHER_CLASS, "the GPU is not Hopper")
    if logits.dtype not in SM90_DTYPES:
        return Refusal(Reason.OTHER_CLASS, str(logits.dtype))
    row_bytes = logits.shape[1] * logits.element_size()
    if row_bytes % SM90_ALIGNMENT:
        return Refusal(Reason.OTHER_CLASS, f"rows of {row_bytes} bytes, no multiple of {SM90_ALIGNMENT}")
    stream = torch.cuda.current_stream(logits.device)
    return Refusal(Reason.STREAM) if stream.cuda_stream else None  # the default stream's handle is 0


def find_sm90_value_refusal(logits: torch.Tensor, tokens: torch.Tensor, shard: Shard) -> Refusal | None:
    """Refuse -inf also where a tile begins, because the SM90 kernel returns NaN for a tile that is all -inf."""
    num_columns = logits.shape[1]
    tail = num_columns - num_columns % SM90_BOX
    starts = [*range(0, tail, SM90_TILE), *range(tail, num_columns, SM90_BOX)]
    return find_value_refusal(logits, tokens, shard, starts)


class WarmUp:
    """Lets Triton compile an operator's kernels for every kind of row count, before the first call of a shape.

    Otherwise a scored step with the first microbatch of another kind would include a compilation.
    """

    def __init__(self, op: LogP) -> None:
        self._op = op
        self._seen: set[tuple[int, torch.dtype, bool]] = set()

    def run(self, logits: torch.Tensor) -> None:
        needs_grad = torch.is_grad_enabled() and logits.requires_grad
        key = (logits.shape[1], logits.dtype, needs_grad)
        if key in self._seen:
            return
        self._seen.add(key)
        # recomputing the loss skips these calls, so torch must not count their tensors among those of the loss
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            for num_rows in WARM_ROWS:
                rows = logits.new_zeros((num_rows, logits.shape[1]), requires_grad=needs_grad)
                values = self._op(rows, torch.zeros(num_rows, dtype=torch.long, device=logits.device))
                if needs_grad:
                    torch.autograd.grad(values.sum(), rows)
