"""Compute log-probs with operators of RL-Kernel's newer registry, which handle ranks and gradients themselves.

The trainer's loss includes the vocabulary's padded columns, so each contract counts them as real columns.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Final, NamedTuple, Self

import torch
import torch.distributed as dist

from rlk_repro.integration.route.api import Call
from rlk_repro.integration.route.log_probs import (
    FirstCallCheck,
    Selected,
    Shard,
    check_result,
    find_foreign_id,
    join_entropies,
)
from rlk_repro.integration.route.moments import find_moments
from rlk_repro.integration.route.rl_kernel import (
    Contracts,
    LoadedOperator,
    cut,
    find_class_refusal,
    load_contracts,
    read_provenance,
)
from rlk_repro.operators import OPERATORS, Case, Platform, Reason, Refusal

NAME: Final = "vocab_parallel_logp"
NUM_TILES: Final = 64
"""RL-Kernel's default number of vocabulary tiles; a fixed number gives bitwise equal results on any number of ranks."""
NUM_KEPT: Final = 64
"""Number of contracts to keep: a contract lists every row of a call, and each microbatch has its own number of rows."""
DTYPES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Shape(NamedTuple):
    num_rows: int
    num_columns: int
    dtype: torch.dtype
    rank: int
    size: int

    @classmethod
    def of(cls, logits: torch.Tensor, shard: Shard) -> Self:
        num_rows, num_columns = logits.shape
        return cls(num_rows, num_columns, logits.dtype, shard.rank, shard.size)

    @property
    def num_tiles(self) -> int:
        """Number of equal tiles of the vocabulary, such that no tile lies on two ranks; ``NUM_TILES`` if possible."""
        return self.size * math.gcd(self.num_columns, max(NUM_TILES // self.size, 1))


def dispatch(contracts: Contracts, case: Case, shape: Shape, backend: str) -> LoadedOperator | Refusal:
    """Let RL-Kernel dispatch to ``backend`` (a tier or an implementation); refuse a class outside ``OPERATORS``."""
    contract = make_contract(contracts.types, shape, case.context_parallel)
    try:
        result = contracts.registry.get_logprob_op(contract, requested_backend=backend)
    except RuntimeError as error:
        head, _, rejections = str(error).rpartition("Rejections: ")
        return Refusal(Reason.NOT_DISPATCHED, cut(rejections or head))
    name, provenance = type(result.op).__name__, read_provenance(result.provenance)
    refusal = find_class_refusal(NAME, case.platform, name)
    if refusal is not None:
        return refusal
    implementation = OPERATORS[NAME].find_implementation(case.platform, provenance["actual_backend"])
    if implementation is None or implementation.class_name != name:
        return Refusal(Reason.NOT_ACCEPTED, f"{name}, which calls itself {provenance['actual_backend']}")
    return LoadedOperator(op=result.op, implementation=name, version=contracts.version, provenance=provenance,
                          contract=contract)  # fmt: skip


def make_contract(types: Any, shape: Shape, context_parallel: int) -> Any:
    """Make a contract in which every row is active and no column is padding; ``cp_rank`` is 0, as rows are local."""
    edges = [rank * shape.num_columns for rank in range(shape.size + 1)]
    return types.LogprobContract(
        role=types.LogprobRole("train"),
        dtype=types.LogprobDType(DTYPES[shape.dtype]),
        mask=types.MaskSpec(num_tokens=shape.num_rows, active_mask=(True,) * shape.num_rows),
        sharding=types.ShardingSpec(
            tp_rank=shape.rank,
            tp_world_size=shape.size,
            vocab_shard_bounds=tuple(itertools.pairwise(edges)),
            real_vocab_size=edges[-1],
            padded_vocab_size=edges[-1],
            cp_rank=0,
            cp_world_size=context_parallel,
        ),
        reduction=types.ReductionSpec(),
    )


class VocabParallelLogp:
    """Serves the calls of one run; RL-Kernel must choose the same implementation for all shapes."""

    def __init__(self, contracts: Contracts, case: Case, first: LoadedOperator) -> None:
        self.loaded = first
        ask = functools.partial(dispatch, contracts, case, backend=first.backend)
        self._dispatch = functools.lru_cache(NUM_KEPT)(ask)
        self._values = FirstCallCheck(find_foreign_id)
        self._is_validated = False

    @classmethod
    def find(cls, case: Case) -> Self | Refusal:
        """Let RL-Kernel choose an implementation: a production kernel on a GPU, its own reference on a CPU."""
        contracts = load_contracts()
        if isinstance(contracts, Refusal):
            return contracts
        smallest = Shape(1, 1, torch.float32, 0, case.tensor_parallel)
        tier = "reference" if case.platform == Platform.CPU else "production"
        first = dispatch(contracts, case, smallest, tier)
        return first if isinstance(first, Refusal) else cls(contracts, case, first)

    def check(self, logits: torch.Tensor, tokens: torch.Tensor, shard: Shard) -> Refusal | None:
        """Refuse a shape for which RL-Kernel chooses another implementation than it chose at the start."""
        found = self._dispatch(Shape.of(logits, shard))
        if isinstance(found, Refusal):
            return found
        if (found.implementation, found.backend) != (self.loaded.implementation, self.loaded.backend):
            was = f"{self.loaded.implementation} ({self.loaded.backend}) was chosen at the start"
            return Refusal(Reason.NOT_DISPATCHED, f"{found.implementation} ({found.backend}) is chosen now, but {was}")
        return self._values.find_refusal(logits, tokens, shard)

    def run(self, call: Call, logits: torch.Tensor, shard: Shard) -> Selected:
        """Let RL-Kernel validate the first call only: this waits for the device and compares the ranks."""
        shape, tokens = Shape.of(logits, shard), call["tokens"]
        found = self._dispatch(shape)
        assert isinstance(found, LoadedOperator)
        ask = functools.partial(
            found.op,
            logits,
            tokens,
            contract=found.contract,
            tp_group=shard.group,
            num_vocab_tiles=shape.num_tiles,
        )
        if not self._is_validated:
            with torch.no_grad():  # save no tensors: recomputing the loss skips this call, and torch would miss them
                ask(validate=True)
            self._is_validated = True
        log_probs, _ = ask(validate=False)
        check_result(NAME, log_probs, tokens, needs_grad=logits.requires_grad and torch.is_grad_enabled())
        return log_probs, find_entropy(logits.detach(), shard) if call["with_entropy"] else None


def find_entropy(logits: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return the entropy [T] over all shards, without gradient; RL-Kernel's own function needs more memory."""
    largest, log_sum, entropy = find_moments(logits)
    if shard.size == 1:
        return entropy
    mine = torch.stack((largest, log_sum, entropy))
    gathered = [torch.empty_like(mine) for _ in range(shard.size)]
    dist.all_gather(gathered, mine, group=shard.group)
    largest, log_sum, entropies = torch.stack(gathered, dim=1)
    normalisers = (largest - largest.amax(dim=0)) + log_sum
    return join_entropies(normalisers - normalisers.logsumexp(dim=0), entropies)
