"""Random batches: the same for equal keys, shaped as vime packs them, and with the log-probs that they claim."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from rlk_repro.bench.batches import BatchShape, LogitsBatch, make_microbatch, split_tokens
from rlk_repro.bench.measure import measure_calls, measure_rates, record_kernels
from rlk_repro.refengine.core import cut_responses

CPU = torch.device("cpu")
SHAPE = BatchShape(num_samples=5, num_tokens=300, prompt_fraction=0.25, vocab_size=200)


@pytest.fixture(autouse=True, scope="module")
def group_of_one() -> Iterator[None]:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def make(*key: int, **changes: Any) -> LogitsBatch:
    return make_microbatch(BatchShape(**{**vars(SHAPE), **changes}), CPU, *key)


def find_log_probs(microbatch: LogitsBatch, temperature: float) -> torch.Tensor:
    """Of the response tokens, straight from the definition."""
    batch = microbatch.batch
    rows = (microbatch.logits[0].detach().double() / temperature).log_softmax(-1)
    targets = torch.cat(batch["unconcat_tokens"]).roll(-1)
    selected = rows.gather(1, targets.unsqueeze(1)).squeeze(1)
    return torch.cat(cut_responses(selected, batch))


def test_a_key_gives_the_same_bytes_and_another_key_others() -> None:
    one, same, other = make(1, 2, 3), make(1, 2, 3), make(1, 2, 4)
    for microbatch in (one, same, other):
        microbatch.update()
        microbatch.add_rollout_log_probs(1.0, None)
    assert torch.equal(one.logits, same.logits)
    assert not torch.equal(one.logits, other.logits)
    assert one.batch.keys() == same.batch.keys()
    for name, found in one.batch.items():
        for part, expected in zip(found, same.batch[name], strict=True):
            assert part == expected if isinstance(part, int) else torch.equal(part, expected)


def test_a_batch_is_packed_as_vime_packs_it() -> None:
    batch = make(1).batch
    assert sum(batch["total_lengths"]) == 300
    assert [len(tokens) for tokens in batch["unconcat_tokens"]] == batch["total_lengths"]
    assert all(0 < response < total for response, total in zip(batch["response_lengths"], batch["total_lengths"]))  # noqa: B905
    for name in ("loss_masks", "advantages"):
        assert [len(values) for values in batch[name]] == batch["response_lengths"]
    assert batch["rollout_mask_sums"].tolist() == [mask.sum() for mask in batch["loss_masks"]]
    assert 0 < torch.cat(batch["loss_masks"]).mean() < 1
    assert all(len(set(values.tolist())) == 1 for values in batch["advantages"])


@pytest.mark.parametrize(("num_ranks", "columns"), [(1, 256), (2, 128), (4, 128)])
def test_the_vocabulary_is_padded_as_megatron_pads_it(num_ranks: int, columns: int) -> None:
    logits = make(1, num_ranks=num_ranks, rank=num_ranks - 1).logits
    assert (logits.shape, logits.dtype, logits.requires_grad) == ((1, 300, columns), torch.float32, True)
    shape = BatchShape(num_samples=1, num_tokens=2, prompt_fraction=0, vocab_size=151936, num_ranks=2)
    assert shape.padded_vocab_size == 152064


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_log_probs_are_the_policys_own_but_for_another_engines_noise(temperature: float) -> None:
    microbatch = make(1)
    microbatch.update()
    microbatch.add_rollout_log_probs(temperature, None)
    found = torch.cat(microbatch.batch["rollout_log_probs"])
    apart = found - find_log_probs(microbatch, temperature)
    assert 0.01 < apart.abs().mean() < 0.02
    assert apart.abs().max() < 0.1


def test_an_update_moves_taken_tokens_a_little_and_nothing_else() -> None:
    microbatch = make(1)
    before, old = microbatch.logits.detach().clone(), find_log_probs(microbatch, 1.0)
    microbatch.update()
    moved = (microbatch.logits.detach() != before)[0]
    assert moved.sum(-1).max() == 1
    assert int(moved.sum()) == 300 - SHAPE.num_samples
    ratios = (find_log_probs(microbatch, 1.0) - old).exp()
    assert 0 < ((ratios < 0.8) | (ratios > 1.28)).float().mean() < 0.1


def test_ranks_share_the_tokens_and_split_the_taken_columns_between_them() -> None:
    parts = [make(1, num_ranks=2, rank=rank) for rank in (0, 1)]
    assert all(torch.equal(*pair) for pair in zip(*(part.batch["unconcat_tokens"] for part in parts), strict=True))
    assert not torch.equal(parts[0].logits, parts[1].logits)
    befores = [part.logits.detach().clone() for part in parts]
    for part in parts:
        part.update()
    moved = sum((part.logits.detach() != before).sum() for part, before in zip(parts, befores, strict=True))
    assert moved == 300 - SHAPE.num_samples


@given(num_samples=st.integers(1, 40), spare=st.integers(0, 2000), seed=st.integers(0, 99))
def test_lengths_always_add_up(num_samples: int, spare: int, seed: int) -> None:
    num_tokens = 2 * num_samples + spare
    lengths = split_tokens(num_tokens, num_samples, torch.Generator().manual_seed(seed))
    assert (len(lengths), sum(lengths)) == (num_samples, num_tokens)
    assert min(lengths) >= 2


# What a timing consists of, on a CPU and, where there is one, on a device.


@pytest.mark.parametrize("was_collecting", [True, False])
def test_every_timed_call_is_a_sample_while_garbage_collection_waits(was_collecting: bool) -> None:
    seen: list[bool] = []
    (gc.enable if was_collecting else gc.disable)()
    try:
        timing = measure_calls(lambda: seen.append(gc.isenabled()), device=CPU, warmup=1, repeats=5)
        assert gc.isenabled() is was_collecting
    finally:
        gc.enable()
    assert seen == [was_collecting, *[False] * 5]
    assert len(timing.samples_s) == 5
    assert all(sample > 0 for sample in timing.samples_s)
    assert timing.peak_extra_bytes is None, "a CPU keeps no count"


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
