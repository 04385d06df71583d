"""Ratio of policy to old policy and the k3 estimate of the KL to a reference, per token."""

from __future__ import annotations

import torch
from rl_engine.kernels.ops.pytorch.loss.logp import NativeLogpOp
from torch import Tensor


class NativeRatioKLOp:
    """Masked positions give ratio 1 and KL 0 and may hold any id.  The gradient goes to the policy's logits alone."""

    def __init__(self) -> None:
        self._logp = NativeLogpOp()

    def __call__(
        self, policy_logits: Tensor, ref_logits: Tensor, action_ids: Tensor, attention_mask: Tensor, old_logps: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``logits [*, V]``, the rest ``[*]``; ratio and KL are fp32 ``[*]``."""
        is_masked = ~attention_mask.to(torch.bool)
        vocab_size = policy_logits.shape[-1]
        if (~is_masked & ((action_ids < 0) | (action_ids >= vocab_size))).any():
            raise ValueError(f"action_ids at active positions must be in [0, {vocab_size})")
        tokens = action_ids.masked_fill(is_masked, 0)
        policy = self._logp.apply_fp32(policy_logits, tokens)
        reference = self._logp.apply_fp32(ref_logits.detach(), tokens)
        log_ratio = (policy - old_logps.float()).masked_fill(is_masked, 0.0)
        log_quotient = (reference - policy).masked_fill(is_masked, 0.0)
        return log_ratio.exp(), log_quotient.exp() - log_quotient - 1.0
