"""How a report calls what an operator resolved to."""

from __future__ import annotations

import pytest

from rlk_repro.report.sections import _make_rl_kernel_cell
from rlk_repro.results import DecisionSummary


@pytest.mark.parametrize(
    ("op", "implementation", "is_rl_kernel", "word"),
    [
        ("logp", "FusedLogpGenericOp", True, "yes"),
        ("ratio_kl", "TritonRatioKLOp", True, "yes"),
        ("logp", "NativeLogpOp", True, "native"),
        ("ratio_kl", "NativeRatioKLOp", True, "native"),
        ("logp", "rlk_repro.refengine.core", False, "no"),
        ("an operator of a later version", "SomeOp", True, "yes"),
    ],
)
def test_plain_pytorch_is_called_native(op: str, implementation: str, is_rl_kernel: bool, word: str) -> None:
    decision = DecisionSummary(
        op=op, implementation=implementation, reason="", is_rl_kernel=is_rl_kernel, calls=1, tokens=1, fallbacks=0
    )
    assert _make_rl_kernel_cell(decision).text == word
