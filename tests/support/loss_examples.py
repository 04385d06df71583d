"""A loss module to install into, fresh for every test, and batches for it: the reference trainer's real core."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import rlk_repro
from rlk_repro.integration.route.api import Route, RouteContext

VOCABULARY = 11
LENGTHS = ((7, 3), (4, 2), (9, 5))  # prompt and response together, response


def load_loss_module() -> ModuleType:
    """The core under another name, so that no test sees what another one installed."""
    path = Path(rlk_repro.__file__).parent / "refengine" / "core.py"
    spec = importlib.util.spec_from_file_location("loss_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_args(**changes: Any) -> argparse.Namespace:
    options = {
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "entropy_coef": 0.0,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
        "rollout_temperature": 1.0,
        "log_probs_chunk_size": -1,
    }
    return argparse.Namespace(**(options | changes))


def make_logits(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(total for total, _ in LENGTHS)
    return torch.randn(1, num_rows, VOCABULARY, generator=generator)


def make_batch(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 + seed)

    def per_token() -> list[torch.Tensor]:
        return [torch.randn(response, generator=generator) - 2 for _, response in LENGTHS]

    masks = [torch.ones(response) for _, response in LENGTHS]
    return {
        "unconcat_tokens": [torch.randint(VOCABULARY, (total,), generator=generator) for total, _ in LENGTHS],
        "total_lengths": [total for total, _ in LENGTHS],
        "response_lengths": [response for _, response in LENGTHS],
        "loss_masks": masks,
        "rollout_mask_sums": torch.tensor([float(len(mask)) for mask in masks]),
        "advantages": per_token(),
        "log_probs": per_token(),
        "ref_log_probs": per_token(),
        "rollout_log_probs": per_token(),
    }


def train_once(module: ModuleType, args: argparse.Namespace, *, num_microbatches: int = 2) -> list[torch.Tensor]:
    """A pass without gradient, then forward and backward of every microbatch; every number that came out of it."""
    numbers: list[torch.Tensor] = []
    for seed in range(num_microbatches):
        batch = make_batch(seed)
        with torch.no_grad():
            numbers += module.find_response_log_probs(args, batch, make_logits(seed))[0]
        leaf = make_logits(seed).requires_grad_()
        reducer = module.make_sum_of_sample_mean(batch["loss_masks"], batch["rollout_mask_sums"])
        loss, metrics = module.policy_loss_function(args, batch, leaf * 1.5, reducer)
        (loss / num_microbatches).backward()
        assert leaf.grad is not None
        numbers += [loss.detach(), *metrics.values(), leaf.grad]
    return numbers


def make_loud_route(context: RouteContext) -> Route:
    """RL-Kernel's stand-in: one percent off the trainer's own function, so that each call shows."""

    def run(call: Any) -> Any:
        log_probs, entropy = context.native(**call)
        return log_probs * 1.01, entropy

    return Route(implementation="NativeLogpOp", version="0.1.0", refuse=lambda _: None, run=run)


# Two ranks, each a process of its own, forked from one that has imported torch: to import it takes seconds.


def run_ranks(run: Callable[..., None], *arguments: Any) -> None:
    """Call ``run(rank, *arguments)`` in both; both must end well."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["rlk_repro.integration.switch", "tests.support.loss_examples"])
    processes = [context.Process(target=run, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
