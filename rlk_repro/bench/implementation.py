"""Define an implementation: what makes a call bound to a case's tensors, or says why it cannot."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeAlias

import torch

from rlk_repro.bench.cases import CLIP, FORWARD_BACKWARD, CaseTensors, clip_high, needs_grad
from rlk_repro.rundir.operator_results import OperatorKind, OperatorStatus

MAX_REASON: Final = 300
IMPORT_ERRORS: Final = (ImportError, AttributeError, OSError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A call that is ready for timing: ``forward`` returns one value per row [N], or a weighted sum (``grpo_loss``)."""

    forward: Callable[[], torch.Tensor]
    kind: OperatorKind
    class_name: str
    version: str = ""


class NotMeasuredError(Exception):
    """An implementation has no numbers for a case; its record gives this error's text."""

    def __init__(self, status: OperatorStatus, reason: str) -> None:
        super().__init__(shorten_line(reason))
        self.status = status


def block(reason: str) -> NotMeasuredError:
    """Say why an implementation cannot be called on this machine or for this case."""
    return NotMeasuredError(OperatorStatus.BLOCKED, reason)


def shorten_line(text: str) -> str:
    return " ".join(text.split())[:MAX_REASON]


Builder: TypeAlias = Callable[[CaseTensors], Ready]
"""Raises NotMeasuredError if the implementation cannot be called."""


@dataclass(frozen=True, kw_only=True)
class BenchedImplementation:
    """An implementation, shown as one row in a report's tables; ``kind`` is shown if ``build`` returns no ``Ready``."""

    name: str
    operator: str
    kind: OperatorKind = OperatorKind.UNRESOLVED
    build: Builder
    is_sparse: bool = False
    """Whether the implementation skips rows outside the mask; if so, it is measured only in cases with such rows."""


Call: TypeAlias = Callable[[], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]


def make_call(inputs: CaseTensors, ready: Ready) -> Call:
    """Return the call that is timed and checked: it computes values, and gradients if the case has a backward pass."""

    def forward() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        with torch.set_grad_enabled(needs_grad(inputs.case)):
            return ready.forward(), ()

    def forward_backward() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        values = ready.forward()
        loss = values if values.ndim == 0 else (values * inputs.weights).sum()
        return values, torch.autograd.grad(loss, inputs.leaves)

    return forward_backward if inputs.case.work == FORWARD_BACKWARD else forward


def as_tensor(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def find_attribute(path: str) -> Any:
    """Import ``module.name``; raise NotMeasuredError if that is impossible."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        reason = f"{module} needs the module {error.name}, which is not installed"
        raise block(reason) from None
    except IMPORT_ERRORS as error:
        reason = f"{path} cannot be imported ({type(error).__name__}: {error})"
        raise block(reason) from None


def find_version(distribution: str) -> str:
    """Return a distribution's installed version; ``unversioned`` for a source tree on the path."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unversioned"


def clip_losses(ratio: torch.Tensor, inputs: CaseTensors) -> torch.Tensor:
    """Return the clipped surrogate per row, as vime's ``compute_policy_loss`` computes it."""
    advantages = inputs.advantages
    clipped = ratio.clamp(1 - CLIP, 1 + clip_high(inputs.case))
    return torch.maximum(-ratio * advantages, -clipped * advantages)


def reduce_losses(losses: torch.Tensor, inputs: CaseTensors) -> torch.Tensor:
    """Return the loss of each row; for ``grpo_loss`` the mean, because RL-Kernel's function returns only the mean."""
    return (losses * inputs.weights).sum() if inputs.case.operator == "grpo_loss" else losses
