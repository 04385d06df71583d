"""Time a trainer's functions, forward and backward separately, and measure a step's peak memory.

Timing leaves values and gradients bitwise equal.  Nothing waits for the device before the end of a step.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import torch

from rlk_repro.operators import KERNELS, Platform

STEP_TIMER: Final = "step"
FORWARD_ONLY: Final = "forward_only"
UPDATE: Final = "update"
R = TypeVar("R")


@dataclass(frozen=True)
class Timers:
    """Names of a function's timers; calls without gradient count in ``no_grad`` if it is set, else in ``forward``."""

    forward: str
    backward: str | None = None
    no_grad: str | None = None


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        pass

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin

    def forget(self) -> None:
        pass


class DeviceClock:
    """Measures time between events on the current stream; gaps in which the device is idle count too.

    Events and torch's stream object are reused, because making one costs the host more time than recording an event.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._num_used = 0
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.current_stream()

    def mark(self) -> torch.cuda.Event:
        if self._num_used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._num_used]
        self._num_used += 1
        if torch._C._cuda_getCurrentRawStream(self._device) != self._stream.cuda_stream:  # noqa: SLF001
            self._stream = torch.cuda.current_stream()
        event.record(self._stream)
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def elapsed_s(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def forget(self) -> None:
        self._num_used = 0


Clock: TypeAlias = HostClock | DeviceClock


def make_clock(*, is_device: bool) -> Clock:
    return DeviceClock() if is_device else HostClock()


class StepProfile:
    """Seconds per timer over one step, and the peak memory of the step and of its phases.

    A timer adds up all calls, nested calls included: a function called inside another one counts in both timers.
    """

    def __init__(self, platform: str) -> None:
        self._clock = make_clock(is_device=platform != Platform.CPU)
        self._memory = HostMemory() if platform == Platform.CPU else DeviceMemory()
        self._intervals: list[tuple[str, Any, Any]] = []
        self._spans: list[_BackwardSpan] = []
        self._step_began = time.perf_counter()
        self._peaks: dict[str, int] = {}
        self._phase: str | None = None
        self._is_paused = False
        self._memory.reset()

    @property
    def is_memory_per_step(self) -> bool:
        """Whether the recorded peak memory is that of one step; otherwise it is the peak since the process started."""
        return self._memory.is_per_step

    def time_function(self, function: Callable[..., R], timers: Timers) -> Callable[..., R]:
        """Wrap ``function`` to time its calls; a call that raises an exception is not counted.

        The backward pass of a call is timed from the first gradient of an output to the last gradient of a tensor
        argument.  A tensor inside a list or a mapping does not count as an argument.
        """

        def timed(*args: Any, **kwargs: Any) -> R:
            if self._is_paused:
                return function(*args, **kwargs)
            span = None
            if timers.backward is not None and torch.is_grad_enabled():
                span = _BackwardSpan(timers.backward, self._clock, self._intervals)
                args = tuple(span.mark_input(value) for value in args)
                kwargs = {name: span.mark_input(value) for name, value in kwargs.items()}
            has_backward = span is not None and span.num_inputs > 0
            begin = self._clock.mark()
            result = function(*args, **kwargs)
            name = timers.forward if has_backward else timers.no_grad or timers.forward
            self._intervals.append((name, begin, self._clock.mark()))
            if span is not None and has_backward:
                span.watch_outputs(result)
                self._spans.append(span)
            return result

        # functools.wraps would also copy a compiled function's own attributes
        return functools.update_wrapper(timed, function, updated=())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak memory of the block as ``<peak>_in_<name>``; such blocks must not nest."""
        self._keep_peaks()
        self._phase = f"_in_{name}"
        try:
            yield
        finally:
            self._keep_peaks(self._phase)
            self._phase = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop timing during the block, and do not count the memory that the block takes."""
        self._keep_peaks(self._phase)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._memory.reset()

    def run_in_phase(self, name: str, function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> R:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    def _keep_peaks(self, suffix: str | None = None) -> None:
        for key, value in self._memory.read_peaks().items():
            names = [key] if suffix is None else [key, key + suffix]
            for name in names:
                self._peaks[name] = max(self._peaks.get(name, 0), value)
        self._memory.reset()

    def end_step(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds per timer and the peak bytes since the last call, and reset both.

        The timer ``step`` is the host time between two calls, waiting included.
        """
        now = time.perf_counter()
        for span in self._spans:
            span.close()
        if self._intervals:
            self._clock.settle()
        seconds: dict[str, list[float]] = {STEP_TIMER: [now - self._step_began]}
        for name, begin, end in self._intervals:
            seconds.setdefault(name, []).append(self._clock.elapsed_s(begin, end))
        self._spans.clear()
        self._intervals.clear()
        self._step_began = now
        self._clock.forget()
        self._keep_peaks()
        peaks, self._peaks = self._peaks, {}
        return {name: math.fsum(values) for name, values in seconds.items()}, peaks


class _BackwardSpan:
    __slots__ = ("_begin", "_clock", "_end", "_intervals", "_name", "_num_left", "num_inputs")

    def __init__(self, name: str, clock: Clock, intervals: list[tuple[str, Any, Any]]) -> None:
        self.num_inputs = 0
        self._name, self._clock, self._intervals = name, clock, intervals
        self._begin: Any = None
        self._end: Any = None
        self._num_left = 0

    def mark_input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        self.num_inputs += 1
        view = value.view_as(value)
        assert view.grad_fn is not None, "a view of a tensor that requires grad has a node"
        view.grad_fn.register_hook(self.leave)  # tells when the gradient is ready
        return view

    def watch_outputs(self, result: Any) -> None:
        for tensor in _find_tensors(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self.enter)

    def enter(self, _arrived: object) -> None:
        if self._begin is None:
            self._begin = self._clock.mark()

    def leave(self, _left: object, _arrived: object) -> None:
        self._end = self._clock.mark()
        self._num_left += 1
        if self._num_left == self.num_inputs:
            self.close()

    def close(self) -> None:
        """End the timed backward pass at the last computed gradient, because some inputs may never get a gradient."""
        if self._begin is not None and self._end is not None:
            self._intervals.append((self._name, self._begin, self._end))
        self._begin = self._end = None
        self._num_left = 0


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _find_tensors(item)
    elif isinstance(value, Mapping):
        yield from _find_tensors(list(value.values()))


_LOADS: Final = Counter(kernel_compilations=0)


def _count_load(_module: Any, _function: Any, name: str, *_: Any) -> None:
    """Triton calls this when it loads a kernel that it has just compiled, or has found compiled on disk.

    It compiles a kernel anew for other kinds of arguments, such as a number of rows that 16 does not divide.
    """
    _LOADS["kernel_compilations"] += any(part in name for part in KERNELS)


def read_counts() -> dict[str, int]:
    """Return how often torch compiled code, Triton loaded kernels of RL-Kernel, and torch retried allocations.

    Neither ``torch._dynamo``, without which torch compiles nothing, nor Triton is imported for this.
    """
    found: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    hits = (
        count
        for reasons in list(found.values())
        for reason, count in reasons.items()
        if "recompile limit exceeded" in str(reason)
    )
    counts = {"compilations": found.get("frames", {}).get("total", 0), "recompile_limit_hits": sum(hits)}
    knobs: Any = getattr(sys.modules.get("triton.knobs"), "runtime", None)
    hooks: Any = getattr(knobs, "kernel_load_end_hook", None)
    if hasattr(hooks, "add"):
        hooks.add(_count_load)  # a second time this changes nothing
        counts.update(_LOADS)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        counts["allocator_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return counts


class DeviceMemory:
    """The peak memory of torch's own allocator on the current device, without the memory of other libraries."""

    is_per_step = True

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def read_peaks(self) -> dict[str, int]:
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }


class HostMemory:
    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self.is_per_step = False

    def reset(self) -> None:
        try:
            (self._proc / "clear_refs").write_text("5")  # writing 5 resets the peak to the current memory (man 5 proc)
            self.is_per_step = True
        except OSError:
            self.is_per_step = False

    def read_peaks(self) -> dict[str, int]:
        try:
            status = (self._proc / "status").read_text()
        except OSError:
            return {}
        match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return {"peak_rss_bytes": int(match[1]) * 1024} if match else {}
