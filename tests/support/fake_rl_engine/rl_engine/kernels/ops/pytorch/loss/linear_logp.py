"""Log-prob of selected tokens straight from hidden states and the weight of the output layer."""

from __future__ import annotations

from typing import Any

import torch
from rl_engine.kernels.ops.pytorch.loss.logp import NativeLogpOp
from torch import Tensor


class NativeLinearLogpOp:
    """``hidden [*, D]``, weight ``[V, D]`` and target ids ``[*]`` give fp32 ``[*]``; differentiable in all but the ids.

    The matrix product is in the type of its inputs.  The double knows one rank only.
    """

    def __init__(self) -> None:
        self._logp = NativeLogpOp()

    def __call__(
        self,
        hidden: Tensor,
        lm_head_weight: Tensor,
        target_ids: Tensor,
        bias: Tensor | None = None,
        *,
        tp_group: Any = None,
        vocab_start_index: int = 0,
        global_vocab_size: int | None = None,
    ) -> Tensor:
        if hidden.shape[:-1] != target_ids.shape or lm_head_weight.shape[-1] != hidden.shape[-1]:
            raise ValueError(
                f"hidden {tuple(hidden.shape)}, lm_head_weight {tuple(lm_head_weight.shape)} and "
                f"target_ids {tuple(target_ids.shape)} do not fit"
            )
        if tp_group is not None and torch.distributed.get_world_size(tp_group) > 1:
            raise RuntimeError("the double has no tensor-parallel linear_logp")
        if vocab_start_index or global_vocab_size not in {None, lm_head_weight.shape[0]}:
            raise ValueError("a shard of the vocabulary needs a tensor-parallel group")
        logits = torch.nn.functional.linear(hidden, lm_head_weight, bias)
        logps: Tensor = self._logp.apply_fp32(logits, target_ids)
        return logps

    apply = __call__
