"""Profiler traces are searched for secrets before they are packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk_repro.agent.traces import withhold_traces
from rlk_repro.base.secrets import Scrubber

TOKEN = b"hf_" + b"Zz9" * 9


@pytest.mark.parametrize("start", [0, 100, (1 << 20) - 10, (2 << 20) - 1])
def test_a_trace_with_a_secret_is_withheld(tmp_path: Path, start: int) -> None:
    (tmp_path / "a-1.nsys-rep").write_bytes(bytes(start) + TOKEN + bytes(1000))
    clean = tmp_path / "host" / "b-2.pftrace"
    clean.parent.mkdir()
    clean.write_bytes(bytes(range(256)) * 8192)
    (finding,) = withhold_traces(tmp_path, "00-p1-baseline", Scrubber().bytes)
    assert finding.where == "00-p1-baseline: a-1.nsys-rep"
    assert not (tmp_path / "a-1.nsys-rep").exists()
    assert "looks like a secret" in (tmp_path / "a-1.nsys-rep.withheld.txt").read_text()
    assert clean.stat().st_size == 256 * 8192


def test_a_value_of_the_environment_is_found(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"\0\1qW8rTzU1pLk3mN\0\n")
    scrub = Scrubber(["qW8rTzU1pLk3mN"]).bytes
    assert [finding.where for finding in withhold_traces(tmp_path, "t", scrub)] == ["t: trace"]


def test_a_trace_that_no_time_is_left_for_is_withheld(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"nothing")
    (finding,) = withhold_traces(tmp_path, "t", Scrubber().bytes, within_s=-1)
    assert finding.found == "not searched for secrets in time: withheld"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.withheld.txt"]
