"""RL-Kernel's compiled extension on a GPU: every symbol that it exports is called once, against float64."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

NUM_ROWS, VOCAB, HIDDEN = 96, 4096, 512
NUM_PARTS, GROUP, LEN_Q, LEN_KV, HEAD_DIM = 2, 4, 128, 256, 128
HOPPER = ("fused_linear_logp_sm90", "batch_invariant_logp_sm90")


@pytest.fixture(scope="module")
def extension() -> Any:
    pytest.importorskip("rl_engine", reason="needs RL-Kernel")
    try:
        return importlib.import_module("rl_engine._C")
    except ImportError as error:
        pytest.skip(f"RL-Kernel without its extension: {error}")


def make_logits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [NUM_ROWS, VOCAB], tokens [NUM_ROWS] int64 and their log-probs [NUM_ROWS] in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(NUM_ROWS, VOCAB, generator=generator)).to("cuda", dtype)
    tokens = torch.randint(VOCAB, (NUM_ROWS,), generator=generator).cuda()
    return logits, tokens, select(logits.double(), tokens)


def select(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def plain(function: Callable[..., torch.Tensor]) -> float:
    logits, tokens, exact = make_logits()
    return largest(function(logits, tokens), exact)


def into_output(function: Callable[..., torch.Tensor]) -> float:
    logits, tokens, exact = make_logits()
    output = torch.full((NUM_ROWS,), torch.nan, device="cuda")
    function(logits, tokens, output)
    return largest(output, exact)


def indexed(function: Callable[..., torch.Tensor]) -> float:
    logits, tokens, exact = make_logits()
    rows = torch.arange(0, NUM_ROWS, 3, device="cuda")
    return largest(function(logits, tokens, rows)[rows], exact[rows])


def indexed_into_output(function: Callable[..., torch.Tensor]) -> float:
    logits, tokens, exact = make_logits()
    rows = torch.arange(0, NUM_ROWS, 3, device="cuda")
    output = torch.full((NUM_ROWS,), 7.0, device="cuda")
    function(logits, tokens, rows, output)
    others = torch.ones(NUM_ROWS, dtype=torch.bool, device="cuda").index_fill(0, rows, value=False)
    assert (output[others] == 7.0).all(), "rows that were not asked for were written"
    return largest(output[rows], exact[rows])


def hopper_linear_logp(function: Callable[..., Any]) -> float:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_ROWS, HIDDEN, generator=generator).to("cuda", torch.bfloat16)
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5).to("cuda", torch.bfloat16)
    tokens = torch.randint(VOCAB, (NUM_ROWS,), generator=generator).cuda()
    found, _ = function(hidden, weight, tokens, None)
    return largest(found, select(hidden.double() @ weight.double().T, tokens))


def prefix_attention(function: Callable[..., torch.Tensor]) -> float:
    generator = torch.Generator().manual_seed(2)
    shapes = ((NUM_PARTS, GROUP, LEN_Q, HEAD_DIM), (NUM_PARTS, LEN_KV, HEAD_DIM), (NUM_PARTS, LEN_KV, HEAD_DIM))
    query, key, value = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes)
    scores = torch.einsum("bgqd,bkd->bgqk", query.double(), key.double()) / HEAD_DIM**0.5
    exact = torch.einsum("bgqk,bkd->bgqd", scores.softmax(dim=-1), value.double())
    return largest(function(query, key, value), exact)


def largest(found: torch.Tensor, exact: torch.Tensor) -> float:
    return (found.double() - exact).abs().max().item()


def hopper_batch_invariant(function: Callable[..., Any]) -> float:
    logits, tokens, exact = make_logits()
    found, log_sums = function(logits, tokens, -100)
    return max(largest(found, exact), largest(log_sums, logits.double().logsumexp(dim=-1)))


CALLS: dict[str, tuple[Callable[[Any], float], float]] = {
    "fused_logp": (plain, 1e-5),
    "fused_logp_forward_fp32": (plain, 1e-5),
    "fused_logp_forward_online_fp32": (plain, 1e-5),
    "fused_logp_forward_out": (into_output, 1e-5),
    "fused_logp_forward_online_out": (into_output, 1e-5),
    "fused_logp_forward_indexed_fp32": (indexed, 1e-5),
    "fused_logp_forward_online_indexed_fp32": (indexed, 1e-5),
    "fused_logp_forward_indexed_out": (indexed_into_output, 1e-5),
    "fused_logp_forward_online_indexed_out": (indexed_into_output, 1e-5),
    "batch_invariant_logp_sm90": (hopper_batch_invariant, 1e-5),
    # products of bfloat16, summed in float32
    "fused_linear_logp_sm90": (hopper_linear_logp, 1e-2),
    "prefix_shared_attention": (prefix_attention, 2e-2),
}
"""Of each symbol: a call, and the largest error that rounding explains."""


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_symbol_computes_correct_values(extension: Any, name: str) -> None:
    if name in HOPPER and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    if not hasattr(extension, name):
        assert name in HOPPER, f"the extension lacks {name}"
        pytest.skip("built without the operators for Hopper, or of a commit that lacks it")
    call, tolerance = CALLS[name]
    error = call(getattr(extension, name))
    print(f"{name}: largest error {error:.2e}")
    assert error <= tolerance


REFUSED = "fused_logp_sm90"
"""Its tensor map asks for boxes of 4,096 columns where the GPU allows 256: it ends the process, whatever the input.
RL-Kernel itself keeps it behind RL_KERNEL_ENABLE_EXPERIMENTAL_SM90_LOGP; no route of ours takes it.
"""
CALL_REFUSED = """
import torch
from rl_engine import _C
logits = torch.randn(64, 8192, device="cuda").bfloat16()
_C.fused_logp_sm90(logits, torch.zeros(64, dtype=torch.int32, device="cuda"))
"""


def test_symbols_that_end_the_process_are_listed(extension: Any) -> None:
    if torch.cuda.get_device_capability()[0] != 9 or not hasattr(extension, REFUSED):
        pytest.skip("needs a Hopper GPU and the operators for it")
    done = subprocess.run([sys.executable, "-c", CALL_REFUSED], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "cuTensorMapEncodeTiled failed" in done.stdout + done.stderr


def test_no_log_prob_symbol_is_left_out(extension: Any) -> None:
    """Newer commits export more: attention, norms, embeddings, and modes of log-probs that no route uses."""
    found = {name for name in dir(extension) if name.startswith(("fused_logp", "batch_invariant"))}
    assert found - CALLS.keys() == {REFUSED} & found
