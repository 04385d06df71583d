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

    def out(self, logits: Tensor, token_ids: Tensor, output: Tensor) -> Tensor:
        _check_output(output, logits)
        return output.copy_(self.apply_fp32(logits, token_ids))

    def indexed_out(self, logits: Tensor, token_ids: Tensor, row_indices: Tensor, output: Tensor) -> Tensor:
        """Only the named rows of ``output`` are written; ``row_indices`` count the flattened rows."""
        _check_output(output, logits)
        rows = row_indices.to(device=logits.device, dtype=torch.long).reshape(-1)
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < token_ids.numel():
            raise ValueError("row_indices contains an out-of-range row")
        values = self.apply_fp32(logits, token_ids).to(output.dtype)
        output.view(-1)[rows] = values.reshape(-1)[rows]
        return output

    def indexed_fp32(self, logits: Tensor, token_ids: Tensor, row_indices: Tensor) -> Tensor:
        """Rows that are not named hold 0."""
        output = torch.zeros(logits.shape[:-1], device=logits.device)
        return self.indexed_out(logits, token_ids, row_indices, output)

    # In RL-Kernel's compiled operator the online methods run another kernel; here they are the same.
    online_fp32 = apply_fp32
    online_out = out
    online_indexed_fp32 = indexed_fp32
    online_indexed_out = indexed_out


def _check_output(output: Tensor, logits: Tensor) -> None:
    if output.shape != logits.shape[:-1]:
        raise ValueError(
            f"output shape {tuple(output.shape)} must match logits leading shape {tuple(logits.shape[:-1])}"
        )
