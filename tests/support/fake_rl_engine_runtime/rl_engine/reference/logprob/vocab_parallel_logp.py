"""Selected log-probs and log-sum-exps over a vocabulary that ranks share; one arithmetic for all backends.

Part of the double of tests/support/fake_rl_engine_runtime.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rl_engine.contracts.operators.logprob import LogprobContractError

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, is_active: torch.Tensor, sharding: Any, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = sharding.local_bounds
        columns = torch.arange(start, end, device=logits.device)
        masked = logits.float().masked_fill(columns >= sharding.real_vocab_size, -torch.inf)
        hit = columns == torch.where(is_active, targets, 0).unsqueeze(1)
        target, lse = masked.masked_fill(~hit, -torch.inf).amax(dim=1), masked.logsumexp(dim=1)
        if sharding.tp_world_size > 1:
            parts = [torch.empty(2, len(logits)) for _ in range(sharding.tp_world_size)]
            dist.all_gather(parts, torch.stack((target, lse)), group=group)
            stacked = torch.stack(parts, dim=1)
            target, lse = stacked[0].amax(dim=0), stacked[1].logsumexp(dim=0)
        ctx.save_for_backward(masked, lse, hit, is_active)
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return torch.where(is_active, target - lse, 0.0), lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        masked, lse, hit, is_active = ctx.saved_tensors
        shares = (masked - lse.unsqueeze(1)).exp()
        result = torch.zeros_like(masked)
        if grad is not None:
            result += torch.where(is_active, grad, 0.0).unsqueeze(1) * (hit.float() - shares)
        if grad_lse is not None:
            result += grad_lse.unsqueeze(1) * shares
        return result.to(ctx.dtype), None, None, None, None


class VocabParallelLogprobOp:
    """``logits [T, V / TP]`` and ids ``[T]`` of the whole vocabulary give two fp32 ``[T]``, both with gradient."""

    def __call__(
        self,
        local_logits: torch.Tensor,
        target_ids: torch.Tensor,
        *,
        contract: Any,
        tp_group: Any = None,
        num_vocab_tiles: int = 64,
        validate: bool = True,
        deterministic: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sharding, mask = contract.sharding, contract.mask
        start, end = sharding.local_bounds
        if local_logits.shape != (mask.num_tokens, end - start) or target_ids.shape != (mask.num_tokens,):
            raise LogprobContractError(f"logits {tuple(local_logits.shape)} are not the contract's")
        if _DTYPES.get(local_logits.dtype) != contract.dtype.value:
            raise LogprobContractError(f"{local_logits.dtype} is not the contract's {contract.dtype.value}")
        if sharding.tp_world_size > 1 and sharding.tp_rank != dist.get_rank(tp_group):
            raise LogprobContractError("the group's rank is not the contract's")
        if deterministic:
            tile, rest = divmod(sharding.padded_vocab_size, num_vocab_tiles)
            if rest or any(edge % tile for bounds in sharding.vocab_shard_bounds for edge in bounds):
                raise LogprobContractError(f"num_vocab_tiles={num_vocab_tiles} do not fit the shards")
        is_active = torch.tensor(mask.active_mask, device=local_logits.device)
        is_foreign = is_active & ((target_ids < 0) | (target_ids >= sharding.real_vocab_size))
        if validate and is_foreign.any():
            raise LogprobContractError("a target is no token of the real vocabulary")
        values: tuple[torch.Tensor, torch.Tensor] = _Function.apply(  # type: ignore[no-untyped-call]
            local_logits, target_ids, is_active, sharding, tp_group
        )
        if validate and (is_active & ~values[1].isfinite()).any():
            raise LogprobContractError("a row that counts has no finite log-sum-exp")
        return values


class TritonVocabParallelLogprobOp(VocabParallelLogprobOp):
    """In RL-Kernel these are kernels."""
