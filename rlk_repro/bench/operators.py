"""Run every case of a suite with every implementation and print log lines: ``python -m rlk_repro.bench.operators``.

A sweep times every implementation on every case; values are checked and kernels listed after the last sweep.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError

from rlk_repro.base.errors import Problem, SpecError, finish
from rlk_repro.base.files import write_json
from rlk_repro.bench.cases import expand_grids
from rlk_repro.bench.harness import Harness, log_record
from rlk_repro.bench.implementation import BenchedImplementation
from rlk_repro.bench.measure import make_device, measure_rates
from rlk_repro.bench.peers import list_peers
from rlk_repro.bench.references import list_references
from rlk_repro.bench.rl_kernel import list_operators
from rlk_repro.integration.measure.libraries import loaded_libraries
from rlk_repro.refengine.__main__ import LOG_FORMAT, TIME_FORMAT
from rlk_repro.refengine.model import find_dtype
from rlk_repro.rundir.paths import libraries_file
from rlk_repro.spec import OperatorsWorkload
from rlk_repro.switches import LIBRARIES_DIR

logger = logging.getLogger(__name__)


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
        if sweep == 0 and (folder := os.environ.get(LIBRARIES_DIR)):
            write_json(libraries_file(Path(folder), 0), loaded_libraries())
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


if __name__ == "__main__":
    sys.exit(main())
