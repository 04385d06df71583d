"""Run implementations on the cases of a suite, and log one line per implementation and case (a cell).

An error becomes the status of its cell, and the other implementations are still measured.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.files import dump_json_line
from rlk_repro.base.units import GIB, format_bytes
from rlk_repro.bench.cases import CaseTensors, estimate_bytes, find_floor_s, make_inputs
from rlk_repro.bench.implementation import BenchedImplementation, Call, Failure, Ready, block, make_call, shorten_line
from rlk_repro.bench.measure import Rates, Timing, measure_calls, record_kernels
from rlk_repro.bench.references import Accuracy, Truth, check_call, compute_truth
from rlk_repro.integration.route.errors import find_failures
from rlk_repro.rundir.operator_results import OperatorCase, OperatorStatus
from rlk_repro.spec import OperatorsWorkload

logger = logging.getLogger(__name__)

OOM_WORDS: Final = ("out of memory", "can't allocate memory")
R = TypeVar("R")


class Cell(NamedTuple):
    ready: Ready
    call: Call


def log_record(event: str, **fields: Any) -> None:
    logger.info("operator %s", dump_json_line({"event": event, **fields}))


class Harness:
    def __init__(
        self,
        suite: OperatorsWorkload,
        implementations: tuple[BenchedImplementation, ...],
        device: torch.device,
        rates: Rates,
        seed: int,
    ) -> None:
        self._suite, self._implementations, self._seed = suite, implementations, seed
        self._device, self._rates, self._errors = device, rates, find_failures()
        self._passed: set[tuple[OperatorCase, str]] = set()

    def time_case(self, case: OperatorCase, sweep: int) -> None:
        """Log a ``time`` record for each implementation; every second sweep runs them in reverse order."""
        inputs = self._make_inputs(case)
        order = self._find_implementations(case)
        for implementation in reversed(order) if sweep % 2 else order:
            cell = self._build(implementation, inputs)
            timing = cell if isinstance(cell, Failure) else self._attempt(partial(self._time, cell.call))
            if isinstance(timing, Timing):
                self._passed.add((case, implementation.name))
            log_record(
                "time",
                case=asdict(case),
                implementation=implementation.name,
                sweep=sweep,
                floor_s=find_floor_s(case, self._rates),
                **_describe_cell(implementation, cell),
                **_describe_timing(timing),
            )
            del cell
            self._release()

    def check_case(self, case: OperatorCase) -> None:
        """Log a ``check`` record for each implementation that was timed on this case at least once."""
        implementations = [item for item in self._find_implementations(case) if (case, item.name) in self._passed]
        if not implementations:
            return
        inputs = self._make_inputs(case)
        truth: Truth | Failure
        if isinstance(inputs, Failure):
            truth = inputs
        else:
            truth = self._attempt(partial(compute_truth, inputs, self._suite.oracle_rows))
        for implementation in implementations:
            cell = self._build(implementation, inputs)
            record = self._check(cell, truth)
            log_record("check", case=asdict(case), implementation=implementation.name, **record)
            del cell
            self._release()

    def _attempt(self, action: Callable[[], R]) -> R | Failure:
        """Run ``action`` and return its result; if ``action`` raises an error, return a failure.

        Raises:
            CheckFailed: the device is in an error state, in which every later call would fail.
        """
        try:
            return action()
        except self._errors as error:
            text = shorten_line(f"{type(error).__name__}: {error}")
            is_oom = isinstance(error, MemoryError) or any(words in str(error).lower() for words in OOM_WORDS)
        self._release()
        return Failure(OperatorStatus.OOM if is_oom else OperatorStatus.FAILED, text)

    def _release(self) -> None:
        """Free memory, so that every cell starts with an empty allocator."""
        gc.collect()
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise CheckFailed(Problem("device", "is unusable after this cell", got=shorten_line(str(error)))) from error

    def _find_implementations(self, case: OperatorCase) -> list[BenchedImplementation]:
        return [
            item
            for item in self._implementations
            if item.operator == case.operator and (case.density < 1 or not item.is_sparse)
        ]

    def _make_inputs(self, case: OperatorCase) -> CaseTensors | Failure:
        limit_gib, needed = self._suite.memory_limit_gib, estimate_bytes(case)
        if limit_gib is not None and needed > limit_gib * GIB:
            reason = f"the case needs about {format_bytes(needed)}; the run's memory limit is {limit_gib:g} GiB"
            return block(reason)
        made = self._attempt(partial(make_inputs, case, self._device, self._seed))
        return Failure(made.status, shorten_line(f"inputs: {made.reason}")) if isinstance(made, Failure) else made

    def _build(self, implementation: BenchedImplementation, inputs: CaseTensors | Failure) -> Cell | Failure:
        if isinstance(inputs, Failure):
            return inputs
        ready = self._attempt(partial(implementation.build, inputs))
        return ready if isinstance(ready, Failure) else Cell(ready, make_call(inputs, ready))

    def _time(self, call: Call) -> Timing:
        suite = self._suite
        return measure_calls(call, device=self._device, warmup=suite.warmup_calls, repeats=suite.timed_calls)

    def _check(self, cell: Cell | Failure, truth: Truth | Failure) -> dict[str, Any]:
        if isinstance(cell, Failure):
            return _describe_check(cell, ())
        check = None if isinstance(truth, Failure) else self._attempt(partial(check_call, cell.call, truth))
        kernels = self._attempt(partial(record_kernels, cell.call))
        record = _describe_check(check, () if isinstance(kernels, Failure) else kernels)
        return record | ({"reason": shorten_line(f"not checked: {truth.reason}")} if isinstance(truth, Failure) else {})


def _describe_cell(implementation: BenchedImplementation, cell: Cell | Failure) -> dict[str, Any]:
    if isinstance(cell, Failure):
        return {"kind": implementation.kind.value, "class_name": "", "version": ""}
    ready = cell.ready
    return {"kind": ready.kind.value, "class_name": ready.class_name, "version": ready.version}


def _describe_timing(timing: Timing | Failure) -> dict[str, Any]:
    if isinstance(timing, Failure):
        return {"status": timing.status.value, "reason": timing.reason, "samples_s": (), "peak_extra_bytes": None}
    return {"status": OperatorStatus.PASSED.value, "reason": "", **asdict(timing)}


def _describe_check(check: Accuracy | Failure | None, kernels: tuple[str, ...]) -> dict[str, Any]:
    """Numbers that are not finite make the status ``failed``."""
    status, reason = OperatorStatus.PASSED, ""
    error = gradient_error = is_repeatable = None
    if isinstance(check, Failure):
        status, reason = check.status, check.reason
    elif check is not None:
        error, gradient_error, is_repeatable = check.error, check.gradient_error, check.is_repeatable
        if not all(math.isfinite(value) for value in (error, gradient_error or 0.0)):
            status, reason = OperatorStatus.FAILED, "returned values that are not finite"
    return {
        "status": status.value,
        "reason": reason,
        "error": error,
        "gradient_error": gradient_error,
        "is_repeatable": is_repeatable,
        "kernels": kernels,
    }
