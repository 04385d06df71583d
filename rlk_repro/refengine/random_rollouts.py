"""Write rollouts of random tokens as vime's ``--save-debug-rollout-data`` does; `prepare` calls this module.

Tokens are uniform over the vocabulary, rewards over 256 values, and all samples of a rollout have one length.  With
experts, each token goes to distinct experts, and every set of experts is equally likely.  SHAKE-256 gives the bits, so
equal arguments give equal values.  No rollout engine runs, so there are no log-probs of an engine.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from rlk_repro.base.shares import run_shares

_SIZES: Final = (
    *("seed", "num-samples", "prompt-len", "vocab-size"),
    *("num-layers", "num-experts", "num-experts-per-token"),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rlk_repro.refengine.random_rollouts", description=__doc__)
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--response-lens", type=int, nargs="+", required=True, help="one length for each rollout")
    parser.add_argument("--processes", type=int, default=1, help="each writes every n-th rollout")
    parser.add_argument("folder", type=Path)
    sizes = parser.parse_args(argv)
    if any(run_shares(sizes.processes, partial(_write_share, sizes))):
        sys.exit(1)


def _write_share(sizes: argparse.Namespace, first: int) -> int:
    if sizes.processes > 1:
        torch.set_num_threads(1)
    for number in range(first, len(sizes.response_lens), sizes.processes):
        samples = list(_list_samples(sizes, number, sizes.response_lens[number]))
        torch.save({"rollout_id": number, "samples": samples}, sizes.folder / f"{number}.pt")
    return 0


def _list_samples(sizes: argparse.Namespace, rollout: int, response_len: int) -> Iterator[dict[str, Any]]:
    num_tokens = sizes.prompt_len + response_len
    for number in range(sizes.num_samples):
        what = f"{sizes.seed}/{rollout}/{number}"
        # without the sign, 63 random bits remain: the bias of the modulo is too small for any test to see
        drawn = _draw(f"{what}/tokens", num_tokens, torch.int64) & torch.iinfo(torch.int64).max
        sample = {
            "index": rollout * sizes.num_samples + number,
            "tokens": (drawn % sizes.vocab_size).tolist(),
            "response_length": response_len,
            "reward": _draw(f"{what}/reward", 1, torch.uint8).item() / 256,
            "status": "truncated",
        }
        if sizes.num_experts:
            sample["rollout_routed_experts"] = _choose_experts(sizes, what, num_tokens - 1)
        yield sample


def _choose_experts(sizes: argparse.Namespace, what: str, num_tokens: int) -> torch.Tensor:
    """Draw the experts of each token: [tokens, layers, experts per token] int32."""
    shape = (num_tokens, sizes.num_layers, sizes.num_experts)
    keys = _draw(f"{what}/experts", num_tokens * sizes.num_layers * sizes.num_experts, torch.int32).view(shape)
    return keys.argsort(dim=-1, stable=True)[..., : sizes.num_experts_per_token].to(torch.int32).contiguous()


def _draw(what: str, number: int, dtype: torch.dtype) -> torch.Tensor:
    data = hashlib.shake_256(what.encode()).digest(number * dtype.itemsize)
    return torch.frombuffer(bytearray(data), dtype=dtype)


if __name__ == "__main__":
    main()
