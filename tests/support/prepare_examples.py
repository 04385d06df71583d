"""Runs for ``prepare`` with small parts: the smoke run of vime with its model and data replaced by ``--set``."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from functools import cache
from pathlib import Path

import torch

from tests import ROOT
from tests.support.hub_server import HubServer

COMMIT = "1" * 40
LATER = "2" * 40
TINY = tuple(
    word
    for size in ("num-layers=2", "hidden-size=64", "ffn-hidden-size=128", "num-attention-heads=4", "kv-channels=16",
                 "num-query-groups=2", "vocab-size=512")
    for word in ("--set", f"workload.model.arguments.{size}")
)  # fmt: skip
BRIDGE = ("--set", "workload.model.checkpoint=bridge")


def words(*more: str) -> list[str]:
    """``prepare`` of the smoke run without conversion; by itself it needs no hub."""
    return ["prepare", "vime-smoke", "--hardware", "h200", *TINY, *BRIDGE, *more]


def from_hub(revision: str | None = COMMIT) -> list[str]:
    """The same with model and data from a hub."""
    pin = f", revision: '{revision}'" if revision else ""
    return [
        *("--set", f"workload.model.source={{kind: hub, repository: acme/tiny{pin}}}"),
        *("--set", f"workload.data.source={{kind: hub, repository: acme/sums, file: data/train.jsonl{pin}}}"),
    ]


def fill_hub(hub: HubServer, commit: str = COMMIT, *, num_shards: int = 3, shard_bytes: int = 200_000) -> None:
    """A model of several shards and what else lies in such a repository, and a data set."""
    shards = {f"model-{n:05}.safetensors": make_safetensors(f"{commit}{n}", shard_bytes) for n in range(num_shards)}
    files = {
        "config.json": json.dumps({"model_type": "qwen3", "from": commit}).encode(),
        "tokenizer.json": b"{}" * 50,
        "model.safetensors.index.json": json.dumps({"weight_map": {name: name for name in shards}}).encode(),
        "pytorch_model.bin": b"\0" * 100,
        "original/consolidated.safetensors": b"\0" * 100,
        "README.md": b"# tiny",
    }
    hub.add("models", "acme/tiny", commit, {**files, **shards})
    hub.add("datasets", "acme/sums", commit, {"data/train.jsonl": b'{"prompt": "1 + 1", "label": "2"}\n' * 40,
                                              "data/test.jsonl": b"{}\n"})  # fmt: skip


def make_safetensors(seed: str, num_bytes: int) -> bytes:
    header = json.dumps({"x": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    import random

    return struct.pack("<Q", len(header)) + header + random.Random(seed).randbytes(num_bytes)


def hub_environment(hub: HubServer, home: Path) -> dict[str, str]:
    """For a process that is to ask this hub and no other, with nothing cached."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**kept, **own, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}


def argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rlk_repro", *arguments]


# Stored rollouts as vime writes them.


@cache
def make_rollout(number: int) -> bytes:
    """The bytes of a file of ``--save-debug-rollout-data``."""
    sample = {"tokens": [number, 1, 2], "reward": 0.5, "rollout_log_probs": torch.zeros(3)}
    stream = io.BytesIO()
    torch.save({"rollout_id": number, "samples": [sample]}, stream)
    return stream.getvalue()
