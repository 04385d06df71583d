"""Define the flags of ``rlk_repro.bench.module``; ``FIXED`` holds the other arguments that vime's loss reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

from rlk_repro.refengine.arguments import add_settings
from rlk_repro.spec.workloads import ModuleBatch, ModuleLoss

DESCRIPTION: Final = "Time vime's log-prob and policy loss functions on random batches."
# defaults of vime 1fc199d9 that no flag of this process changes
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
    parser = argparse.ArgumentParser("python -m rlk_repro.bench.module", description=DESCRIPTION)
    parser.add_argument("--seed", type=int, default=1234, help="seed of all batches")
    parser.add_argument("--num-rollout", type=int, default=3, help="number of rollouts; each one writes log lines")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda also means AMD GPUs")
    parser.add_argument("--lead-ms", type=float, default=0.0, help="time that the device is kept busy before each pass")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="ranks that share the vocabulary")
    for settings in (ModuleBatch, ModuleLoss):
        add_settings(parser, settings)
    return parser.parse_args(argv, argparse.Namespace(**FIXED))
