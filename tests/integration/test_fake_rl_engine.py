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
