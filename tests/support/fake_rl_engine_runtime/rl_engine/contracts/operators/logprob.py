"""What a caller states of its logits before anything is chosen to work on them.

The double of tests/support/fake_rl_engine_runtime: written from what RL-Kernel documents of its later generation, with
none of its source.  Where ``RLK_LATER_SRC`` names the real one, tests/integration/test_vocab_parallel.py runs against
both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class LogprobContractError(ValueError):
    """A contract that describes nothing possible, or a call that is not what its contract says."""


class LogprobRole(Enum):
    TRAIN = "train"
    INFER = "infer"


class LogprobDType(Enum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@dataclass(frozen=True)
class MaskSpec:
    num_tokens: int
    active_mask: tuple[bool, ...]
    ignore_index: int = -100

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or len(self.active_mask) != self.num_tokens:
            raise LogprobContractError(f"{len(self.active_mask)} entries for num_tokens={self.num_tokens}")


@dataclass(frozen=True)
class ShardingSpec:
    """``vocab_shard_bounds`` has every rank's half-open range of columns; padding begins at ``real_vocab_size``."""

    tp_rank: int
    tp_world_size: int
    vocab_shard_bounds: tuple[tuple[int, int], ...]
    real_vocab_size: int
    padded_vocab_size: int
    cp_rank: int = 0
    cp_world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_world_size or not 0 <= self.cp_rank < self.cp_world_size:
            raise LogprobContractError("a rank lies outside its world")
        edges = [0, *(end for _, end in self.vocab_shard_bounds)]
        if [start for start, _ in self.vocab_shard_bounds] != edges[:-1] or sorted(set(edges)) != edges:
            raise LogprobContractError(f"vocab_shard_bounds {self.vocab_shard_bounds} are no partition")
        if len(self.vocab_shard_bounds) != self.tp_world_size or edges[-1] != self.padded_vocab_size:
            raise LogprobContractError("the ranges are not one a rank, or end before the padded vocabulary does")
        if not 0 < self.real_vocab_size <= self.padded_vocab_size:
            raise LogprobContractError(f"real_vocab_size={self.real_vocab_size} is none")

    @property
    def local_bounds(self) -> tuple[int, int]:
        return self.vocab_shard_bounds[self.tp_rank]


@dataclass(frozen=True)
class ReductionSpec:
    determinism_scope: str = "cross_tp_bitwise"


@dataclass(frozen=True)
class LogprobContract:
    role: LogprobRole
    dtype: LogprobDType
    mask: MaskSpec
    sharding: ShardingSpec
    reduction: ReductionSpec
    export_lse: bool = True


@dataclass(frozen=True)
class LogprobBackendCapability:
    backend_id: str
    dtypes: frozenset[LogprobDType]
    tp_world_sizes: tuple[int, ...] | None = None
    exports_vocab_lse: bool = True
    implementation_kind: str = "production"

    def incompatibilities(self, contract: LogprobContract) -> tuple[str, ...]:
        """Every reason why this backend cannot serve the contract."""
        size = contract.sharding.tp_world_size
        reasons = {
            f"serves no {contract.dtype.value} logits": contract.dtype not in self.dtypes,
            f"serves no group of {size}": self.tp_world_sizes is not None and size not in self.tp_world_sizes,
            "exports no log-sum-exp": contract.export_lse and not self.exports_vocab_lse,
        }
        return tuple(reason for reason, is_so in reasons.items() if is_so)


@dataclass(frozen=True)
class LogprobDispatchResult:
    op: Any
    capability: LogprobBackendCapability
    provenance: dict[str, Any] = field(default_factory=dict)
