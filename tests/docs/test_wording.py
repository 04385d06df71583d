"""No text of this repository or of a report says that RL-Kernel changes MoE kernels or replaces vime's R3."""

from __future__ import annotations

import pytest

from rlk_repro.report.markdown import render_markdown
from tests import ROOT
from tests.support.analysis_examples import EXAMPLES
from tools.wording import find_claims

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("jobs/**/*.yaml"), *ROOT.glob("rlk_repro/**/*.py")]


@pytest.mark.parametrize(
    "sentence",
    [
        "RL-Kernel replaces R3.",
        "All is well. RL-Kernel can **replace** vime's `R3` routing\nreplay.",
        "With RL-Kernel, routing replay is obsolete.",
        "RL-Kernel is a replacement for rollout routing replay.",
        "Use RL-Kernel instead of R3.",
        "RL-Kernel accelerates the MoE kernels.",
        "It ships optimised router/expert kernels.",
        "| fused expert GEMMs |",
    ],
)
def test_a_claim_is_found(sentence: str) -> None:
    assert len(list(find_claims(sentence))) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "RL-Kernel does not replace R3.",
        "This run shows nothing about faster MoE kernels.",
        "vime + R3 vs vime + R3 + RL-Kernel",
        "R3 replays the choices of experts.",
    ],
)
def test_other_sentences_pass(sentence: str) -> None:
    assert list(find_claims(sentence)) == []


def test_no_page_claims_it() -> None:
    assert {path.name: found for path in PAGES if (found := list(find_claims(path.read_text())))} == {}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "huge"])
def test_no_report_claims_it(name: str) -> None:
    assert list(find_claims(render_markdown(EXAMPLES[name]()))) == []
