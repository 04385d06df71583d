"""Measure, token by token, how far the trainer's log-probs differ from the rollout's.

During a step only references to the trainer's tensors are kept.  Computing with them, or copying data to the device,
would make the host wait between forward and backward.  When the step has ended, the device computes all sums, and the
host reads them once.  No tensor of the trainer is changed, and none is kept beyond the step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from rlk_repro.integration.route.api import Turn
from rlk_repro.rundir.agreement import LADDER, LOG_PROBS, NUM_CLASSES, NUM_LOG_PROBS, NUM_POSITIONS

_SUMS: Final = ("abs", "k1", "k3")
_NUM_ROWS: Final = NUM_POSITIONS + NUM_LOG_PROBS


Microbatch: TypeAlias = Mapping[str, Any]
"""What one call of the trainer's loss gets: lists by name, with one entry per sample."""
_PER_TOKEN: Final = ("log_probs", "rollout_log_probs", "loss_masks", "unconcat_tokens")
_LISTS: Final = (*_PER_TOKEN, "response_lengths")


class TokenRecord:
    """Records per step how far log-probs of training and rollout differ, or ``refusal``: why they are not compared."""

    def __init__(self, refusal: str = "", turn: Turn | None = None) -> None:
        self._refusal, self._reason, self._turn = refusal, refusal, turn
        self._seen: list[Microbatch] = []

    def follow_loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the trainer's loss of a microbatch, and record its arguments after the call."""

        def compute(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
            result = function(args, batch, logits, sum_of_sample_mean)
            if not self._refusal and (self._turn is None or self._turn.is_enabled):
                self._add(batch)
            return result

        return functools.update_wrapper(compute, function, updated=())

    def end_step(self) -> dict[str, Any] | None:
        """Return the step's counts as plain values, or a ``reason`` why they are absent; None if no loss was called.

        ``seconds`` is the time that computing the counts took, on the host and on the device.
        """
        seen, self._seen = self._seen, []
        reason, self._reason = self._reason, self._refusal
        if reason or not seen:
            return {"reason": reason} if reason else None
        device = seen[0]["log_probs"][0].device
        if device.type == "cuda":
            # finish the work that the trainer has queued on the device, because ``seconds`` must not include this work
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        with torch.no_grad():
            numbers = iter(_count(_join(seen)).tolist())
        counts = [[int(next(numbers)) for _ in range(NUM_CLASSES + 1)][:NUM_CLASSES] for _ in range(_NUM_ROWS)]
        positions, log_probs = counts[:NUM_POSITIONS], counts[NUM_POSITIONS:]
        sums = {name: next(numbers) for name in _SUMS}
        by_position = [next(numbers) for _ in range(NUM_POSITIONS)]
        size, place, token, num_not_finite = numbers
        return {
            "tokens": sum(map(sum, log_probs)),
            "not_finite": int(num_not_finite),
            "by_position": _cut(positions),
            "by_log_prob": log_probs,
            "abs_by_position": by_position[: len(_cut(positions))],
            "sums": sums,
            "largest": {"abs": size, **_find_place(seen, int(place)), "token": int(token)},
            "seconds": time.perf_counter() - began,
        }

    def _add(self, batch: Mapping[str, Any]) -> None:
        ours, theirs, responses = map(batch.get, ("log_probs", "rollout_log_probs", "response_lengths"))
        if not ours or not theirs or not responses:
            whose = "training" if not ours else "the rollout"
            self._reason = f"the batch has no log-probs of {whose}"
        elif not list(responses) == [len(part) for part in ours] == [len(part) for part in theirs]:
            self._reason = "log-probs of training and rollout do not cover the same tokens"
        else:
            # only references: the trainer's own dictionary may change before the step ends
            self._seen.append({name: batch[name] for name in _LISTS})


def _join(seen: Sequence[Microbatch]) -> Microbatch:
    """Merge all microbatches into one, because counting one takes fewer kernel launches."""
    merged: dict[str, list[Any]] = {name: [] for name in _LISTS}
    for item in seen:
        for name in _LISTS:
            merged[name].extend(item[name])
    return merged


def _count(microbatch: Microbatch) -> torch.Tensor:
    """Return counts, sums and the largest difference as one float64 tensor, so that the host needs a single copy.

    First comes a table with one row for each band of positions, then one for each band of log-probs.  Each column
    counts the differences of one size class; the last column counts tokens that are masked or not finite.  After the
    table come, in this order: ``_SUMS``; ``abs`` for each band of positions; the largest difference, with its token's
    index and id; and the number of tokens that have a log-prob that is not finite.
    """
    lengths = microbatch["response_lengths"]
    ours = torch.cat(microbatch["log_probs"]).double()
    place = ours.device
    theirs = torch.cat(microbatch["rollout_log_probs"]).to(place).double()
    trained = torch.cat(microbatch["loss_masks"]).to(place) != 0
    parts = zip(microbatch["unconcat_tokens"], lengths, strict=True)
    tokens = torch.cat([part[len(part) - length :] for part, length in parts]).to(place)
    position = torch.cat([torch.arange(length) for length in lengths]).to(place)
    r = ours - theirs
    is_finite = torch.isfinite(ours) & torch.isfinite(theirs)
    counts = trained & is_finite
    r = torch.where(counts, r, 0.0)
    # float32 like torch.tensor(LADDER), so that a difference of 1e-06 counts as equal to the bound 1e-06
    size = r.abs().float()
    classes = torch.where(counts, torch.bucketize(size, torch.tensor(LADDER, device=place)), NUM_CLASSES)
    bands = (position + 1).double().log2().floor().long().clamp(max=NUM_POSITIONS - 1)
    probable = torch.bucketize(theirs.float(), torch.tensor(LOG_PROBS, device=place))
    width = NUM_CLASSES + 1
    table = torch.zeros(_NUM_ROWS * width, dtype=torch.float64, device=place)
    one = torch.ones_like(r)
    table.index_add_(0, bands * width + classes, one)
    table.index_add_(0, (NUM_POSITIONS + probable) * width + classes, one)
    by_position = torch.zeros(NUM_POSITIONS, dtype=torch.float64, device=place).index_add_(0, bands, r.abs())
    at = size.argmax()
    single = [r.abs().sum(), -r.sum(), (r.expm1() - r).sum()]
    last = [size[at], at, tokens[at], (trained & ~is_finite).sum()]
    return torch.cat([table, torch.stack(single), by_position, torch.stack([value.double() for value in last])])


def _find_place(seen: Sequence[Microbatch], position: int) -> dict[str, int]:
    """Find token number ``position`` of a step: return its microbatch, its sample and its position in the response."""
    for number, microbatch in enumerate(seen):
        for sample, length in enumerate(microbatch["response_lengths"]):
            if position < length:
                return {"microbatch": number, "sample": sample, "position": position}
            position -= length
    raise AssertionError("the token of the largest difference belongs to no sample")


def _cut(rows: list[list[int]]) -> list[list[int]]:
    """Remove the empty rows at the end of a table."""
    return rows[: max((number + 1 for number, row in enumerate(rows) if any(row)), default=0)]
