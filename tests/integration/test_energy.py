"""The energy of a step, from a stand-in for NVML on the path to what is read back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.integration.measure.energy import EnergyCounter
from rlk_repro.integration.measure.installation import Installation
from rlk_repro.integration.measure.ledger import Ledger, OpsWriter
from rlk_repro.integration.measure.profile import StepProfile
from rlk_repro.integration.route.watch import Watch
from rlk_repro.logs.ops import read_ops
from rlk_repro.rundir.paths import TrialDir

UUID = "GPU-4f71446f-dd45-be62-5d17-363fc230afea"
NVML = f"""
class NVMLError(Exception):
    pass
readings, calls = [], []
def nvmlInit():
    calls.append("init")
def nvmlShutdown():
    calls.append("shutdown")
def nvmlDeviceGetHandleByUUID(uuid):
    if uuid != {UUID!r}:
        raise NVMLError("not found")
    return uuid
def nvmlDeviceGetTotalEnergyConsumption(device):
    value = readings.pop(0)
    if value is None:
        raise NVMLError("not supported")
    return value
"""


@pytest.fixture(autouse=True)
def without_pynvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield
    sys.modules.pop("pynvml", None)


def put_nvml(folder: Path, monkeypatch: pytest.MonkeyPatch, *readings: int | None, text: str = NVML) -> None:
    """The module ``pynvml`` on the path; its counter gives these millijoules, None is a refusal."""
    (folder / "pynvml.py").write_text(f"{text}\nreadings += {list(readings)}\n")
    monkeypatch.syspath_prepend(folder)


def run_steps(folder: Path, num_steps: int) -> dict[int, float]:
    ledger = Ledger(OpsWriter(folder / "ops", 0), ops=(), own="loss", is_fallback_allowed=False)
    with Installation(StepProfile("cpu"), ledger, Watch(), None, energy=EnergyCounter.open(UUID)) as installation:
        for step in range(num_steps):
            installation.end_step(step)
    return {step: sample.value for step, sample in read_ops(TrialDir(folder)).energy.items()}


def test_a_step_records_the_energy_since_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvml(tmp_path, monkeypatch, 1_000, 251_500, 251_500, 900_000)
    assert run_steps(tmp_path, 3) == {0: 250.5, 1: 0.0, 2: 648.5}
    assert sys.modules["pynvml"].calls == ["init", "shutdown"]


def test_without_the_package_the_device_or_the_counter_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert EnergyCounter.open(UUID) is None
    assert run_steps(tmp_path, 1) == {}
    assert '"energy_j"' not in (tmp_path / "ops" / "0.jsonl").read_text()
    monkeypatch.delitem(sys.modules, "pynvml")
    put_nvml(tmp_path, monkeypatch)
    assert EnergyCounter.open("GPU-another") is None
    del sys.modules["pynvml"].nvmlDeviceGetTotalEnergyConsumption
    (tmp_path / "again").mkdir()
    assert run_steps(tmp_path / "again", 2) == {}
