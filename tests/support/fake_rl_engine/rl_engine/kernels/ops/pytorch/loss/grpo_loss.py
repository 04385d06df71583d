"""The GRPO loss from logits and advantages: clipped surrogate, k3 KL, mean over active tokens."""

from __future__ import annotations

import torch
from rl_engine.kernels.ops.pytorch.loss.ratio_kl import NativeRatioKLOp
from torch import Tensor


class NativeGRPOLossOp:
    """``logits [B, T, V]``, ids and mask ``[B, T]``, advantages ``[B]``; returns three scalars."""

    def __init__(self) -> None:
        self._ratio_kl = NativeRatioKLOp()

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
        """``(loss, policy_loss, kl)``, each with a gradient."""
        is_active = completion_mask.to(torch.bool)
        ratio, kl = self._ratio_kl(policy_logits, ref_logits, action_ids, is_active, old_logps)
        advantages = sample_advantages.float().reshape(-1, 1) * is_active
        clipped = ratio.clamp(1.0 - clip_eps, 1.0 + clip_eps)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        policy_loss, mean_kl = _masked_mean(-surrogate, is_active), _masked_mean(kl, is_active)
        return policy_loss + beta * mean_kl, policy_loss, mean_kl


def _masked_mean(values: Tensor, is_active: Tensor) -> Tensor:
    return values.masked_fill(~is_active, 0.0).sum() / is_active.sum().clamp_min(1)
