"""Run AdamW with gradient clipping, in the order in which Megatron-LM applies them.

torch's own class is not used: its constructor imports torch's compiler, which takes longer than a smoke run.
"""

from __future__ import annotations

from typing import Final

import torch

EPSILON: Final = 1e-8
NUM_GROUPS: Final = 2
"""Number of parameter groups whose learning rates Megatron-LM logs: matrices (with decay), norm weights (without)."""


class AdamW:
    """Update parameters by AdamW with decoupled weight decay (arxiv.org/abs/1711.05101); only matrices decay."""

    def __init__(
        self, model: torch.nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, clip_grad: float
    ) -> None:
        self.lr, self.betas, self.weight_decay, self.clip_grad = lr, betas, weight_decay, clip_grad
        self.num_steps = 0
        self._moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}

    @torch.no_grad()
    def step(self) -> float:
        """Clip the gradients, update the parameters, delete the gradients; return the gradient norm before clipping."""
        grads = [p.grad for p in self._moments if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        scale = (self.clip_grad / (norm + 1e-6)).clamp(max=1.0) if self.clip_grad > 0 else 1.0
        self.num_steps += 1
        for parameter in self._moments:
            self._update(parameter, scale)
        return float(norm)

    def _update(self, parameter: torch.nn.Parameter, scale: torch.Tensor | float) -> None:
        if parameter.grad is None:
            return
        grad = parameter.grad.mul_(scale)
        first, second = self._moments[parameter]
        beta1, beta2 = self.betas
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (second / (1 - beta2**self.num_steps)).sqrt_().add_(EPSILON)
        if parameter.dim() > 1:
            parameter.mul_(1 - self.lr * self.weight_decay)
        parameter.addcdiv_(first, denominator, value=-self.lr / (1 - beta1**self.num_steps))
        parameter.grad = None
