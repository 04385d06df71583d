"""Stored rollouts as vime writes them."""

from __future__ import annotations

import io
from functools import cache

import torch


@cache
def make_rollout(number: int) -> bytes:
    """The bytes of a file of ``--save-debug-rollout-data``."""
    sample = {"tokens": [number, 1, 2], "reward": 0.5, "rollout_log_probs": torch.zeros(3)}
    stream = io.BytesIO()
    torch.save({"rollout_id": number, "samples": [sample]}, stream)
    return stream.getvalue()
