"""Operator records are read from a log, and no line crashes the reader."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import dump_json_line
from rlk_repro.logs.operators import OperatorLog, parse_operators
from rlk_repro.rundir.operator_results import OperatorKind, OperatorStatus

PREFIX = "[2026-11-20 16:00:00] harness.py:60 - operator "
STAMP = "2026-11-20T16:00:00.123Z "
CASE: dict[str, Any] = {
    "operator": "logp",
    "num_tokens": 9216,
    "vocab_size": 151936,
    "hidden_size": None,
    "dtype": "float32",
    "density": 1.0,
    "work": "forward",
}
TIME: dict[str, Any] = {
    "event": "time",
    "case": CASE,
    "implementation": "rl-kernel-online",
    "sweep": 0,
    "kind": "fused",
    "class_name": "FusedLogpGenericOp.online_fp32",
    "version": "0.1.0",
    "status": "pass",
    "reason": "",
    "samples_s": [0.0017, 0.0018],
    "peak_extra_bytes": 0,
    "floor_s": 0.0013,
}
CHECK: dict[str, Any] = {
    "event": "check",
    "case": CASE,
    "implementation": "rl-kernel-online",
    "status": "pass",
    "reason": "",
    "error": 1.7e-6,
    "gradient_error": None,
    "is_repeatable": True,
    "kernels": ["void online<float>(float const*)"],
}
DEVICE: dict[str, Any] = {"event": "device", "name": "NVIDIA H200", "bytes_per_s": 4.3e12, "flops_per_s": {}}


def read(*lines: str | bytes) -> OperatorLog:
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n"
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return parse_operators(Path(file.name))


def record(value: dict[str, Any], **changes: Any) -> str:
    return PREFIX + dump_json_line(value | changes)


def test_records_are_read_by_cell_and_sweep_with_their_lines() -> None:
    log = read(record(DEVICE), "chatter", STAMP + record(TIME), record(TIME, sweep=1), record(CHECK))
    assert log.num_rejects == {}
    assert log.device is not None
    assert log.device.bytes_per_s == 4.3e12
    ((case, name),) = log.times
    assert (case.vocab_size, case.hidden_size, name) == (151936, None, "rl-kernel-online")
    lines = {sweep: line for sweep, (line, _) in log.times[case, name].items()}
    assert lines == {0: 3, 1: 4}
    first = log.times[case, name][0][1]
    assert (first.kind, first.status, first.samples_s) == (OperatorKind.FUSED, OperatorStatus.PASSED, (0.0017, 0.0018))
    check = log.checks[case, name]
    assert (check.error, check.is_repeatable) == (1.7e-6, True)


def test_a_record_that_comes_again_is_refused_and_the_first_stays() -> None:
    log = read(record(DEVICE), record(DEVICE, bytes_per_s=9e12), record(TIME), record(TIME, samples_s=[1.0]),
               record(CHECK), record(CHECK, error=0.0))  # fmt: skip
    assert log.num_rejects == {"the same record was read before": 3}
    assert log.device is not None
    assert log.device.bytes_per_s == 4.3e12


def test_a_check_counts_only_for_a_timed_cell() -> None:
    assert read(record(CHECK)).num_rejects == {"a check of a cell that was never timed": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_s": [-1.0]},
        {"samples_s": [1e300]},
        {"samples_s": "fast"},
        {"sweep": "0"},
        {"sweep": -1},
        {"implementation": "<script>"},
        {"class_name": "x" * 401},
        {"kind": "fastest"},
        {"case": CASE | {"density": 0}},
        {"event": "victory"},
    ],
)
def test_an_invalid_record_is_refused(changes: dict[str, Any]) -> None:
    log = read("chatter", PREFIX + json.dumps(TIME | changes))
    assert log.num_rejects == {"not an operator record": 1}
    assert log.times == {}


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BundleUnreadable) as caught:
        parse_operators(tmp_path / "stdout.log")
    assert str(caught.value) == f"{tmp_path}/stdout.log: not readable (No such file or directory)"


@given(st.lists(st.one_of(st.binary(max_size=200), st.binary(max_size=80).map(PREFIX.encode().__add__)), max_size=8))
def test_no_bytes_crash_the_log_reader(lines: list[bytes]) -> None:
    log = read(*lines, b"", record(TIME))
    assert len(log.times) == 1


@given(st.integers(0, 400), st.binary(min_size=1, max_size=6))
def test_a_damaged_record_is_read_or_refused_without_a_crash(place: int, junk: bytes) -> None:
    whole = record(TIME).encode()
    place = len(PREFIX) + place % (len(whole) - len(PREFIX))
    log = read(whole[:place] + junk + whole[place + len(junk) :], record(TIME, implementation="other"))
    assert len(log.times) + sum(log.num_rejects.values()) >= 1
    assert any(name == "other" for _, name in log.times)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=10),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=10,
    ),
    st.sampled_from(sorted(TIME)),
)
def test_no_value_of_a_field_crashes_the_log_reader(value: Any, name: str) -> None:
    log = read(PREFIX + json.dumps(TIME | {name: value}), record(TIME, sweep=7))
    assert any(7 in sweeps for sweeps in log.times.values())
