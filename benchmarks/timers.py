"""What the timers cost the host with RL-Kernel off: ``python -m benchmarks.timers [CALLS] [--device cpu|cuda]``.

The log-prob function of a loss module is replaced by one that does next to nothing, so that what is left is ours: the
same calls bare and under the timers, in turns; steps end every 100 calls, their end included.  Without gradient, and
forward with backward.  Printed: microseconds per call, median and range over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from rlk_repro.integration.switch import Settings, install_into
from rlk_repro.operators import Case
from rlk_repro.refengine import core

NUM_TURNS = 10
CALLS_PER_STEP = 100


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: object,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, None]:
    del tokens, tp_group, with_entropy, chunk_size, log_prob_keep_mask, with_entropy_grad
    return logits * 2, None


def make_module() -> ModuleType:
    module = ModuleType("bare")
    vars(module).update({name: value for name, value in vars(core).items() if not name.startswith("__")})
    vars(module)["calculate_log_probs_and_entropy"] = calculate_log_probs_and_entropy
    return module


def measure_turn(
    module: ModuleType, num_calls: int, end_step: Callable[[int], None], *, device: str, grad: bool
) -> float:
    """Microseconds per call."""
    logits = torch.zeros(4, 8, device=device, requires_grad=grad)
    tokens, ones = torch.zeros(4, dtype=torch.long, device=device), torch.ones(4, 8, device=device)
    began = time.perf_counter()
    for number in range(num_calls):
        result, _ = module.calculate_log_probs_and_entropy(logits, tokens, None)
        if grad:
            torch.autograd.grad(result, logits, ones)
        if number % CALLS_PER_STEP == CALLS_PER_STEP - 1:
            end_step(number)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / num_calls * 1e6


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timers")
    parser.add_argument("calls", nargs="?", type=int, default=100_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    per_turn, device = options.calls // NUM_TURNS, options.device
    for grad in (False, True):
        bare, timed = [], []
        with tempfile.TemporaryDirectory() as folder:
            module, plain = make_module(), make_module()
            settings = Settings(ops_dir=Path(folder) / "ops")
            with install_into(module, settings, trainer="benchmark", case=Case(platform=device)) as installation:
                for _ in range(NUM_TURNS):
                    bare.append(measure_turn(plain, per_turn, lambda _: wait(device), device=device, grad=grad))
                    timed.append(measure_turn(module, per_turn, installation.end_step, device=device, grad=grad))
        costs = [one - other for one, other in zip(timed, bare, strict=True)]
        what = "forward and backward" if grad else "without gradient"
        sys.stdout.write(
            f"{device}, {what}: bare {statistics.median(bare):.1f} us, timers add {statistics.median(costs):.1f} us "
            f"({min(costs):.1f} to {max(costs):.1f}) per call, {options.calls} calls\n"
        )


if __name__ == "__main__":
    main()
