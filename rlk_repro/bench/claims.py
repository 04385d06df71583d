"""Measure one published claim: ``python -m rlk_repro.bench.claims`` with a task on standard input.

The process prints one line about itself, then one line per cell.  Inputs are random; shapes, dtypes and method are
those of the claim.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from rlk_repro.base.places import hide_places
from rlk_repro.bench.attempts import Attempts, Failure
from rlk_repro.bench.implementation import Blocked, as_tensor, find_attribute
from rlk_repro.bench.measure import Timing, measure_calls, synchronize
from rlk_repro.claims.results import ANSWER, MEASUREMENT, RL_KERNEL, TASK, Cell, Measurement, Task
from rlk_repro.probes import code
from rlk_repro.refengine.model import find_dtype
from rlk_repro.rundir.manifest import Manifest
from rlk_repro.rundir.operator_results import OperatorStatus

SEED: Final = 20261120
FORWARD: Final = "forward"
TRAINING: Final = "forward-backward"
Inputs: TypeAlias = Mapping[str, Tensor]
Call: TypeAlias = Callable[[], object]


_OPS: Final = "rl_engine.kernels.ops"
CLASSES: Final[Mapping[tuple[str, str], str]] = {
    ("logp", "native"): f"{_OPS}.pytorch.loss.logp.NativeLogpOp",
    ("logp", "fused"): f"{_OPS}.cuda.loss.logp.FusedLogpGenericOp",
    ("sampler-logp", "sampler"): "rl_engine.kernels.sampling.SamplerBackend",
    ("ratio-kl", "native"): f"{_OPS}.pytorch.loss.ratio_kl.NativeRatioKLOp",
    ("ratio-kl", "triton"): f"{_OPS}.triton.loss.ratio_kl.TritonRatioKLOp",
    ("grpo-loss", "native"): f"{_OPS}.pytorch.loss.grpo_loss.NativeGRPOLossOp",
    ("grpo-loss", "triton"): f"{_OPS}.triton.loss.grpo_loss.TritonGRPOLossOp",
    ("linear-logp", "native"): f"{_OPS}.pytorch.loss.linear_logp.NativeLinearLogpOp",
    ("linear-logp", "triton"): f"{_OPS}.triton.loss.linear_logp.TritonLinearLogpOp",
    ("linear-logp", "sm90"): f"{_OPS}.cuda.loss.linear_logp.FusedLinearLogpSM90Op",
    ("sampling", "flashinfer"): "rl_engine.kernels.sampling.SamplerBackend",
}
# plain PyTorch functions that the claims call "native"; RL-Kernel has no class for them
FUNCTIONS: Final = frozenset({("sampler-logp", "native"), ("sampling", "native")})


def main() -> None:
    task = TASK.validate_json(sys.stdin.read())
    device = torch.device(task.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    attempts = Attempts(device)
    _say(json.dumps(_describe(device)))
    for row, cells in itertools.groupby(task.cells, key=lambda cell: cell.row):
        for measurement in _measure_row(task, row, list(cells), attempts):
            _say(MEASUREMENT.dump_json(measurement, by_alias=True).decode())


def _say(text: str) -> None:
    sys.stdout.write(f"\n{ANSWER}{text}\n")  # the first newline ends a line that a library left open
    sys.stdout.flush()


def _describe(device: torch.device) -> dict[str, Any]:
    manifest = Manifest(node="here", sections={code.SECTION: {RL_KERNEL: code.probe()[RL_KERNEL]}})
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "seed": SEED,
        RL_KERNEL: manifest.to_json()["sections"][code.SECTION][RL_KERNEL],
    }


def _measure_row(task: Task, row: str, cells: Sequence[Cell], attempts: Attempts) -> Iterator[Measurement]:
    torch.manual_seed(SEED)
    inputs = attempts.attempt(partial(make_inputs, task, row))
    for cell in cells:
        found = _measure(task, cell, inputs, attempts)
        yield replace(found, reason=hide_places(found.reason))
        attempts.release()


def _measure(task: Task, cell: Cell, inputs: Inputs | Failure, attempts: Attempts) -> Measurement:
    if isinstance(inputs, Failure):
        return Measurement(cell=cell, status=inputs.status, reason=f"inputs: {inputs.reason}")
    operator = load_operator(task, cell)
    if isinstance(operator, Blocked):
        return Measurement(cell=cell, status=OperatorStatus.BLOCKED, reason=operator.reason)
    ran = "" if operator is None else type(operator).__name__
    input_bytes = sum(tensor.nbytes for tensor in inputs.values())
    call = make_call(task, cell, operator, inputs)
    timing = attempts.attempt(partial(_time, task, call, is_cold=cell.is_cold))
    if isinstance(timing, Failure):
        status, reason = timing.status, timing.reason
        return Measurement(cell=cell, status=status, reason=reason, ran=ran, input_bytes=input_bytes)
    return Measurement(
        cell=cell,
        status=OperatorStatus.PASSED,
        ran=ran,
        samples_s=timing.samples_s,
        peak_extra_bytes=timing.peak_extra_bytes,
        input_bytes=input_bytes,
    )


def _time(task: Task, call: Call, *, is_cold: bool) -> Timing:
    """Time the calls that the task requests; if ``is_cold``, only the first call on an idle device, by wall time."""
    device = torch.device(task.device)
    if not is_cold:
        return measure_calls(call, device=device, warmup=task.warmup, repeats=task.repeats)
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return Timing(samples_s=(time.perf_counter() - begin,), peak_extra_bytes=None)


def load_operator(task: Task, cell: Cell) -> Any | Blocked | None:
    """Return an instance of the operator, or why it is missing; None if the claim's baseline is plain PyTorch."""
    key = (task.operator, cell.implementation)
    if key in FUNCTIONS:
        return None
    reason = _find_obstacle(cell.implementation, torch.device(task.device))
    found = find_attribute(CLASSES[key]) if reason is None else Blocked(reason)
    if isinstance(found, Blocked):
        return found
    try:
        return found()
    except RuntimeError as error:  # RL-Kernel raises this error if its extension lacks the kernel
        return Blocked(f"cannot be created ({str(error).splitlines()[0]})")


def _find_obstacle(implementation: str, device: torch.device) -> str | None:
    """Return why RL-Kernel's class cannot run on this device, or would silently use another class there."""
    if implementation == "flashinfer":
        if torch.version.hip:
            return "on ROCm this class samples without FlashInfer"
        if importlib.util.find_spec("flashinfer") is None:
            return "FlashInfer is not installed"
    if implementation in {"native", "sampler"}:
        return None
    if device.type != "cuda":
        return "needs a GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if implementation == "sm90" and major != 9:
        return f"RL-Kernel's class needs compute capability 9, but this GPU has {major}.{minor}"
    return None


def make_inputs(task: Task, row: str) -> Inputs:
    shape, device, dtype = task.shapes[row], torch.device(task.device), find_dtype(task.dtype)
    if task.operator == "linear-logp":
        return {
            "hidden": torch.randn(shape["tokens"], shape["hidden"], device=device, dtype=dtype),
            "weight": torch.randn(shape["vocab"], shape["hidden"], device=device, dtype=dtype),
            "tokens": torch.randint(shape["vocab"], (shape["tokens"],), device=device),
        }
    if task.operator == "sampling":
        return {"logits": torch.randn(shape["sequences"], shape["vocab"], device=device, dtype=dtype)}
    sequences = shape["sequences"] if "sequences" in shape else shape["prompts"] * shape["samples"]
    size = (sequences, shape["tokens"])
    logits = torch.randn(*size, shape["vocab"], device=device, dtype=dtype)
    inputs = {"logits": logits, "tokens": torch.randint(shape["vocab"], size, device=device)}
    if task.operator in {"logp", "sampler-logp"}:
        return inputs
    return inputs | {
        "reference": torch.randn_like(logits),
        "mask": torch.ones(size, dtype=torch.bool, device=device),
        "old_log_probs": torch.randn(size, device=device, dtype=dtype),
        "rewards": torch.randn(sequences, device=device, dtype=dtype),
    }


def make_call(task: Task, cell: Cell, operator: Any, inputs: Inputs) -> Call:
    """Return the call that the claim's authors timed, with gradients if the claim's pass includes a backward pass."""
    call = _CALLS[task.operator](task, cell, operator, inputs)
    return call if cell.pass_ == TRAINING else torch.no_grad()(call)


def _call_logp(_task: Task, _cell: Cell, operator: Any, inputs: Inputs) -> Call:
    return lambda: operator.apply(inputs["logits"], inputs["tokens"])


def _call_sampler_logp(_task: Task, _cell: Cell, operator: Any, inputs: Inputs) -> Call:
    logits, tokens = inputs["logits"], inputs["tokens"]
    if operator is not None:
        return lambda: operator.compute_logp(logits, tokens)
    return lambda: torch.log_softmax(logits, dim=-1).gather(-1, tokens.unsqueeze(-1))


def _call_ratio_kl(_task: Task, _cell: Cell, operator: Any, inputs: Inputs) -> Call:
    names = ("logits", "reference", "tokens", "mask", "old_log_probs")
    return lambda: operator(*(inputs[name] for name in names))


def _call_grpo_loss(task: Task, cell: Cell, operator: Any, inputs: Inputs) -> Call:
    rest = [inputs[name] for name in ("reference", "tokens", "old_log_probs", "rewards", "mask")]
    num_samples = task.shapes[cell.row]["samples"]

    def forward(logits: Tensor) -> Tensor:
        return as_tensor(operator(logits, *rest, samples_per_prompt=num_samples, **task.settings)[0])

    if cell.pass_ == FORWARD:
        return lambda: forward(inputs["logits"])
    logits = inputs["logits"].detach().requires_grad_()
    return lambda: torch.autograd.grad(forward(logits), logits)


def _call_linear_logp(_task: Task, cell: Cell, operator: Any, inputs: Inputs) -> Call:
    hidden, weight, tokens = inputs["hidden"], inputs["weight"], inputs["tokens"]
    if cell.pass_ == FORWARD:
        return lambda: operator(hidden, weight, tokens)

    def train() -> None:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        operator(*leaves, tokens).sum().backward()

    return train


def _call_sampling(task: Task, _cell: Cell, operator: Any, inputs: Inputs) -> Call:
    logits = inputs["logits"]
    top_k, top_p = int(task.settings["top_k"]), task.settings["top_p"]
    if operator is None:
        return lambda: sample_natively(logits, top_k=top_k, top_p=top_p)
    return lambda: operator.sample(logits, top_k=top_k, top_p=top_p)


def sample_natively(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Sample by top-k, then top-p row by row in Python, then one draw: the slow baseline of the sampling claims.

    ``logits`` [N, V] float32 stay unchanged; the result is token ids [N, 1].
    """
    kept = logits.clone()
    smallest = torch.topk(kept, min(top_k, kept.shape[-1])).values[:, -1:]
    kept[kept < smallest] = -torch.inf
    ordered, order = torch.sort(kept, descending=True)
    is_beyond = torch.softmax(ordered, dim=-1).cumsum(dim=-1) > top_p
    is_removed = is_beyond.roll(1, dims=-1)
    is_removed[:, 0] = False
    for row in range(kept.shape[0]):
        kept[row, order[row][is_removed[row]]] = -torch.inf
    return torch.multinomial(torch.softmax(kept, dim=-1), num_samples=1)


_CALLS: Final[Mapping[str, Callable[[Task, Cell, Any, Inputs], Call]]] = {
    "logp": _call_logp,
    "sampler-logp": _call_sampler_logp,
    "ratio-kl": _call_ratio_kl,
    "grpo-loss": _call_grpo_loss,
    "linear-logp": _call_linear_logp,
    "sampling": _call_sampling,
}


if __name__ == "__main__":
    main()
