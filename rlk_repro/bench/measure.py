"""Time calls, measure their memory, list their kernels, and measure a device's bandwidth and arithmetic rate."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.integration.measure.profile import make_clock

RATE_REPEATS: Final = 10
MAX_KERNELS: Final = 32
MAX_KERNEL_NAME: Final = 160


def make_device(name: str, rank: int = 0) -> torch.device:
    """Return the device of a rank, and make the device current.

    On a CPU, torch's compiler is switched off, because compiling takes longer than the calls.
    """
    if name == "cpu":
        torch._dynamo.config.disable = True  # noqa: SLF001  the setting that torch documents
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if rank >= count:
        raise EnvironmentMissing(
            Problem("--device cuda", "torch sees too few GPUs", got=count, expected=f"{rank + 1} or more",
                    hint="use --device cpu")
        )  # fmt: skip
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The seconds of each timed call in order; ``peak_extra_bytes`` is None where the device does not count memory."""

    samples_s: tuple[float, ...]
    peak_extra_bytes: int | None


def measure_calls(function: Callable[[], object], *, device: torch.device, warmup: int, repeats: int) -> Timing:
    """Call ``function`` ``warmup`` times untimed, then ``repeats`` times timed; each result is deleted at once.

    On a GPU, events on the current stream give the device time.  The time of a launch does not count, because the host
    launches a call while the device runs the previous call.  Caches are not flushed, so a case that fits into the
    last-level cache is measured with a warm cache.  The peak memory is that of torch's allocator during these calls,
    minus the bytes that were allocated before.
    """
    for _ in range(warmup):
        function()
    is_device = device.type == "cuda"
    clock = make_clock(is_device=is_device)
    was_collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        before = 0
        marks: list[tuple[Any, Any]] = []
        if is_device:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            function()  # keeps the device busy during the launch of the first timed call
        for _ in range(repeats):
            begin = clock.mark()
            function()
            marks.append((begin, clock.mark()))
        clock.settle()
        peak = torch.cuda.max_memory_allocated(device) - before if is_device else None
    finally:
        if was_collecting:
            gc.enable()
    return Timing(samples_s=tuple(clock.elapsed_s(*pair) for pair in marks), peak_extra_bytes=peak)


def record_kernels(function: Callable[[], object], limit: int = MAX_KERNELS) -> tuple[str, ...]:
    """Return up to ``limit`` distinct names of the device kernels of one call; without a GPU, return no names.

    Call this function after all timing, because the profiler leaves hooks that slow later launches.
    """
    if not torch.cuda.is_available():
        return ()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it keeps only the last cycle, but only one cycle runs
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            function()
            torch.cuda.synchronize()
    on_device = torch._C._autograd.DeviceType.CUDA  # noqa: SLF001  the public name is an alias without a stub
    names = (event.name for event in profiler.events() or () if event.device_type == on_device)
    found = dict.fromkeys(name[:MAX_KERNEL_NAME] for name in names if not name.startswith(("Memcpy", "Memset")))
    return tuple(found)[:limit]


@dataclass(frozen=True, kw_only=True)
class Rates:
    bytes_per_s: float
    flops_per_s: Mapping[str, float]


def measure_rates(device: torch.device, dtypes: Iterable[torch.dtype]) -> Rates:
    """Measure bandwidth with a large buffer, and arithmetic with large random matrices; the fastest call counts.

    The bandwidth is the rate of a copy or of a sum, whichever is higher: a sum only reads, so it can be faster.
    """
    flops = {str(dtype).removeprefix("torch."): _measure_matmul(device, dtype) for dtype in dict.fromkeys(dtypes)}
    return Rates(bytes_per_s=_measure_bandwidth(device), flops_per_s=flops)


def _measure_bandwidth(device: torch.device) -> float:
    num_bytes = (2 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * num_bytes / _find_best_s(lambda: target.copy_(source), device)
    read = num_bytes / _find_best_s(source.sum, device)
    return max(copied, read)


def _measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 384
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return float(2 * size**3 / _find_best_s(lambda: left @ right, device))


def _find_best_s(function: Callable[[], object], device: torch.device) -> float:
    return min(measure_calls(function, device=device, warmup=3, repeats=RATE_REPEATS).samples_s)
