"""Libraries are recorded as loaded; what cannot be learnt says why."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlk_repro.base import proc
from rlk_repro.integration.measure.energy import EnergyCounter
from rlk_repro.integration.measure.installation import Installation
from rlk_repro.integration.measure.ledger import Ledger, OpsWriter
from rlk_repro.integration.measure.libraries import loaded_libraries, parse_transport, read_transport
from rlk_repro.integration.measure.profile import HostClock, HostMemory, StepProfile, Timers
from rlk_repro.integration.reward import share_of_even_ids
from rlk_repro.integration.route.watch import Watch
from rlk_repro.integration.switch import Settings, install_into
from rlk_repro.logs.ops import read_ops
from rlk_repro.operators import Case
from rlk_repro.rundir.paths import TrialDir
from tests import ROOT
from tests.support.loss_examples import load_loss_module, make_args, train_once


def test_every_fact_is_a_value_or_unknown_with_a_reason() -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert value
            assert "unknown" not in value or value["unknown"]
            for item in value.values():
                check(item)
        else:
            assert value is not None
            assert value != ""

    facts = loaded_libraries()
    check(facts)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__
    assert facts["num_threads"] == torch.get_num_threads()


def test_the_collectives_library_is_hashed_where_it_is_mapped(tmp_path: Path) -> None:
    library = tmp_path / "nccl lib" / "libnccl.so.2"
    library.parent.mkdir()
    library.write_bytes(b"nccl")
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 08:01 42                         {library}\n"
        f"7f01-7f02 rw-p 00001000 08:01 42                         {library}\n"
        "7f02-7f03 r-xp 00000000 08:01 43                         /usr/lib/libc.so.6\n"
        "7ffd-7ffe rw-p 00000000 00:00 0                          [stack]\n"
    )
    assert loaded_libraries(maps)["nccl_file"] == [
        {"path": "libnccl.so.2", "sha256": hashlib.sha256(b"nccl").hexdigest()}
    ]
    library.unlink()
    assert loaded_libraries(maps)["nccl_file"] == {"unknown": "No such file or directory"}
    maps.write_text("")
    assert loaded_libraries(maps)["nccl_file"] == {"unknown": "not loaded"}


# NCCL's transport, from logs as NCCL writes them.

HEAD = "n1:41:77 [3] NCCL INFO"
FABRIC = f"""\
{HEAD} NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:192.0.2.1<0>
{HEAD} Using network IB
{HEAD} MNNVL 1 cliqueId 7fc cliqueSize 8 cliqueRank 3
{HEAD} NVLS comm 0x55d nHeads 8
{HEAD} Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/0(3)/GDRDMA
{HEAD} Channel 01/0 : 3[3] -> 8[0] [send] via NET/IB/4/GDRDMA
{HEAD} Channel 00/0 : 3[3] -> 2[2] via P2P/CUMEM/read
"""
TCP = f"""\
{HEAD} NCCL_IB_DISABLE set by environment to 1.
{HEAD} NET/Socket : Using [0]eth0:192.0.2.1<0>
{HEAD} Assigned NET plugin Socket to comm
{HEAD} Using network Socket
{HEAD} MNNVL 0 cliqueId 0
{HEAD} Channel 00/0 : 3[3] -> 8[0] [send] via NET/Socket/0
"""


def test_the_fabric_and_nvlink_s_offloads_are_told_without_numbers_of_devices() -> None:
    assert parse_transport(FABRIC) == {
        "network": "IB", "paths": ["NET/IB/GDRDMA", "P2P/CUMEM/read"], "nvls": True, "mnnvl": True,
    }  # fmt: skip


def test_tcp_is_named() -> None:
    assert parse_transport(TCP) == {"network": "Socket", "paths": ["NET/Socket"], "nvls": False, "mnnvl": False}


def test_each_process_reads_the_log_of_its_own(tmp_path: Path) -> None:
    env = {"NCCL_DEBUG_FILE": f"{tmp_path}/.partial-nccl-%h-%p.log"}
    assert read_transport(env) == {"unknown": "NCCL has written no log"}
    assert read_transport({}) == {"unknown": "NCCL_DEBUG_FILE is not set"}
    host = socket.gethostname().partition(".")[0]
    (tmp_path / f".partial-nccl-{host}-{os.getpid()}.log").write_text(TCP)
    assert read_transport(env)["network"] == "Socket"


# The process that runs vime's train.py: which one it finds, what that one is told, and what stops it before.

REPOSITORY = ROOT
SCRIPT = """\
import json, os, sys
import helper
if __name__ == "__main__":
    print(json.dumps({"argv": sys.argv, "first": sys.path[0], "helper": helper.VALUE}))
    sys.exit(int(sys.argv[sys.argv.index("--code") + 1]) if "--code" in sys.argv else 0)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What vime's checkout looks like from outside."""
    folder = tmp_path / "a vime"
    (folder / "vime").mkdir(parents=True)
    (folder / "vime" / "__init__.py").touch()
    (folder / "helper.py").write_text("VALUE = 7\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def start(folder: Path, *argv: str) -> proc.Completed:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
    return proc.run([sys.executable, "-m", "rlk_repro.integration.start_vime", *argv], env=env, cwd=folder.parent)


def test_train_py_runs_as_a_script_of_its_own_folder(checkout: Path) -> None:
    done = start(checkout, "--num-rollout", "3")
    assert done.is_ok, done.stderr
    said = json.loads(done.stdout)
    assert said == {"argv": [str(checkout / "train.py"), "--num-rollout", "3"], "first": str(checkout), "helper": 7}
    assert start(checkout, "--code", "9").returncode == 9


def test_a_missing_rollout_stops_it(checkout: Path) -> None:
    template = checkout / "{rollout_id}.pt"
    (checkout / "0.pt").write_bytes(b"x")
    done = start(checkout, "--num-rollout", "2", "--load-forge-rollout-data", str(template))
    assert (done.returncode, done.stdout) == (1, "")
    assert "--load-forge-rollout-data: 1 of 2 stored rollouts are missing or empty" in done.stderr


@pytest.mark.parametrize(("tokens", "length", "reward"), [([1, 2, 4, 5, 6], 4, 0.75), ([1, 2], 0, 0.0), ([2], 1, 1.0)])
def test_the_reward_of_random_weights(tokens: list[int], length: int, reward: float) -> None:
    class Sample:
        def __init__(self) -> None:
            self.tokens, self.response_length = tokens, length

    assert asyncio.run(share_of_even_ids(None, Sample())) == reward


# Timers change nothing that is computed, count what they say, and cost little.


TIMERS = Timers("forward", "backward", "no_grad")
PARTS = ("log_probs", "clip_kl", "grpo_loss")


class Ticks(HostClock):
    """A clock that counts how often it was looked at."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now


def make_profile(*, is_counting: bool = False) -> StepProfile:
    profile = StepProfile("cpu")
    if is_counting:
        profile._clock = Ticks()
    return profile


def end_step(profile: StepProfile) -> dict[str, float]:
    timers, _ = profile.end_step()
    assert timers.pop("step") > 0
    return timers


@pytest.mark.parametrize("changes", [{"use_kl_loss": False}, {"entropy_coef": 0.01, "rollout_temperature": 0.7}])
def test_values_and_gradients_are_bitwise_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    module, args = load_loss_module(), make_args(**changes)
    expected = train_once(module, args)
    settings = Settings(ops_dir=tmp_path / "ops")
    with install_into(module, settings, trainer="example", case=Case(platform="cpu")):
        found = train_once(module, args)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_loss_contains_its_parts_forward_and_backward() -> None:
    module = load_loss_module()
    with install_into(module, Settings(), trainer="example", case=Case(platform="cpu")) as installation:
        for _ in range(2):
            train_once(module, make_args(), num_microbatches=3)
            timers = end_step(installation.profile)
            names = {f"{part}_{way}" for part in PARTS for way in ("forward", "backward")}
            assert set(timers) == {*names, "log_probs_no_grad"}
            assert all(seconds > 0 for seconds in timers.values())
            for way in ("forward", "backward"):
                inner = timers[f"log_probs_{way}"] + timers[f"clip_kl_{way}"]
                assert timers[f"grpo_loss_{way}"] > inner


def test_nested_passes_are_marked_in_the_order_of_the_chain_rule() -> None:
    profile = make_profile(is_counting=True)
    inner = profile.time_function(lambda x: x * 2, Timers("inner_forward", "inner_backward"))
    outer = profile.time_function(lambda x: inner(x + 1).exp(), Timers("outer_forward", "outer_backward"))
    outer(torch.ones(2, requires_grad=True)).sum().backward()
    # outer begins 1, inner 2 and 3, outer ends 4; backward outer 5, inner 6 and 7, outer 8
    assert end_step(profile) == {
        "outer_forward": 3.0,
        "inner_forward": 1.0,
        "outer_backward": 3.0,
        "inner_backward": 1.0,
    }


def test_a_call_without_gradient_has_a_timer_of_its_own() -> None:
    profile = make_profile(is_counting=True)
    double = profile.time_function(lambda x: x * 2, TIMERS)
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not double(weight).requires_grad
    double(torch.ones(2))
    assert end_step(profile) == {"no_grad": 2.0}
    plain = profile.time_function(lambda: 7, Timers("optimizer"))
    assert plain() == 7
    assert end_step(profile) == {"optimizer": 1.0}


class FakeMemory:
    """Peaks that are handed in, in the order they are read; the last one stays."""

    is_per_step = True

    def __init__(self, *peaks: int) -> None:
        self.peaks = list(peaks)

    def reset(self) -> None:
        pass

    def read_peaks(self) -> dict[str, int]:
        return {"peak": self.peaks.pop(0) if len(self.peaks) > 1 else self.peaks[0]}


def test_a_phase_has_a_peak_of_its_own_and_the_step_has_the_largest() -> None:
    profile = make_profile()
    profile._memory = FakeMemory(3, 9, 1, 4, 2)  # type: ignore[assignment]
    with profile.phase("forward_only"):
        pass
    with profile.phase("update"):
        pass
    assert profile.end_step()[1] == {"peak": 9, "peak_in_forward_only": 9, "peak_in_update": 4}
    assert profile.end_step()[1] == {"peak": 2}


def test_peak_memory_is_that_of_the_step() -> None:
    memory = HostMemory()
    memory.reset()
    if not memory.is_per_step:
        pytest.skip("this kernel does not let a process reset its peak")
    block = torch.ones(16 << 20)
    peak = memory.read_peaks()["peak_rss_bytes"]
    del block
    memory.reset()
    assert memory.read_peaks()["peak_rss_bytes"] < peak - (32 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_on_a_gpu_timers_are_device_time_and_peaks_are_the_allocator_s() -> None:
    profile = StepProfile("cuda")
    multiply = profile.time_function(lambda x, y: x @ y, TIMERS)
    leaf = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    for _ in range(2):
        for _ in range(5):
            multiply(leaf, leaf.detach()).sum().backward()
        began = time.perf_counter()
        timers, memory = profile.end_step()
        assert timers["forward"] + timers["backward"] < timers["step"] + time.perf_counter() - began
        assert timers["forward"] > 0
        assert timers["backward"] > 0
        assert memory["peak_reserved_bytes"] >= memory["peak_allocated_bytes"] >= 3 * 4096 * 4096 * 4


# The energy of a step, from a stand-in for NVML to what is read back.

UUID = "GPU-4f71446f-dd45-be62-5d17-363fc230afea"


class Nvml(ModuleType):
    """NVML with one device, whose counter gives these millijoules; None is a refusal."""

    class NVMLError(Exception):
        pass

    def __init__(self, *readings: int | None) -> None:
        super().__init__("pynvml")
        self.readings, self.is_open = list(readings), False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, _: str) -> int:
        value = self.readings.pop(0)
        if value is None:
            raise self.NVMLError("not supported")
        return value


@pytest.mark.parametrize(
    ("readings", "expected"),
    [((1_000, 251_500, 251_500, 900_000), {0: 250.5, 1: 0.0, 2: 648.5}), ((None, 7, None, 9), {}), (None, {})],
)
def test_a_step_records_the_energy_since_the_last_one(
    readings: Any, expected: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = None if readings is None else Nvml(*readings)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert EnergyCounter.open("GPU-another") is None
    ledger = Ledger(OpsWriter(tmp_path / "ops", 0), ops=(), own="loss", is_fallback_allowed=False)
    energy = EnergyCounter.open(UUID)
    with Installation(StepProfile("cpu"), ledger, Watch(), None, energy=energy) as installation:
        for step in range(3):
            installation.end_step(step)
    found = read_ops(TrialDir(tmp_path)).energy
    assert {step: sample.value for step, sample in found.items()} == expected
    assert nvml is None or not nvml.is_open
