"""Run by test_torch_compile with vime and Megatron-LM on the path: vime's own log-prob function against the route.

Its argument is a folder of its own.  Prints one JSON object: the largest differences over random cases.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from tests.support.vime_seam import OPTIONS

NUM_CASES = 100


def make_case(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(length) for length in torch.randint(3, 40, (1 + seed % 4,), generator=generator)]
    responses = [max(1, length // 2) for length in lengths]
    tokens = [torch.randint(512, (length,), generator=generator) for length in lengths]
    logits = torch.randn(1, sum(lengths), 512, generator=generator) * (0.5 + seed % 9)
    return {"unconcat_tokens": tokens, "total_lengths": lengths, "response_lengths": responses}, logits


def compute(loss_module: Any, args: Namespace, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes, logits = make_case(seed)
    with torch.no_grad():
        _, passed = loss_module.get_log_probs_and_entropy(logits, args=args, **shapes)
    leaf = logits.requires_grad_()
    with_entropy = bool(seed % 2)
    _, found = loss_module.get_log_probs_and_entropy(leaf * 1.5, args=args, with_entropy=with_entropy, **shapes)
    log_probs = torch.cat(found["log_probs"])
    weights = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(seed))
    (gradient,) = torch.autograd.grad((log_probs * weights).sum(), leaf)
    return torch.cat(passed["log_probs"]), log_probs.detach(), gradient


def main() -> None:
    from megatron.core import mpu
    from vime.backends.megatron_utils import loss as loss_module

    from rlk_repro.integration.switch import Mode, Settings, install_into
    from rlk_repro.operators import COMPILED_LOGP, Case

    torch.distributed.init_process_group("gloo", init_method=f"file://{Path(sys.argv[1])}/group", rank=0, world_size=1)
    mpu.initialize_model_parallel(1, 1)
    args = Namespace(**OPTIONS)
    expected = [compute(loss_module, args, seed) for seed in range(NUM_CASES)]
    settings = Settings(mode=Mode.REQUIRE, ops=(COMPILED_LOGP,))
    log_prob = gradient_share = 0.0
    with install_into(loss_module, settings, trainer="vime", case=Case(platform="cpu")):
        for seed, (passed, log_probs, gradient) in enumerate(expected):
            found = compute(loss_module, args, seed)
            pairs = ((found[0], passed), (found[1], log_probs))
            log_prob = max(log_prob, *(float((one - other).abs().max()) for one, other in pairs))
            share = (found[2] - gradient).abs().max() / gradient.abs().max()
            gradient_share = max(gradient_share, float(share))
    torch.distributed.destroy_process_group()
    result = {"num_cases": NUM_CASES, "log_prob": log_prob, "gradient_share": gradient_share}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
