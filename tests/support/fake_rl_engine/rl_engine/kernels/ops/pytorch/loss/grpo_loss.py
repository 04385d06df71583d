"""The whole GRPO loss from logits: advantages within groups, clipped surrogate, k3 KL, mean over active tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from rl_engine.kernels.ops.pytorch.loss.ratio_kl import NativeRatioKLOp
from torch import Tensor


class NativeGRPOLossOp:
    """``logits [B, T, V]``, tokens and mask ``[B, T]``, rewards or advantages ``[B]``; three scalars come back."""

    def __init__(self) -> None:
        self._ratio_kl = NativeRatioKLOp()

    def __call__(
        self,
        policy_logits: Tensor,
        ref_logits: Tensor,
        action_ids: Tensor,
        old_logps: Tensor,
        rewards: Tensor,
        completion_mask: Tensor,
        *,
        clip_eps: float = 0.2,
        beta: float = 0.0,
        samples_per_prompt: int | None = None,
        group_boundaries: Sequence[int] | Tensor | None = None,
        eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(loss, policy_loss, kl)``, each with a gradient."""
        advantages = self.group_advantages(
            rewards, samples_per_prompt=samples_per_prompt, group_boundaries=group_boundaries, eps=eps
        )
        return self.apply(
            policy_logits,
            ref_logits,
            action_ids,
            old_logps,
            advantages,
            completion_mask,
            clip_eps=clip_eps,
            beta=beta,
        )

    forward = __call__

    def apply(
        self,
        policy_logits: Tensor,
        ref_logits: Tensor,
        action_ids: Tensor,
        old_logps: Tensor,
        sample_advantages: Tensor,
        completion_mask: Tensor,
        *,
        clip_eps: float = 0.2,
        beta: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same from advantages per sequence."""
        is_active = completion_mask.to(torch.bool)
        ratio, kl = self._ratio_kl(policy_logits, ref_logits, action_ids, is_active, old_logps)
        advantages = self.expand_advantages(sample_advantages.float(), is_active)
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_eps, 1.0 + clip_eps) * advantages)
        policy_loss, mean_kl = _masked_mean(-surrogate, is_active), _masked_mean(kl, is_active)
        return policy_loss + beta * mean_kl, policy_loss, mean_kl

    def group_advantages(
        self,
        rewards: Tensor,
        *,
        samples_per_prompt: int | None = None,
        group_boundaries: Sequence[int] | Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """``(r - mean) / max(population std, eps)`` within each group.

        The variance is E[x²] − E[x]² in fp32, as in RL-Kernel: large rewards close together lose their digits.
        """
        flat = rewards.reshape(-1).float()
        sizes = _group_sizes(flat.numel(), samples_per_prompt, group_boundaries)
        parts = []
        for group in torch.split(flat, sizes):
            mean = group.mean()
            variance = (group * group).mean() - mean * mean
            parts.append((group - mean) / variance.clamp_min(eps**2).sqrt())
        return torch.cat(parts)

    @staticmethod
    def expand_advantages(sample_advantages: Tensor, completion_mask: Tensor) -> Tensor:
        """Per sequence to per token, 0 where masked."""
        is_active = completion_mask.to(torch.bool)
        return sample_advantages.reshape(-1, 1).expand_as(is_active).masked_fill(~is_active, 0.0)


def _masked_mean(values: Tensor, is_active: Tensor) -> Tensor:
    return values.masked_fill(~is_active, 0.0).sum() / is_active.sum().clamp_min(1)


def _group_sizes(
    num_sequences: int, samples_per_prompt: int | None, group_boundaries: Sequence[int] | Tensor | None
) -> list[int]:
    if (samples_per_prompt is None) == (group_boundaries is None):
        raise ValueError("Provide exactly one of samples_per_prompt or group_boundaries.")
    if samples_per_prompt is not None:
        if samples_per_prompt < 2 or num_sequences % samples_per_prompt:
            raise ValueError(f"num_sequences ({num_sequences}) does not split by {samples_per_prompt}")
        return [samples_per_prompt] * (num_sequences // samples_per_prompt)
    bounds = [int(bound) for bound in group_boundaries] if group_boundaries is not None else []
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    if sum(sizes) != num_sequences or min(sizes, default=0) < 1:
        raise ValueError(f"group_boundaries {bounds} do not split {num_sequences} sequences")
    return sizes
