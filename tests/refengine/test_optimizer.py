"""AdamW and clipping against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch

from rlk_repro.refengine.optimizer import EPSILON, AdamW


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 1e6])
def test_steps_are_those_of_torch(clip_grad: float) -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)).double()
    theirs = copy.deepcopy(ours)
    optimizer = AdamW(ours, lr=0.03, betas=(0.8, 0.95), weight_decay=0.2, clip_grad=clip_grad)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in theirs.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.95), eps=EPSILON)
    for _ in range(5):
        inputs = torch.randn(4, 5, dtype=torch.float64)
        for model in (ours, theirs):
            model(inputs).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_grad or float("inf"))
        reference.step()
        reference.zero_grad()
        assert optimizer.step() == pytest.approx(norm.item(), rel=1e-12)
        assert all(parameter.grad is None for parameter in ours.parameters())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
