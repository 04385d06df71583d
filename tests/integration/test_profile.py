"""Timers change nothing that is computed, count what they say, and cost little."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.integration.measure.profile import HostClock, HostMemory, StepProfile, Timers
from rlk_repro.integration.switch import Settings, install_into
from rlk_repro.operators import Case
from tests.support.loss_examples import load_loss_module, make_args, train_once

TIMERS = Timers("forward", "backward", "no_grad")


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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"entropy_coef": 0.01},
        {"use_kl_loss": False},
        {"kl_loss_type": "k1", "rollout_temperature": 0.7},
        {"log_probs_chunk_size": 3},
    ],
)
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
            assert set(timers) == {
                "log_probs_forward",
                "log_probs_backward",
                "log_probs_no_grad",
                "clip_kl_forward",
                "clip_kl_backward",
                "grpo_loss_forward",
                "grpo_loss_backward",
            }
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
