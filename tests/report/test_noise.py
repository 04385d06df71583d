"""Reports on bundles of older rules show the noise of blocks beside the sealed interval."""

from __future__ import annotations

import pytest

from rlk_repro.replay.recorded import load_result
from rlk_repro.report.answer import describe_answer
from rlk_repro.report.basis import make_basis
from rlk_repro.report.sections import BY_BLOCKS, make_effects
from rlk_repro.report.view import make_view
from tests import ROOT

EVIDENCE = ROOT / "docs" / "evidence"


@pytest.mark.parametrize(
    ("bundle", "interval", "sensitivity"),
    [
        ("qwen3-4b-random-five-h200.tgz", "2.86 to 2.97 %; the noise of its blocks alone gives 2.75 to 3.09 %", "1.38"),
        ("qwen3-4b-random-gc-freeze-h200.tgz", "2.79 to 3.79 %)", "1.83"),
    ],
)
def test_an_interval_that_is_narrow_by_luck_stands_beside_the_noise(
    bundle: str, interval: str, sensitivity: str
) -> None:
    view = make_view(*load_result(EVIDENCE / bundle, is_linked=False)[:2])
    assert interval in describe_answer(view)
    assert f"speed-up of {sensitivity}" in dict(make_basis(view))["sensitivity"]
    table = make_effects(view).blocks[1]
    assert BY_BLOCKS in [column.name for column in table.columns]  # type: ignore[union-attr]
