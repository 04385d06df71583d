"""Operators by name.  As in RL-Kernel an unknown name is answered with the native log-prob operator."""

from __future__ import annotations

import importlib
from enum import Enum
from typing import Any


class OpBackend(Enum):
    PYTORCH_NATIVE = "rl_engine.kernels.ops.pytorch.loss.logp.NativeLogpOp"
    PYTORCH_RATIO_KL = "rl_engine.kernels.ops.pytorch.loss.ratio_kl.NativeRatioKLOp"
    PYTORCH_GRPO_LOSS = "rl_engine.kernels.ops.pytorch.loss.grpo_loss.NativeGRPOLossOp"
    PYTORCH_LINEAR_LOGP = "rl_engine.kernels.ops.pytorch.loss.linear_logp.NativeLinearLogpOp"


class KernelRegistry:
    """One instance of each operator per process, made at its first use."""

    def __init__(self) -> None:
        self._instances: dict[OpBackend, Any] = {}
        self._backends = {
            "logp": OpBackend.PYTORCH_NATIVE,
            "ratio_kl": OpBackend.PYTORCH_RATIO_KL,
            "grpo_loss": OpBackend.PYTORCH_GRPO_LOSS,
            "linear_logp": OpBackend.PYTORCH_LINEAR_LOGP,
        }

    def get_op(self, op_type: str) -> Any:
        backend = self._backends.get(op_type, OpBackend.PYTORCH_NATIVE)
        if backend not in self._instances:
            module, _, name = backend.value.rpartition(".")
            self._instances[backend] = getattr(importlib.import_module(module), name)()
        return self._instances[backend]


kernel_registry = KernelRegistry()
