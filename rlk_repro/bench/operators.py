"""Run every case of a suite with every implementation and print log lines: ``python -m rlk_repro.bench.operators``.

A sweep times every implementation on every case; values are checked and kernels listed after the last sweep.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import torch
from pydantic import ValidationError

from rlk_repro.base.errors import CheckFailed, Problem, SpecError, finish
from rlk_repro.base.files import dump_json_line, write_json
from rlk_repro.base.units import GIB, format_bytes
from rlk_repro.bench.cases import (
    CaseTensors,
    estimate_bytes,
    expand_grids,
    find_floor_s,
    make_inputs,
)
from rlk_repro.bench.implementation import (
    BenchedImplementation,
    Call,
    NotMeasuredError,
    Ready,
    block,
    make_call,
    shorten_line,
)
from rlk_repro.bench.measure import (
    Rates,
    Timing,
    make_device,
    measure_calls,
    measure_rates,
    record_kernels,
)
from rlk_repro.bench.peers import list_peers
from rlk_repro.bench.references import Accuracy, Truth, check_call, compute_truth, list_references
from rlk_repro.bench.rl_kernel import list_operators
from rlk_repro.integration.measure.libraries import loaded_libraries
from rlk_repro.integration.route.rl_kernel import find_failures
from rlk_repro.refengine.__main__ import LOG_FORMAT, TIME_FORMAT
from rlk_repro.refengine.model import find_dtype
from rlk_repro.rundir.operator_results import OperatorCase, OperatorStatus
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.spec import OperatorsWorkload
from rlk_repro.switches import OPS_DIR

logger = logging.getLogger(__name__)

OOM_WORDS: Final = ("out of memory", "can't allocate memory")
R = TypeVar("R")
Inputs: TypeAlias = CaseTensors | NotMeasuredError


def log_record(event: str, **fields: Any) -> None:
    logger.info("operator %s", dump_json_line({"event": event, **fields}))


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=TIME_FORMAT, stream=sys.stdout)
    return finish(lambda: run(parse_args(argv)))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlk_repro.bench.operators",
        description="Time operators alone, and compare their results with float64 results.",
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, required=True, help="seed of every case's tensors")
    parser.add_argument("--num-rollout", type=int, required=True, help="number of sweeps over all cases")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True, help="cuda also means AMD GPUs")
    parser.add_argument("--suite", type=_parse_suite, required=True, help="the workload of the run, as JSON")
    return parser.parse_args(argv)


def _parse_suite(text: str) -> OperatorsWorkload:
    try:
        return OperatorsWorkload.model_validate_json(text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(f"not a workload: {error}") from None


def run(args: argparse.Namespace) -> None:
    implementations = list_implementations(args.suite)
    device = make_device(args.device)
    cases = expand_grids(args.suite.grids)
    rates = measure_rates(device, (find_dtype(case.dtype) for case in cases if case.hidden_size is not None))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    log_record("device", name=name, bytes_per_s=rates.bytes_per_s, flops_per_s=rates.flops_per_s)
    harness = Harness(args.suite, implementations, device, rates, args.seed)
    for sweep in range(args.num_rollout):
        # the garbage collection before every cell does not visit frozen objects
        gc.collect()
        gc.freeze()
        began = time.perf_counter()
        for case in cases:
            harness.time_case(case, sweep)
        logger.info("perf %d: %s", sweep, {"perf/step_time": time.perf_counter() - began})
        if sweep == 0 and (folder := os.environ.get(OPS_DIR)):
            write_json(TrialDir(Path(folder).parent).libraries_file(0), loaded_libraries())
    for case in cases:
        harness.check_case(case)


def list_implementations(suite: OperatorsWorkload) -> tuple[BenchedImplementation, ...]:
    """Return the implementations of the suite's operators: those that the suite names, or all."""
    operators = {grid.operator for grid in suite.grids}
    known = [item for item in (*list_references(), *list_operators(), *list_peers()) if item.operator in operators]
    menu = ", ".join(dict.fromkeys(item.name for item in known))
    unknown = sorted(set(suite.implementations) - {item.name for item in known})
    if unknown:
        where = "workload.implementations"
        problems = (Problem(where, "no such implementation", got=name, expected=f"any of {menu}") for name in unknown)
        raise SpecError(*problems)
    return tuple(item for item in known if not suite.implementations or item.name in suite.implementations)


class Harness:
    """Runs implementations on cases, and logs one record per implementation and case.

    An error becomes the status of its record, and the other implementations are still measured.
    """

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
        """Log a ``time`` record per implementation; every second sweep runs in reverse order."""
        inputs = self._attempt(partial(self._make_inputs, case))
        order = self._find_implementations(case)
        for implementation in reversed(order) if sweep % 2 else order:
            built = {"kind": implementation.kind.value, "class_name": "", "version": ""}
            timing = self._attempt(partial(self._time, implementation, inputs, built))
            if isinstance(timing, Timing):
                self._passed.add((case, implementation.name))
            log_record(
                "time",
                case=asdict(case),
                implementation=implementation.name,
                sweep=sweep,
                floor_s=find_floor_s(case, self._rates),
                **built,
                **_describe_timing(timing),
            )
            self._release()

    def check_case(self, case: OperatorCase) -> None:
        """Log a ``check`` record for each implementation that was timed on this case."""
        known = self._find_implementations(case)
        implementations = [item for item in known if (case, item.name) in self._passed]
        if not implementations:
            return
        inputs = self._attempt(partial(self._make_inputs, case))
        truth: Truth | NotMeasuredError | None = None
        if isinstance(inputs, CaseTensors):
            truth = self._attempt(partial(compute_truth, inputs, self._suite.oracle_rows))
        for implementation in implementations:
            record = self._check(implementation, inputs, truth)
            log_record("check", case=asdict(case), implementation=implementation.name, **record)
            self._release()

    def _attempt(self, action: Callable[[], R]) -> R | NotMeasuredError:
        """Run ``action`` and return its result, or the error that says why there is none.

        Raises:
            CheckFailed: the device is in an error state, in which every later call would fail.
        """
        try:
            return action()
        except NotMeasuredError as error:
            return error.with_traceback(None)  # a traceback would hold tensors
        except self._errors as error:
            text = f"{type(error).__name__}: {error}"
            has_words = any(words in str(error).lower() for words in OOM_WORDS)
            is_oom = isinstance(error, MemoryError) or has_words
        self._release()
        return NotMeasuredError(OperatorStatus.OOM if is_oom else OperatorStatus.FAILED, text)

    def _release(self) -> None:
        """Free memory, so that every cell starts with an empty allocator."""
        gc.collect()
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            got = shorten_line(str(error))
            raise CheckFailed(Problem("device", "is unusable after this cell", got=got)) from error

    def _find_implementations(self, case: OperatorCase) -> list[BenchedImplementation]:
        return [
            item
            for item in self._implementations
            if item.operator == case.operator and (case.density < 1 or not item.is_sparse)
        ]

    def _make_inputs(self, case: OperatorCase) -> CaseTensors:
        limit_gib, needed = self._suite.memory_limit_gib, estimate_bytes(case)
        if limit_gib is not None and needed > limit_gib * GIB:
            size = format_bytes(needed)
            reason = f"the case needs about {size}; the run's memory limit is {limit_gib:g} GiB"
            raise block(reason)
        made = self._attempt(partial(make_inputs, case, self._device, self._seed))
        if isinstance(made, NotMeasuredError):
            raise NotMeasuredError(made.status, f"inputs: {made}")
        return made

    def _build(self, implementation: BenchedImplementation, inputs: Inputs) -> tuple[Ready, Call]:
        if isinstance(inputs, NotMeasuredError):
            raise inputs
        ready = implementation.build(inputs)
        return ready, make_call(inputs, ready)

    def _time(
        self,
        implementation: BenchedImplementation,
        inputs: Inputs,
        built: dict[str, str],
    ) -> Timing:
        """Time the calls, and write into ``built`` what was built."""
        ready, call = self._build(implementation, inputs)
        built["kind"] = ready.kind.value
        built["class_name"], built["version"] = ready.class_name, ready.version
        warmup, repeats = self._suite.warmup_calls, self._suite.timed_calls
        return measure_calls(call, device=self._device, warmup=warmup, repeats=repeats)

    def _check(
        self,
        implementation: BenchedImplementation,
        inputs: Inputs,
        truth: Truth | NotMeasuredError | None,
    ) -> dict[str, Any]:
        built = self._attempt(partial(self._build, implementation, inputs))
        if isinstance(built, NotMeasuredError):
            return _describe_check(built)
        _, call = built
        check = None
        if isinstance(truth, Truth):
            check = self._attempt(partial(check_call, call, truth))
        record = _describe_check(check)
        kernels = self._attempt(partial(record_kernels, call))
        if not isinstance(kernels, NotMeasuredError):
            record["kernels"] = kernels
        if isinstance(truth, NotMeasuredError):
            record["reason"] = shorten_line(f"not checked: {truth}")
        return record


def _describe_timing(timing: Timing | NotMeasuredError) -> dict[str, Any]:
    if isinstance(timing, Timing):
        return {"status": OperatorStatus.PASSED.value, "reason": "", **asdict(timing)}
    empty = {"samples_s": (), "peak_extra_bytes": None}
    return {"status": timing.status.value, "reason": str(timing), **empty}


def _describe_check(check: Accuracy | NotMeasuredError | None) -> dict[str, Any]:
    """Numbers that are not finite make the status ``failed``."""
    status, reason = OperatorStatus.PASSED, ""
    numbers: dict[str, Any] = {"error": None, "gradient_error": None, "is_repeatable": None}
    if isinstance(check, NotMeasuredError):
        status, reason = check.status, str(check)
    elif check is not None:
        numbers = asdict(check)
        if not all(math.isfinite(value or 0.0) for value in numbers.values()):
            status, reason = OperatorStatus.FAILED, "returned values that are not finite"
    return {"status": status.value, "reason": reason, **numbers, "kernels": ()}


if __name__ == "__main__":
    sys.exit(main())
