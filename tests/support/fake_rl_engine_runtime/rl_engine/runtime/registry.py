"""Operators by name, as ever, and log-probs by contract: the first backend that serves it, or an error saying why none.

Part of the double of tests/support/fake_rl_engine_runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_engine.contracts.operators.logprob import (
    LogprobBackendCapability,
    LogprobContract,
    LogprobDispatchResult,
    LogprobDType,
)
from rl_engine.reference.logprob.vocab_parallel_logp import TritonVocabParallelLogprobOp, VocabParallelLogprobOp

_ALL = frozenset(LogprobDType)


@dataclass(frozen=True)
class Backend:
    name: str
    op: Any
    capability: LogprobBackendCapability


REFERENCE = Backend(
    "PYTORCH_VOCAB_PARALLEL_LOGP",
    VocabParallelLogprobOp(),
    LogprobBackendCapability("pytorch-vocab-parallel-logp-ws2", _ALL, implementation_kind="reference"),
)
TRITON = Backend(
    "TRITON_VOCAB_PARALLEL_LOGP",
    TritonVocabParallelLogprobOp(),
    LogprobBackendCapability("triton-vocab-parallel-logp-ws2", _ALL),
)
ONE_RANK_ONLY = Backend(
    "PYTORCH_BATCH_INVARIANT_LOGP",
    None,
    LogprobBackendCapability(
        "pytorch-batch-invariant-logp-ws1", _ALL, (1,), exports_vocab_lse=False, implementation_kind="reference"
    ),
)


class KernelRegistry:
    """``platform`` and ``backends`` are a test's to change; RL-Kernel finds out by itself."""

    def __init__(self) -> None:
        self.platform = "cpu"
        self.backends = {"cpu": [REFERENCE, ONE_RANK_ONLY], "cuda": [TRITON, REFERENCE, ONE_RANK_ONLY]}

    def get_op(self, op_type: str, device: Any = None) -> Any:  # noqa: ARG002 as RL-Kernel has it
        """The operators that the earlier generation has, under the names that they have there."""
        from rl_engine.kernels.registry import kernel_registry as earlier

        return earlier.get_op(op_type)

    def get_logprob_op(self, contract: LogprobContract, *, requested_backend: str = "auto") -> LogprobDispatchResult:
        rejected, num_incapable = [], 0
        for backend in self.backends[self.platform]:
            capability = backend.capability
            if requested_backend not in {"auto", capability.implementation_kind, capability.backend_id}:
                rejected.append(f"{backend.name}: is not {requested_backend}")
                continue
            reasons = capability.incompatibilities(contract)
            if reasons:
                rejected.append(f"{backend.name}: {'; '.join(reasons)}")
                num_incapable += 1
                continue
            provenance = {
                "requested_backend": requested_backend,
                "actual_backend": capability.backend_id,
                "backend_enum": backend.name,
                "platform": self.platform,
                "fallback": num_incapable > 0,
                "prior_rejections": rejected,
                "contract": {"dtype": contract.dtype.value},
                "capability": {"backend_id": capability.backend_id},
            }
            return LogprobDispatchResult(backend.op, capability, provenance)
        why = " | ".join(rejected) or "nothing registered"
        raise RuntimeError(f"nothing on {self.platform} serves this contract. Rejections: {why}")


kernel_registry = KernelRegistry()
