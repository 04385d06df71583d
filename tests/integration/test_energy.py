"""The energy of a step, from a stand-in for NVML on the path to what is read back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.checks import check_pair
from rlk_repro.integration.measure.energy import EnergyCounter
from rlk_repro.integration.measure.engines import EngineRecord
from rlk_repro.integration.measure.installation import Installation
from rlk_repro.integration.measure.ledger import Ledger, OpsWriter
from rlk_repro.integration.measure.profile import StepProfile
from rlk_repro.integration.route.watch import Watch
from rlk_repro.integration.vime_rollout import RolloutServer
from rlk_repro.logs.engines import read_engines
from rlk_repro.logs.ops import read_ops
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord
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


# vLLM's log-prob of one token, with an empty and with a filled prefix cache.


BLOCK = 4
SAMPLES = [(list(range(10, 10 + length)), 3) for length in (4, 6, 9)]


class CachingServer(RolloutServer):
    """Answers as vLLM does: whole blocks of a prefix are cached by salt, and the sampled token comes first."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self.error, self.seen = error, set[tuple[str, int]]()

    def generate(self, tokens: Sequence[int], wanted: dict[str, Any], **more: str) -> Any:
        assert wanted["logprobs"] == len(wanted["logprob_token_ids"])
        key = (more["cache_salt"], len(tokens))
        cached = (len(tokens) - 1) // BLOCK * BLOCK if key in self.seen else 0
        self.seen.add(key)
        values = {99: -9.0, wanted["logprob_token_ids"][0]: -len(tokens) / 7 - (self.error if cached else 0)}
        listed = [{"token": f"token_id:{token}", "logprob": value} for token, value in values.items()]
        return {
            "choices": [{"logprobs": {"content": [{"top_logprobs": listed[: wanted["logprobs"]]}]}}],
            "usage": {"prompt_tokens_details": self.tell(cached)},
        }

    def tell(self, cached: int) -> Any:
        return {"cached_tokens": cached}


def compare(folder: Path, server: RolloutServer) -> list[AgreementCheck]:
    record = EngineRecord(TrialDir(folder).engines, 0)
    inputs = [{"tokens": tokens, "loss_mask": [1] * num, "padding": 0} for tokens, num in SAMPLES]
    record.write_inputs(0, "rollout", inputs)
    record.write_log_probs(0, "rollout, generated", "", "bfloat16", [])
    server.record_prefixes(record, 0, "bfloat16", SAMPLES)
    record.close()
    log = read_engines(TrialDir(folder))
    checks = check_pair("p1", [("baseline", log), ("enabled", log)])
    return [item for item in checks if item.kind is CheckKind.INVARIANCE and item.variant == "baseline"]


def test_a_cached_prefix_that_changes_nothing_is_bitwise_equal(tmp_path: Path) -> None:
    (check,) = compare(tmp_path, CachingServer())
    assert (check.first, check.second) == ("rollout, generated", "prefix cache")
    # a prefix of 3 tokens fills no block
    assert (check.word, check.found, check.num) == (CheckWord.PASS, "bitwise", 2)


def test_a_cached_prefix_that_changes_a_log_prob_is_found_with_its_token(tmp_path: Path) -> None:
    (check,) = compare(tmp_path, CachingServer(error=0.5))
    assert (check.word, check.num_unequal) == (CheckWord.FAIL, 2)
    assert check.found == "largest 0.5 at sample 1, position 2 of its response, token 15"
