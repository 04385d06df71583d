"""Run implementations on the cases of a suite, and log one line per implementation and case (a cell).

An error becomes the status of its cell, and the other implementations are still measured.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from rlk_repro.base.files import dump_json_line
from rlk_repro.base.units import GIB, format_bytes
from rlk_repro.bench.attempts import Attempts, Failure, shorten_line
from rlk_repro.bench.cases import CaseTensors, estimate_bytes, find_floor_s, make_inputs
from rlk_repro.bench.implementation import BenchedImplementation, Blocked, Call, Ready, make_call
from rlk_repro.bench.measure import Rates, Timing, measure_calls, record_kernels
from rlk_repro.bench.references import Accuracy, Truth, check_call, compute_truth
from rlk_repro.rundir.operator_results import OperatorCase, OperatorStatus
from rlk_repro.spec import OperatorsWorkload

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BoundCell:
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
        self._attempts, self._rates = Attempts(device), rates
        self._passed: set[tuple[OperatorCase, str]] = set()

    def time_case(self, case: OperatorCase, sweep: int) -> None:
        """Log a ``time`` record for each implementation; every second sweep runs them in reverse order."""
        inputs = self._make_inputs(case)
        order = self._find_implementations(case)
        for implementation in reversed(order) if sweep % 2 else order:
            cell = self._build(implementation, inputs)
            timing = cell if isinstance(cell, Failure) else self._attempts.attempt(partial(self._time, cell.call))
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
            self._attempts.release()

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
            truth = self._attempts.attempt(partial(compute_truth, inputs, self._suite.oracle_rows))
        for implementation in implementations:
            cell = self._build(implementation, inputs)
            log_record("check", case=asdict(case), implementation=implementation.name, **self._check(cell, truth))
            del cell
            self._attempts.release()

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
            return Failure(OperatorStatus.BLOCKED, reason)
        made = self._attempts.attempt(partial(make_inputs, case, self._attempts.device, self._seed))
        return Failure(made.status, shorten_line(f"inputs: {made.reason}")) if isinstance(made, Failure) else made

    def _build(self, implementation: BenchedImplementation, inputs: CaseTensors | Failure) -> BoundCell | Failure:
        if isinstance(inputs, Failure):
            return inputs
        ready = self._attempts.attempt(partial(implementation.build, inputs))
        if isinstance(ready, Blocked):
            return Failure(OperatorStatus.BLOCKED, shorten_line(ready.reason))
        return ready if isinstance(ready, Failure) else BoundCell(ready, make_call(inputs, ready))

    def _time(self, call: Call) -> Timing:
        suite = self._suite
        return measure_calls(call, device=self._attempts.device, warmup=suite.warmup_calls, repeats=suite.timed_calls)

    def _check(self, cell: BoundCell | Failure, truth: Truth | Failure) -> dict[str, Any]:
        if isinstance(cell, Failure):
            return _describe_check(cell, ())
        check = None if isinstance(truth, Failure) else self._attempts.attempt(partial(check_call, cell.call, truth))
        kernels = self._attempts.attempt(partial(record_kernels, cell.call))
        record = _describe_check(check, () if isinstance(kernels, Failure) else kernels)
        return record | ({"reason": shorten_line(f"not checked: {truth.reason}")} if isinstance(truth, Failure) else {})


def _describe_cell(implementation: BenchedImplementation, cell: BoundCell | Failure) -> dict[str, Any]:
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
