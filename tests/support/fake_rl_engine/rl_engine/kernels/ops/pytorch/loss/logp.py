"""Log-prob of one selected token per row: ``log_softmax(logits)[token]``, computed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


class NativeLogpOp:
    """``logits [*, V]`` of any float type and ``token_ids [*]`` give ``[*]``; every method is differentiable."""

    def __call__(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        return self.apply(logits, token_ids)

    def apply(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """In the type of the logits, so bf16 logits round the log-prob."""
        return self.apply_fp32(logits, token_ids).to(logits.dtype)

    def apply_fp32(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        if logits.shape[:-1] != token_ids.shape:
            raise ValueError(
                f"logits leading shape {tuple(logits.shape[:-1])} must match token_ids shape {tuple(token_ids.shape)}"
            )
        chosen = token_ids.to(device=logits.device, dtype=torch.long).unsqueeze(-1)
        return torch.log_softmax(logits.float(), dim=-1).gather(-1, chosen).squeeze(-1)

    def indexed_fp32(self, logits: Tensor, token_ids: Tensor, row_indices: Tensor) -> Tensor:
        """Rows that are not named hold 0."""
        output = torch.zeros(logits.shape[:-1], device=logits.device)
        output[row_indices] = self.apply_fp32(logits, token_ids)[row_indices]
        return output

    # In RL-Kernel's compiled operator the online methods run another kernel; here they are the same.
    online_fp32 = apply_fp32
    online_indexed_fp32 = indexed_fp32
