"""The double of RL-Kernel answers as the real one does, on random inputs; against a checkout named by ``RLK_SRC``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import SUPPORT

torch = pytest.importorskip("torch")

DOUBLE = SUPPORT / "fake_rl_engine"
SEEDS = range(5)
NUM_ROWS, VOCAB, HIDDEN = 12, 37, 8


@contextmanager
def importing_from(folder: Path) -> Iterator[Callable[[str], Any]]:
    """The operators of the ``rl_engine`` in a folder, by name; afterwards no trace of it is left in this process."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "rl_engine"}
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("rl_engine.kernels.registry").kernel_registry.get_op
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "rl_engine"]:
            del sys.modules[name]
        sys.modules.update(kept)


def results(folder: Path, compute: Callable[[Callable[[str], Any]], Any]) -> Any:
    with importing_from(folder) as get_op:
        return compute(get_op)


@pytest.fixture
def real() -> Path:
    if not os.environ.get("RLK_SRC"):
        pytest.skip("RLK_SRC names no RL-Kernel to compare with")
    return Path(os.environ["RLK_SRC"])


def draw(seed: int, *shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_ids(seed: int, *shape: int) -> Any:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def logp(get_op: Callable[[str], Any], seed: int) -> list[Any]:
    logits, ids = draw(seed, NUM_ROWS, VOCAB).requires_grad_(), draw_ids(seed, NUM_ROWS)
    rows = torch.tensor([0, 3, NUM_ROWS - 1])
    op = get_op("logp")
    value = op.apply_fp32(logits, ids)
    (gradient,) = torch.autograd.grad(value.square().sum(), logits)
    with torch.no_grad():
        others = [op(logits.bfloat16(), ids), op.online_fp32(logits, ids), op.indexed_fp32(logits, ids, rows)]
        others += [op.out(logits, ids, torch.zeros(NUM_ROWS)), op.online_indexed_fp32(logits, ids, rows)]
    return [value, gradient, *others]


def ratio_kl(get_op: Callable[[str], Any], seed: int) -> list[Any]:
    policy, ids = draw(seed, NUM_ROWS, VOCAB).requires_grad_(), draw_ids(seed, NUM_ROWS)
    mask = draw(seed + 1, NUM_ROWS) > -0.5
    ids = ids.masked_fill(~mask, -100)
    old = -3 + draw(seed + 2, NUM_ROWS)
    ratio, kl = get_op("ratio_kl")(policy, draw(seed + 3, NUM_ROWS, VOCAB), ids, mask, old)
    return [ratio, kl, *torch.autograd.grad(ratio.sum() + kl.sum(), policy)]


def grpo_loss(get_op: Callable[[str], Any], seed: int) -> list[Any]:
    shape = (8, 5)
    policy, old = draw(seed, *shape, VOCAB).requires_grad_(), -3 + draw(seed + 1, *shape)
    mask, rewards = draw(seed + 2, *shape) > -0.5, draw(seed + 3, 8)
    inputs = (policy, draw(seed + 4, *shape, VOCAB), draw_ids(seed, *shape), old)
    op = get_op("grpo_loss")
    whole = op(*inputs, rewards, mask, clip_eps=0.3, beta=0.1, samples_per_prompt=4)
    uneven = op.group_advantages(rewards, group_boundaries=[0, 3, 8])
    return [*whole, *op.apply(*inputs, uneven, mask), uneven, *torch.autograd.grad(whole[0], policy)]


def linear_logp(get_op: Callable[[str], Any], seed: int) -> list[Any]:
    leaves = [draw(seed, NUM_ROWS, HIDDEN), draw(seed + 1, VOCAB, HIDDEN), draw(seed + 2, VOCAB)]
    hidden, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    value = get_op("linear_logp")(hidden, weight, draw_ids(seed, NUM_ROWS), bias)
    return [value, *torch.autograd.grad(value.sum(), [hidden, weight, bias])]


@pytest.mark.parametrize("compute", [logp, ratio_kl, grpo_loss, linear_logp], ids=lambda compute: compute.__name__)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_double_computes_what_rl_kernel_computes(real: Path, compute: Any, seed: int) -> None:
    expected = results(real, lambda get_op: compute(get_op, seed))
    found = results(DOUBLE, lambda get_op: compute(get_op, seed))

    assert [item.dtype for item in found] == [item.dtype for item in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def test_names_lead_to_the_same_classes(real: Path) -> None:
    def names(get_op: Callable[[str], Any]) -> list[str]:
        found = [type(get_op(name)) for name in ("logp", "ratio_kl", "grpo_loss", "linear_logp", "kl", "nonsense")]
        return [f"{item.__module__}.{item.__name__}" for item in found]

    assert results(DOUBLE, names) == results(real, names)


@pytest.mark.parametrize(
    "call",
    [
        lambda get_op: get_op("logp").apply_fp32(draw(0, 3, VOCAB), draw_ids(0, 4)),
        lambda get_op: get_op("logp").indexed_fp32(draw(0, 3, VOCAB), draw_ids(0, 3), torch.tensor([3])),
        lambda get_op: get_op("logp").out(draw(0, 3, VOCAB), draw_ids(0, 3), torch.zeros(4)),
        lambda get_op: get_op("ratio_kl")(
            draw(0, 3, VOCAB), draw(1, 3, VOCAB), torch.full((3,), VOCAB), torch.ones(3), draw(2, 3)
        ),
        lambda get_op: get_op("grpo_loss").group_advantages(draw(0, 4)),
        lambda get_op: get_op("grpo_loss").group_advantages(draw(0, 4), samples_per_prompt=3),
        lambda get_op: get_op("linear_logp")(
            draw(0, 3, HIDDEN), draw(1, VOCAB, HIDDEN), draw_ids(0, 3), vocab_start_index=1
        ),
    ],
)
def test_both_refuse_the_same_inputs(real: Path, call: Any) -> None:
    for folder in (real, DOUBLE):
        with pytest.raises(ValueError, match=r"."):
            results(folder, call)


def test_an_unknown_operator_is_answered_with_the_native_log_prob() -> None:
    with importing_from(DOUBLE) as get_op:
        assert type(get_op("nonsense")).__name__ == "NativeLogpOp"
        assert get_op("logp") is get_op("nonsense")
