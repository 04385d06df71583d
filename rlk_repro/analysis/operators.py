"""Read the results of an operator run: one result for each implementation in each case, over all processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from rlk_repro.analysis.measured import Measured, Records
from rlk_repro.logs.operators import CellKey, OperatorLog, OracleCheck, Time, parse_operators
from rlk_repro.rundir.operator_results import REFERENCE, OperatorKind, OperatorResult, OperatorStatus, OperatorTrial
from rlk_repro.rundir.results import TrialResult

BANDWIDTH: Final = "memory bandwidth, measured"


NOTHING_COMPARED: Final = (
    "operators are measured one by one: no variants are compared, and nothing is said about a trainer's speed"
)


def read(records: Records) -> Measured:
    plan = records.plan
    if plan.run.workload.has_variants:
        return Measured()
    folders = [records.run_dir.trial(trial.name) for trial in plan.trials]
    logs = {folder.name: parse_operators(folder.stdout) for folder in folders if folder.stdout.is_file()}
    warmup = plan.run.measure.warmup_steps
    trials = {name: dict(_read_trial(name, log, warmup)) for name, log in logs.items()}
    keys = dict.fromkeys(key for log in logs.values() for key in log.times)
    results = tuple(_make_result(key, logs, trials) for key in keys)
    return Measured(
        keys={"operators": results, "trials": tuple(_add_rejects(records.trials, logs))},
        facts=dict(_find_facts(logs.values())),
        headline=NOTHING_COMPARED,
        reasons=records.failures,
    )


def _add_rejects(trials: Iterable[TrialResult], logs: Mapping[str, OperatorLog]) -> Iterator[TrialResult]:
    for trial in trials:
        rejects = logs[trial.name].num_rejects if trial.name in logs else {}
        found = {f"operators: {reason}": number for reason, number in rejects.items()}
        yield replace(trial, rejects={**trial.rejects, **found})


def _read_trial(name: str, log: OperatorLog, warmup: int) -> Iterator[tuple[CellKey, OperatorTrial]]:
    scored = {
        key: [record for sweep, record in sorted(sweeps.items()) if sweep >= warmup]
        for key, sweeps in log.times.items()
    }
    medians = {key: _find_median(records) for key, records in scored.items()}
    for key, records in scored.items():
        check = log.checks.get(key)
        status, reason = _find_status([record for _, record in records], check)
        first_line = min(line for line, _ in log.times[key].values())
        yield key, _make_trial(name, status, reason, records, medians.get((key[0], REFERENCE)), first_line)


def _find_median(records: Sequence[tuple[int, Time]]) -> float | None:
    samples = [sample for _, record in records for sample in record.samples_s]
    return statistics.median(samples) if samples else None


def _find_status(records: Sequence[Time], check: OracleCheck | None) -> tuple[OperatorStatus, str]:
    if not records:
        return OperatorStatus.FAILED, "the process ended before a scored sweep"
    for record in [*records, check]:
        if record is not None and record.status is not OperatorStatus.PASSED:
            return record.status, record.reason
    if not all(record.samples_s for record in records):
        return OperatorStatus.FAILED, "a scored sweep recorded no time"
    return OperatorStatus.PASSED, "" if check is None else check.reason


def _make_trial(
    name: str,
    status: OperatorStatus,
    reason: str,
    records: Sequence[tuple[int, Time]],
    reference_s: float | None,
    line: int,
) -> OperatorTrial:
    if status is not OperatorStatus.PASSED:
        return OperatorTrial(
            trial=name, status=status, reason=reason, num_calls=0, median_s=None, minimum_s=None, maximum_s=None,
            mad_s=None, peak_extra_bytes=None, speedup=None, floor_fraction=None, line=line,
        )  # fmt: skip
    samples = [sample for _, record in records for sample in record.samples_s]
    peaks = [record.peak_extra_bytes for _, record in records if record.peak_extra_bytes is not None]
    floor_s = records[0][1].floor_s
    median = statistics.median(samples)
    return OperatorTrial(
        trial=name,
        status=status,
        reason=reason,
        num_calls=len(samples),
        median_s=median,
        minimum_s=min(samples),
        maximum_s=max(samples),
        mad_s=statistics.median(abs(sample - median) for sample in samples),
        peak_extra_bytes=max(peaks, default=None),
        speedup=None if reference_s is None else reference_s / median,
        floor_fraction=None if floor_s is None else floor_s / median,
        line=line,
    )


def _make_result(
    key: CellKey, logs: Mapping[str, OperatorLog], trials: Mapping[str, Mapping[CellKey, OperatorTrial]]
) -> OperatorResult:
    times = [record for log in logs.values() for _, record in log.times.get(key, {}).values()]
    checks = [log.checks[key] for log in logs.values() if key in log.checks]
    found = tuple(cells[key] for cells in trials.values() if key in cells)
    medians = [trial.median_s for trial in found if trial.median_s is not None]
    resolved = [time for time in times if time.class_name] or times
    return OperatorResult(
        case=key[0],
        implementation=key[1],
        kind=_find_kind(resolved),
        class_name=" | ".join(dict.fromkeys(time.class_name for time in resolved)),
        version=" | ".join(dict.fromkeys(time.version for time in resolved)),
        kernels=tuple(dict.fromkeys(name for check in checks for name in check.kernels)),
        error=max((check.error for check in checks if check.error is not None), default=None),
        gradient_error=max(
            (check.gradient_error for check in checks if check.gradient_error is not None), default=None
        ),
        is_repeatable=all(check.is_repeatable for check in checks) if checks else None,
        process_spread=max(medians) / min(medians) - 1 if len(medians) > 1 else None,
        trials=found,
    )


def _find_kind(times: Iterable[Time]) -> OperatorKind:
    kinds = {time.kind for time in times}
    order = (OperatorKind.NATIVE, OperatorKind.UNRESOLVED, OperatorKind.FUSED, OperatorKind.PEER, OperatorKind.TRAINER)
    return next(kind for kind in order if kind in kinds)


def _find_facts(logs: Iterable[OperatorLog]) -> Iterator[tuple[str, str]]:
    devices = [log.device for log in logs if log.device is not None]
    if devices:
        yield BANDWIDTH, _show_rates([device.bytes_per_s for device in devices], "B/s")
    for dtype in dict.fromkeys(name for device in devices for name in device.flops_per_s):
        rates = [device.flops_per_s[dtype] for device in devices if dtype in device.flops_per_s]
        yield f"{dtype} matrix product, measured", _show_rates(rates, "FLOP/s")


def _show_rates(rates: Sequence[float], unit: str) -> str:
    """Return a range like ``4.31 – 4.33 TB/s``."""
    prefix, scale = ("T", 1e12) if max(rates) >= 1e12 else ("G", 1e9)
    ends = dict.fromkeys(f"{rate / scale:.3g}" for rate in (min(rates), max(rates)))
    return f"{' – '.join(ends)} {prefix}{unit}"
