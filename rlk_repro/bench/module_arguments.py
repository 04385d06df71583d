"""Flags of the module process: vime's names where vime has one.  What vime's loss reads beyond them is fixed here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

# vime's defaults, as of 1fc199d9, of what no flag of this process changes
FIXED: Final[dict[str, Any]] = {
    "allgather_cp": False,
    "context_parallel_size": 1,
    "custom_pg_loss_reducer_function_path": None,
    "custom_tis_function_path": None,
    "get_mismatch_metrics": False,
    "loss_type": "policy_loss",
    "rollout_top_p": 1.0,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "use_opsm": False,
    "use_rollout_logprobs": False,
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags and ``FIXED``, as one namespace that vime's loss functions take."""
    parser = argparse.ArgumentParser("python -m rlk_repro.bench.module", description=__doc__)
    _add_machine(parser)
    _add_batch(parser)
    _add_loss(parser)
    return parser.parse_args(argv, argparse.Namespace(**FIXED))


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1234, help="seed of all batches")
    parser.add_argument("--num-rollout", type=int, default=3, help="rollouts, each with its log lines")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is also AMD's")
    parser.add_argument("--lead-ms", type=float, default=0.0, help="busy time of the device before each pass")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="ranks that share the vocabulary")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batches")
    group.add_argument("--num-samples", type=int, default=16, help="samples per microbatch")
    group.add_argument("--num-tokens", type=int, default=1024, help="packed tokens per microbatch")
    group.add_argument("--prompt-fraction", type=float, default=0.25, help="of the tokens of a sample")
    group.add_argument("--num-microbatches", type=int, default=1, help="microbatches per optimizer step")
    group.add_argument("--vocab-size", type=int, default=1024, help="before padding")


def _add_loss(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loss, in vime's names")
    group.add_argument("--num-steps-per-rollout", type=int, default=1)
    group.add_argument("--rollout-temperature", type=float, default=1.0)
    group.add_argument("--advantage-estimator", choices=("grpo", "gspo", "cispo"), default="grpo")
    group.add_argument("--eps-clip", type=float, default=0.2)
    group.add_argument("--eps-clip-high", type=float, default=0.28)
    group.add_argument("--use-kl-loss", action="store_true")
    group.add_argument("--kl-loss-coef", type=float, default=0.0)
    group.add_argument("--kl-loss-type", choices=("k1", "k2", "k3", "low_var_kl"), default="low_var_kl")
    group.add_argument("--use-unbiased-kl", action="store_true")
    group.add_argument("--entropy-coef", type=float, default=0.0)
    group.add_argument("--log-probs-chunk-size", type=int, default=-1)
    group.add_argument("--calculate-per-token-loss", action="store_true")
    group.add_argument("--use-tis", action="store_true")
