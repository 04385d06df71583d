"""Run AdamW with gradient clipping, in the order in which Megatron-LM applies them.

torch's own class is not used: its constructor imports torch's compiler, which takes longer than a smoke run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that share a weight decay."""

    parameters: list[torch.nn.Parameter]
    weight_decay: float


class AdamW:
    """Update parameters by AdamW with decoupled weight decay (arxiv.org/abs/1711.05101); only matrices decay."""

    def __init__(
        self, model: torch.nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float, clip_grad: float
    ) -> None:
        parameters = list(model.parameters())
        self.groups = (
            ParameterGroup(parameters=[p for p in parameters if p.dim() > 1], weight_decay=weight_decay),
            ParameterGroup(parameters=[p for p in parameters if p.dim() <= 1], weight_decay=0.0),
        )
        self.lr, self.betas, self.clip_grad = lr, betas, clip_grad
        self.num_steps = 0
        self._moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in parameters}

    @torch.no_grad()
    def step(self) -> float:
        """Clip, update, delete the gradients; return the gradient norm before clipping."""
        grads = [p.grad for p in self._moments if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        scale = (self.clip_grad / (norm + 1e-6)).clamp(max=1.0) if self.clip_grad > 0 else 1.0
        self.num_steps += 1
        for group in self.groups:
            for parameter in group.parameters:
                self._update(parameter, scale, group.weight_decay)
        return float(norm)

    def _update(self, parameter: torch.nn.Parameter, scale: torch.Tensor | float, weight_decay: float) -> None:
        if parameter.grad is None:
            return
        grad = parameter.grad.mul_(scale)
        first, second = self._moments[parameter]
        beta1, beta2 = self.betas
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (second / (1 - beta2**self.num_steps)).sqrt_().add_(EPSILON)
        parameter.mul_(1 - self.lr * weight_decay)
        parameter.addcdiv_(first, denominator, value=-self.lr / (1 - beta1**self.num_steps))
        parameter.grad = None
