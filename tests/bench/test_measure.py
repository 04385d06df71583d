"""What a timing consists of, on a CPU and, where there is one, on a device."""

from __future__ import annotations

import gc
import statistics

import pytest
import torch

from rlk_repro.bench.measure import measure_calls, measure_rates, record_kernels

CPU = torch.device("cpu")


def test_every_timed_call_is_a_sample_and_no_warm_up_is() -> None:
    calls: list[None] = []
    timing = measure_calls(lambda: calls.append(None), device=CPU, warmup=3, repeats=5)
    assert len(calls) == 8
    assert len(timing.samples_s) == 5
    assert all(sample > 0 for sample in timing.samples_s)


def test_a_cpu_keeps_no_count_of_extra_memory() -> None:
    assert measure_calls(int, device=CPU, warmup=0, repeats=1).peak_extra_bytes is None


@pytest.mark.parametrize("was_collecting", [True, False])
def test_garbage_collection_waits_and_is_as_it_was_afterwards(was_collecting: bool) -> None:
    seen: list[bool] = []
    (gc.enable if was_collecting else gc.disable)()
    try:
        measure_calls(lambda: seen.append(gc.isenabled()), device=CPU, warmup=0, repeats=2)
        assert gc.isenabled() is was_collecting
    finally:
        gc.enable()
    assert seen == [False, False]


@pytest.mark.gpu
def test_on_a_device_time_memory_and_kernels_are_the_device_s() -> None:
    device = torch.device("cuda")
    source = torch.ones(1 << 26, device=device)
    timing = measure_calls(lambda: source * 2, device=device, warmup=2, repeats=3)
    assert timing.peak_extra_bytes is not None
    assert 1 << 28 <= timing.peak_extra_bytes < 1 << 29
    bandwidth = 2 * (1 << 28) / statistics.median(timing.samples_s)
    assert bandwidth < 2 * measure_rates(device, []).bytes_per_s
    assert any("mul" in name.lower() for name in record_kernels(lambda: source * 2))
