"""Measure all-reduce bandwidth before the trials; torch's launcher runs this module for each GPU of every node.

``python -m torch.distributed.run … -m rlk_repro.bench.all_reduce BACKEND MAX_BYTES RESULT``: rank 0 writes RESULT.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
from torch import distributed

from rlk_repro.base.files import write_json
from rlk_repro.bench.measure import synchronize
from rlk_repro.integration.measure.transport import read_transport

SCHEMA: Final = 1
GROWTH: Final = 32
SIZES: Final = tuple(2**10 * GROWTH**number for number in range(5))
"""Sizes of the messages in bytes: 1 KiB to 1 GiB."""
NUM_WARMUPS: Final = 2
NUM_REPEATS: Final = 5
BUDGET_S: Final = 60.0
"""A larger message is not measured if the measurement of all sizes would then take longer than this time."""
TIMEOUT: Final = timedelta(seconds=120)


def main() -> None:
    backend, max_bytes, result = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    device = torch.device("cpu")
    if backend != "gloo":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, timeout=TIMEOUT)
    found = measure(max_bytes, device)
    if distributed.get_rank() == 0:
        write_json(result, {
            "schema": SCHEMA,
            "backend": backend,
            "num_ranks": distributed.get_world_size(),
            "network": read_transport().get("network", "not recorded"),
            "bus_gb_s": found,
        })  # fmt: skip
    distributed.destroy_process_group()


def measure(max_bytes: int, device: torch.device) -> dict[str, float]:
    """Return bus bandwidth in GB/s by message size in bytes: size x 2 (n - 1) / n / time of the slowest of n ranks."""
    num_ranks = distributed.get_world_size()
    message = torch.zeros(max_bytes // 4, device=device)
    found: dict[str, float] = {}
    began = time.monotonic()
    for num_bytes in SIZES:
        if num_bytes > max_bytes:
            break
        seconds = _take_slowest(_time_one(message[: num_bytes // 4]), device)
        found[str(num_bytes)] = float(f"{num_bytes / seconds * 2 * (num_ranks - 1) / num_ranks / 1e9:.4g}")
        next_s = seconds * GROWTH * (NUM_WARMUPS + NUM_REPEATS)
        if _take_slowest(time.monotonic() - began, device) + next_s > BUDGET_S:
            break
    return found


def _time_one(message: torch.Tensor) -> float:
    for _ in range(NUM_WARMUPS):
        distributed.all_reduce(message)
    synchronize(message.device)
    began = time.perf_counter()
    for _ in range(NUM_REPEATS):
        distributed.all_reduce(message)
    synchronize(message.device)
    return (time.perf_counter() - began) / NUM_REPEATS


def _take_slowest(seconds: float, device: torch.device) -> float:
    highest = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.all_reduce(highest, op=distributed.ReduceOp.MAX)
    return float(highest.item())


if __name__ == "__main__":
    main()
