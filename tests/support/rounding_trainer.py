"""The reference trainer, whose generation lowers the log-prob of every even token by 2e-6.

On some CPUs generation and training round alike, and then no token differs by itself.
"""

from __future__ import annotations

import sys

import torch

from rlk_repro.refengine import rollout
from rlk_repro.refengine.__main__ import main

draw = rollout._draw


def draw_lowered(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, log_probs = draw(logits, temperature, generator)
    return tokens, log_probs - 2e-6 * (tokens % 2 == 0)


if __name__ == "__main__":
    rollout._draw = draw_lowered
    sys.exit(main())
