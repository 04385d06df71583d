"""A report names what an operator resolved to, and what pairs could have shown."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.verdicts import power_of
from rlk_repro.report.basis import describe_pairs, describe_sensitivity, make_basis
from rlk_repro.report.sections import _make_rl_kernel_cell
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import BlockResult, DecisionSummary, PairStatus
from tests.support.analysis_examples import faster


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


def test_the_sensitivity_is_the_effect_that_nine_in_ten_such_experiments_find() -> None:
    analysis = faster()
    effect = dataclasses.replace(analysis.effects[0], n=6, sd_log=0.146)
    assert describe_sensitivity(analysis, effect) == (
        "6 pairs whose effects have a standard deviation of 14.6 % reliably detect a speed-up of 29.3 % or more"
    )
    assert "sensitivity" in dict(make_basis(make_view(analysis, Context())))
    threshold_pct = analysis.verdict.threshold * 100
    chance = power_of(0.293, num_pairs=6, pair_sd_pct=14.6, smallest_effect_pct=threshold_pct, alpha=0.05)
    assert chance == pytest.approx(0.9, abs=0.01)


def test_only_blocks_of_scored_sessions_count() -> None:
    analysis = faster()
    trials = [dataclasses.replace(trial, name=f"{trial.name}:{trial.variant}") for trial in analysis.trials]
    first, second = [pair for pair in analysis.pairs if not pair.is_control][:2]
    blocks = [
        BlockResult(session=pair.pair, number=number, order="ABBA", is_control=number == 2, reason=reason,
                    log_ratio=0.1, first_log_ratio=None)
        for pair in (first, second)
        for number, reason in enumerate(("", "lost", ""))
    ]  # fmt: skip
    pairs = (first, dataclasses.replace(second, status=PairStatus.VOID))
    found = dataclasses.replace(analysis, trials=tuple(trials), pairs=pairs, blocks=tuple(blocks))
    assert describe_pairs(found).endswith("counted blocks: 1")
