"""RL-Kernel's ``batch_invariant_logp`` as the route: numbers, what is judged before the call, what compiles when.

The operator here is a double by the documented contract; RL-Kernel's own kernels run in test_gpu.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.integration.measure.profile import read_counts
from rlk_repro.integration.route import rl_kernel
from rlk_repro.integration.route.batch_invariant import (
    SM90_TILE,
    WarmUp,
    find_sm90_refusal,
    find_sm90_value_refusal,
    select,
)
from rlk_repro.integration.route.log_probs import Shard
from rlk_repro.integration.route.rl_kernel import LoadedOperator, load_batch_invariant
from rlk_repro.integration.switch import Mode, Settings, install_into
from rlk_repro.operators import Case, Reason, Refusal
from tests.support.loss_examples import load_loss_module, make_args, run_ranks, train_once

WHOLE = Shard(0, 1, None)


class _BatchInvariant(torch.autograd.Function):
    """One gradient tensor, written once, as the kernel does it."""

    made: Any = None

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        lse = logits.float().logsumexp(dim=1)
        ctx.save_for_backward(logits, ids, lse)
        return logits.gather(1, ids.unsqueeze(1)).squeeze(1).float() - lse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        logits, ids, lse = ctx.saved_tensors
        onehot = torch.zeros_like(logits).scatter_(1, ids.unsqueeze(1), 1.0)
        _BatchInvariant.made = grad.unsqueeze(1) * (onehot - (logits - lse.unsqueeze(1)).exp())
        return _BatchInvariant.made, None


class NativeBatchInvariantLogpOp:
    def __call__(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _BatchInvariant.apply(logits, ids)  # type: ignore[no-untyped-call]
        return result


OP = NativeBatchInvariantLogpOp()


def check(op: Any, seed: int, shard: Shard, columns: int = 24, *, is_lopsided: bool = False) -> None:
    """Log-probs, gradient and entropy of this rank's columns are those of float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, columns, generator=generator) * 3
    if is_lopsided:
        logits[:, columns // 2 :] -= 60  # all of the probability on one rank
    tokens = torch.randint(columns, (5,), generator=generator)
    grad = torch.randn(5, generator=generator)
    exact = logits.double().requires_grad_()
    full = exact.log_softmax(dim=-1)
    expected = full.gather(1, tokens.unsqueeze(1)).squeeze(1)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double(), retain_graph=True)
    size = columns // shard.size
    own = slice(shard.rank * size, (shard.rank + 1) * size)
    leaf = logits[:, own].clone().requires_grad_()
    values, entropy = select(op, leaf, tokens, shard, with_entropy=True)
    (found,) = torch.autograd.grad(values, leaf, grad)
    with torch.no_grad():
        passed, none = select(op, leaf, tokens, shard, with_entropy=False)
    assert none is None
    assert not passed.requires_grad
    tolerance = 1e-5 if is_lopsided else 4e-6
    for one in (values, passed):
        torch.testing.assert_close(one.double(), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(
        found.double(), expected_grad[:, own], atol=5e-6 * float(expected_grad.abs().max()), rtol=0
    )
    assert entropy is not None
    torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(dim=-1).detach(), atol=2e-6, rtol=0)
    if op is OP:
        assert found.data_ptr() == _BatchInvariant.made.data_ptr(), "a second tensor of the gradient's size was made"


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_log_probs_gradient_and_entropy_are_torch_s(seed: int) -> None:
    check(OP, seed, WHOLE)


def check_shards(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    try:
        for seed in range(20):
            check(OP, seed, Shard.of(dist.group.WORLD), is_lopsided=seed % 3 == 2)
    finally:
        dist.destroy_process_group()


def test_over_a_split_vocabulary_all_is_the_same_without_a_second_gradient(tmp_path: Path) -> None:
    run_ranks(check_shards, str(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "columns", "capability", "stream", "expected"),
    [
        (torch.float32, 8, 9, 0, None),
        (torch.bfloat16, 8, 9, 0, None),
        (torch.float32, 6, 9, 0, Refusal(Reason.OTHER_CLASS, "rows of 24 bytes, no multiple of 16")),
        (torch.bfloat16, 12, 9, 0, Refusal(Reason.OTHER_CLASS, "rows of 24 bytes, no multiple of 16")),
        (torch.float16, 8, 9, 0, Refusal(Reason.OTHER_CLASS, "torch.float16")),
        (torch.float32, 8, 10, 0, Refusal(Reason.OTHER_CLASS, "the GPU is not Hopper")),
        (torch.float32, 8, 9, 7, Refusal(Reason.STREAM)),
    ],
)
def test_what_the_hopper_class_would_hand_over_is_refused_before_the_call(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    columns: int,
    capability: int,
    stream: int,
    expected: Refusal | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=stream))
    assert find_sm90_refusal(torch.zeros(2, columns, dtype=dtype)) == expected


@pytest.mark.parametrize("column", [0, SM90_TILE, 2 * SM90_TILE])
def test_a_tile_that_might_be_nothing_but_minus_infinity_is_refused(column: int) -> None:
    logits = torch.zeros(3, 2 * SM90_TILE + 20)
    tokens = torch.full((3,), 300)
    assert find_sm90_value_refusal(logits, tokens, WHOLE) is None
    logits[1, 2 * SM90_TILE + 3] = logits[1, SM90_TILE - 1] = -torch.inf
    assert find_sm90_value_refusal(logits, tokens, WHOLE) is None
    logits[1, column] = -torch.inf
    assert find_sm90_value_refusal(logits, tokens, WHOLE) == Refusal(Reason.NEGATIVE_INFINITY)


def place_registry(monkeypatch: pytest.MonkeyPatch, class_name: str, *, symbols: tuple[str, ...] = ()) -> Any:
    """RL-Kernel's registry with one class behind every name, and the members of its enum."""
    op = OP if class_name == "NativeBatchInvariantLogpOp" else type(class_name, (), {})()
    backends = enum.Enum(  # type: ignore[misc]
        "OpBackend", ["PYTORCH_NATIVE", "TRITON_BATCH_INVARIANT_LOGP", "PYTORCH_BATCH_INVARIANT_LOGP"]
    )
    asked: list[str] = []

    def get_op(name: str) -> Any:
        asked.append(name)
        return op

    registry = SimpleNamespace(get_op=get_op)
    module = SimpleNamespace(OpBackend=backends, kernel_registry=registry, asked=asked)
    monkeypatch.setattr(rl_kernel, "_find_registry", lambda: (module, "registry"))
    extension = None if not symbols else SimpleNamespace(**dict.fromkeys(symbols))
    monkeypatch.setitem(sys.modules, "rl_engine._C", extension)
    return module


@pytest.mark.parametrize("name", ["logp", "ratio_kl"])
@pytest.mark.parametrize(
    ("platform", "class_name", "symbols", "is_served"),
    [
        ("cuda", "BatchInvariantLogpSM90Op", ("batch_invariant_logp_sm90",), True),
        ("cuda", "BatchInvariantLogpSM90Op", (), False),
        ("cuda", "TritonBatchInvariantLogpOp", (), True),
        ("cuda", "NativeBatchInvariantLogpOp", (), False),
        ("rocm", "TritonBatchInvariantLogpOp", (), True),
        ("rocm", "NativeBatchInvariantLogpOp", (), False),
        ("cpu", "NativeBatchInvariantLogpOp", (), True),
    ],
)
def test_the_registry_s_class_serves_only_where_the_table_accepts_it(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    platform: str,
    class_name: str,
    symbols: tuple[str, ...],
    is_served: bool,
) -> None:
    module = place_registry(monkeypatch, class_name, symbols=symbols)
    found = load_batch_invariant(name, platform)
    assert module.asked == ["batch_invariant_logp"]
    if is_served:
        assert isinstance(found, LoadedOperator)
        assert found.implementation == class_name
    else:
        assert isinstance(found, Refusal)
        assert found.reason is Reason.NOT_ACCEPTED


def test_an_rl_kernel_without_it_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = place_registry(monkeypatch, "NativeLogpOp")
    monkeypatch.setattr(module, "OpBackend", enum.Enum("OpBackend", ["PYTORCH_NATIVE"]))
    assert load_batch_invariant("logp", "cpu") is None
    assert module.asked == []


def test_both_operators_are_served_and_the_loss_is_the_trainer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    place_registry(monkeypatch, "NativeBatchInvariantLogpOp")
    args, module = make_args(), load_loss_module()
    expected = train_once(load_loss_module(), args)
    settings_ = Settings(mode=Mode.REQUIRE, ops=("logp", "ratio_kl"))
    with install_into(module, settings_, trainer="example", case=Case(platform="cpu")) as installation:
        found = train_once(module, args)
        decisions = {item.op: item.implementation for item in installation.ledger.decisions}
    assert decisions == dict.fromkeys(("logp", "ratio_kl"), "NativeBatchInvariantLogpOp")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


def test_the_first_call_of_a_shape_warms_up_both_kinds_of_row_counts() -> None:
    calls: list[tuple[int, bool]] = []
    saved: list[torch.Tensor] = []

    def op(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        calls.append((len(logits), logits.requires_grad))
        return OP(logits, ids)

    warm_up, logits = WarmUp(op), torch.zeros(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: saved[0]):
        warm_up.run(logits)
        warm_up.run(logits)
    assert calls == [(16, True), (17, True)]
    assert saved == [], "a recomputed loss would miss these tensors"
    with torch.no_grad():
        warm_up.run(logits)
    assert calls[2:] == [(16, False), (17, False)]


def test_a_kernel_that_triton_loads_later_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hooks(list[Any]):
        def add(self, hook: Any) -> None:
            if hook not in self:
                self.append(hook)

    hooks = Hooks()
    knobs = SimpleNamespace(runtime=SimpleNamespace(kernel_load_end_hook=hooks))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    before = read_counts()["kernel_compilations"]
    assert read_counts()["kernel_compilations"] == before
    for name in ("_batch_invariant_logp_bwd_kernel", "_ratio_kl_fwd_kernel", "another_project_s_kernel"):
        for hook in hooks:
            hook(None, None, name, None, "")
    assert read_counts()["kernel_compilations"] == before + 2
