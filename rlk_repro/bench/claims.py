"""The process that measures one published claim: ``python -m rlk_repro.bench.claims``, a task on standard input.

It prints a line about itself, then one line per cell, each flushed: what it could not do it says, and what kills it is
found by ``rlk_repro.claims.processes``.  Inputs are random; shapes, number types and method are those of the claim.
No path of the machine is printed on purpose, and nothing is judged here.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from rlk_repro.bench.measure import measure_calls
from rlk_repro.claims.results import ANSWER, RL_KERNEL, Status
from rlk_repro.probes import code
from rlk_repro.rundir.manifest import Manifest

SEED: Final = 20261120
FORWARD: Final = "forward"
TRAINING: Final = "forward-backward"
Inputs: TypeAlias = Mapping[str, Tensor]
Call: TypeAlias = Callable[[], object]
OutOfMemory: Final = torch.cuda.OutOfMemoryError  # its new name, torch.OutOfMemoryError, is younger than torch 2.4


class Unavailable(Exception):
    """This implementation cannot run here, for a reason known before it is called."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the parent asked for; ``shape`` and the like are those of one cell."""

    operator: str
    implementation: str
    pass_: str
    shape: Mapping[str, int]
    settings: Mapping[str, float]
    dtype: torch.dtype
    device: torch.device
    is_cold: bool
    warmup: int
    repeats: int


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
# plain PyTorch that the claims call native and RL-Kernel has no class for
FUNCTIONS: Final = frozenset({("sampler-logp", "native"), ("sampling", "native")})


def main() -> None:
    order = json.load(sys.stdin)
    device = torch.device(order["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    _say(_describe(device))
    for _, cells in itertools.groupby(order["cells"], key=lambda cell: cell["row"]):
        for answer in _measure_row([_read_task(order, cell, device) for cell in cells]):
            _say(answer)


def _say(value: Mapping[str, Any]) -> None:
    sys.stdout.write(f"\n{ANSWER}{json.dumps(value)}\n")  # whatever a library left on the line before
    sys.stdout.flush()


def _describe(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "seed": SEED,
        RL_KERNEL: _find_rl_kernel(),
    }


def _find_rl_kernel() -> Any:
    manifest = Manifest(node="here", sections={code.SECTION: {RL_KERNEL: code.probe()[RL_KERNEL]}})
    return manifest.to_json()["sections"][code.SECTION][RL_KERNEL]


def _read_task(order: Mapping[str, Any], cell: Mapping[str, Any], device: torch.device) -> Task:
    return Task(
        operator=order["operator"],
        implementation=cell["implementation"],
        pass_=cell["pass"],
        shape=cell["shape"],
        settings=order["settings"],
        dtype=getattr(torch, order["dtype"]),
        device=device,
        is_cold=cell["is_cold"],
        warmup=order["warmup"],
        repeats=order["repeats"],
    )


def _measure_row(tasks: list[Task]) -> Iterator[Mapping[str, Any]]:
    """Measure the cells of one row on the same inputs; they are freed before the next row."""
    torch.manual_seed(SEED)
    try:
        inputs = make_inputs(tasks[0])
    except OutOfMemory:
        inputs = None
    for task in tasks:
        yield _answer(Status.OOM) if inputs is None else _measure(task, inputs)
        _empty_cache(task.device)


def _measure(task: Task, inputs: Inputs) -> Mapping[str, Any]:
    try:
        operator = load_operator(task)
    except Unavailable as reason:
        return _answer(Status.BLOCKED, reason=str(reason))
    ran = "" if operator is None else type(operator).__name__
    input_bytes = sum(tensor.nbytes for tensor in inputs.values())
    call = make_call(task, operator, inputs)
    try:
        if task.is_cold:
            return _answer(Status.DONE, ran=ran, samples_s=[_time_first(call, task.device)], input_bytes=input_bytes)
        timing = measure_calls(call, device=task.device, warmup=task.warmup, repeats=task.repeats)
    except OutOfMemory:
        return _answer(Status.OOM, ran=ran, input_bytes=input_bytes)
    return _answer(
        Status.DONE,
        ran=ran,
        samples_s=list(timing.samples_s),
        peak_extra_bytes=timing.peak_extra_bytes,
        input_bytes=input_bytes,
    )


def _answer(status: Status, **values: Any) -> Mapping[str, Any]:
    nothing: dict[str, Any] = {"reason": "", "ran": "", "samples_s": [], "peak_extra_bytes": None, "input_bytes": None}
    return {"status": status.value, **nothing, **values}


def _time_first(call: Call, device: torch.device) -> float:
    """Wall time of one call on an idle device."""
    _synchronize(device)
    begin = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def load_operator(task: Task) -> Any:
    """The operator's instance; None where the claim's baseline is plain PyTorch.

    Raises:
        Unavailable: RL-Kernel is not importable or not compiled, or this device would make its class delegate.
    """
    key = (task.operator, task.implementation)
    if key in FUNCTIONS:
        return None
    _refuse_device(task)
    module, _, name = CLASSES[key].rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)()
    except ImportError as error:
        raise Unavailable(f"cannot be imported ({error})") from error
    except RuntimeError as error:  # what RL-Kernel raises where its extension lacks the kernel
        raise Unavailable(f"cannot be made ({str(error).splitlines()[0]})") from error


def _refuse_device(task: Task) -> None:
    """RL-Kernel's classes hand over to others in silence where the device does not suit them: refuse beforehand."""
    if task.implementation == "flashinfer":
        if torch.version.hip:
            raise Unavailable("on ROCm this class samples without FlashInfer")
        if importlib.util.find_spec("flashinfer") is None:
            raise Unavailable("FlashInfer is not installed")
    if task.implementation in {"native", "sampler"}:
        return
    if task.device.type != "cuda":
        raise Unavailable("needs a GPU")
    major, minor = torch.cuda.get_device_capability(task.device)
    if task.implementation == "sm90" and major != 9:
        raise Unavailable(f"needs compute capability 9, this GPU has {major}.{minor}")


def make_inputs(task: Task) -> Inputs:
    """Random inputs of the operator, on the device."""
    shape, device, dtype = task.shape, task.device, task.dtype
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


def make_call(task: Task, operator: Any, inputs: Inputs) -> Call:
    """The call that the claim timed, gradients included where its pass has a backward."""
    calls: Mapping[str, Callable[[Task, Any, Inputs], Call]] = {
        "logp": _call_logp,
        "sampler-logp": _call_sampler_logp,
        "ratio-kl": _call_ratio_kl,
        "grpo-loss": _call_grpo_loss,
        "linear-logp": _call_linear_logp,
        "sampling": _call_sampling,
    }
    call = calls[task.operator](task, operator, inputs)
    return call if task.pass_ == TRAINING else torch.no_grad()(call)


def _call_logp(_: Task, operator: Any, inputs: Inputs) -> Call:
    return lambda: operator.apply(inputs["logits"], inputs["tokens"])


def _call_sampler_logp(_: Task, operator: Any, inputs: Inputs) -> Call:
    logits, tokens = inputs["logits"], inputs["tokens"]
    if operator is not None:
        return lambda: operator.compute_logp(logits, tokens)
    return lambda: torch.log_softmax(logits, dim=-1).gather(-1, tokens.unsqueeze(-1))


def _call_ratio_kl(_: Task, operator: Any, inputs: Inputs) -> Call:
    names = ("logits", "reference", "tokens", "mask", "old_log_probs")
    return lambda: operator(*(inputs[name] for name in names))


def _call_grpo_loss(task: Task, operator: Any, inputs: Inputs) -> Call:
    rest = [inputs[name] for name in ("reference", "tokens", "old_log_probs", "rewards", "mask")]

    def forward(logits: Tensor) -> Tensor:
        loss: Tensor = operator(logits, *rest, samples_per_prompt=task.shape["samples"], **task.settings)[0]
        return loss

    if task.pass_ == FORWARD:
        return lambda: forward(inputs["logits"])
    logits = inputs["logits"].detach().requires_grad_()
    return lambda: torch.autograd.grad(forward(logits), logits)


def _call_linear_logp(task: Task, operator: Any, inputs: Inputs) -> Call:
    hidden, weight, tokens = inputs["hidden"], inputs["weight"], inputs["tokens"]
    if task.pass_ == FORWARD:
        return lambda: operator(hidden, weight, tokens)

    def train() -> None:
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        operator(*leaves, tokens).sum().backward()

    return train


def _call_sampling(task: Task, operator: Any, inputs: Inputs) -> Call:
    logits = inputs["logits"]
    top_k, top_p = int(task.settings["top_k"]), task.settings["top_p"]
    if operator is None:
        return lambda: sample_natively(logits, top_k=top_k, top_p=top_p)
    return lambda: operator.sample(logits, top_k=top_k, top_p=top_p)


def sample_natively(logits: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Top-k, then top-p row by row in Python, then one draw: the slow baseline that the sampling claims chose.

    ``logits`` [N, V] float32 stay as they are; token ids [N, 1] come back.
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


if __name__ == "__main__":
    main()
