from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.logs.telemetry import Telemetry, find_throttled, parse_telemetry
from tests import TESTS

ASSET = TESTS / "assets" / "logs" / "telemetry.jsonl"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("node") / "telemetry.jsonl"


def parse(path: Path, *lines: bytes) -> Telemetry:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return parse_telemetry(path)


def sample(trial: str | None = "a", **fields: object) -> bytes:
    return json.dumps({"t": 1.5, "trial": trial, **fields}).encode()


def throttle(*reasons: str) -> bytes:
    return sample(gpus=[{"index": 0, "throttle_reasons": list(reasons)}])


def test_samples_are_counted_per_trial():
    telemetry = parse_telemetry(ASSET)
    assert telemetry.trials == {
        "00-1-baseline": {True: 1, False: 1},
        "01-1-enabled": {},
    }


def test_rejects_are_counted_by_reason():
    telemetry = parse_telemetry(ASSET)
    assert telemetry.reject_counts == {"not JSON": 1, "not a sample": 2, "the last line is cut off": 1}


@pytest.mark.parametrize(
    ("reason", "is_throttled"),
    [
        ("hw_slowdown", True),
        ("hw_thermal_slowdown", True),
        ("SwThermalSlowdown", True),
        ("hw_power_brake_slowdown", True),
        ("PROCHOT", True),
        ("active_hbm_thrm", True),
        ("sw_power_cap", False),
        ("gpu_idle", False),
        ("applications_clocks_setting", False),
    ],
)
def test_only_protection_of_the_hardware_counts_as_throttled(path, reason, is_throttled):
    telemetry = parse(path, throttle("sw_power_cap", reason), throttle())
    assert find_throttled([telemetry]) == {"a": 0.5 if is_throttled else 0.0}


def test_nodes_are_merged_by_trial_and_a_fraction_that_no_sample_tells_is_absent(path):
    one = parse(path, sample(rss_bytes=5), throttle("hw_slowdown"))
    two = parse(path, sample(rss_bytes=7), throttle(), throttle(), throttle(), sample("b"))
    assert find_throttled([one, two]) == {"a": 0.25}


def test_a_missing_file_is_an_error_of_the_bundle(tmp_path):
    with pytest.raises(BundleUnreadable) as caught:
        parse_telemetry(tmp_path / "telemetry.jsonl")
    assert str(caught.value) == f"{tmp_path / 'telemetry.jsonl'}: not readable (No such file or directory)"


amounts = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | st.text(max_size=3)
devices = st.fixed_dictionaries({}, optional={"memory_used_bytes": amounts, "throttle_reasons": st.lists(amounts)})
samples = st.fixed_dictionaries(
    {"t": amounts, "trial": amounts}, optional={"rss_bytes": amounts, "gpus": st.lists(devices | amounts) | amounts}
)
lines = st.binary() | samples.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000)


@given(st.lists(lines, max_size=5))
def test_no_bytes_make_the_reader_fail(path, content):
    path.write_bytes(b"\n".join(content))
    telemetry = parse_telemetry(path)
    assert len(telemetry.trials) + sum(telemetry.reject_counts.values()) <= max(1, len(content)) + sum(
        line.count(b"\n") for line in content
    )
