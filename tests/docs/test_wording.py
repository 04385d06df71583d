"""The wording policy: what is refused, what passes, where it is found; and the product's own words."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from tests import ROOT
from tests.support.analysis_examples import EXAMPLES
from tools.wording import RULES, lint_file, lint_text

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("jobs/**/*.yaml")])

REFUSED = {
    "r3-replacement": (
        "RL-Kernel replaces R3.",
        "RL-Kernel can replace vime's R3 routing replay.",
        "RL-Kernel **replaces** `R3` in MoE runs.",
        "With RL-Kernel, routing replay is obsolete.",
        "R3 is superseded by RL-Kernel.",
        "RL-Kernel is a replacement for rollout routing replay.",
        "RL-Kernel removes the need for R3.",
        "RL-Kernel makes R3 unnecessary.",
        "Use RL-Kernel instead of R3.",
        "With RL-Kernel there is no need for R3.",
        "With RL-Kernel, R3 is no longer needed.",
        "Not only does RL-Kernel replace R3, it is also small.",
        "It does not need new hardware, but RL-Kernel replaces R3.",
        "No new flags; RL-Kernel replaces R3.",
        "It is not slow. RL-Kernel replaces R3.",
    ),
    "moe-kernels": (
        "RL-Kernel accelerates the MoE kernels.",
        "RL-Kernel's expert kernels are good.",
        "It ships optimised router/expert kernels.",
        "We measured a speedup of the experts.",
        "Fused expert GEMMs come with it.",
    ),
    "moe-comparison": (
        "R3 vs RL-Kernel",
        "vime + R3 vs vime + RL-Kernel",
        "vime vs vime + R3 + RL-Kernel",
        "vime + RL-Kernel compared with vime + R3",
        "RL-Kernel is faster than R3.",
    ),
    "consistency": (
        "RL-Kernel closes the train/inference consistency loop.",
        "A consistency closed loop between training and rollout.",
        "Training and rollout log-probs are bitwise identical.",
        "bitwise train/inference consistency",
        "RL-Kernel guarantees training-inference consistency.",
        "Log-probs are bitwise equal to vLLM's.",
        "It fixes the train/rollout mismatch.",
    ),
    "end-to-end-speed": (
        "The operator tier shows that training is 2x faster.",
        "A six times faster kernel makes training faster end to end.",
        "The module benchmark means an end-to-end speedup of 1.4.",
        "End-to-end speedup from the fused operators: 1.2.",
        "Our operator benchmark: the whole run is faster.",
    ),
    "published-number": (
        "We confirmed RL-Kernel's claims.",
        "This tool validated their published speedups.",
        "Our published numbers hold.",
    ),
    "maximum": (
        "Memory use is up to 10x lower.",
        "Sampling is 163x faster.",
        "Up to 10 times faster than PyTorch.",
    ),
    "speed-of-training": (
        "RL-Kernel makes training 4x faster.",
        "Training gets 3 times faster with RL-Kernel.",
        "RL-Kernel speeds up training 1.3 times.",
    ),
    "bare-promise": (
        "It is bit-exact and production ready.",
        "The integration is production-grade.",
        "The fused loss is fully lossless.",
    ),
    "hardware-never-run": (
        "It was tested on A100, H200 and GB200.",
        "MI300X is supported.",
        "Validated on two MI300X.",
    ),
}  # fmt: skip
ALLOWED = (
    "RL-Kernel does not replace R3.",
    "RL-Kernel doesn't replace R3.",
    "RL-Kernel doesn’t replace vime's routing replay.",
    "Nothing here replaces R3.",
    "This does not mean that RL-Kernel replaces R3.",
    "We make no claim that RL-Kernel replaces R3.",
    "A linter refuses sentences in which RL-Kernel replaces R3.",
    "Does RL-Kernel replace R3?",
    "Neither the seam nor RL-Kernel replaces R3.",
    "That RL-Kernel replaces R3 is not claimed.",
    "Never its business: changing vime's R3 routing replay, claiming anything about MoE expert/router kernels.",
    "Make sure that R3 is on.",
    "R3 stays as it is.",
    "There is no need for R3 in dense models.",
    "vime + R3 vs vime + R3 + RL-Kernel",
    "vime + R3 against vime + R3 + RL-Kernel on Qwen3-30B-A3B",
    "vime vs vime + RL-Kernel",
    "RL-Kernel has no MoE kernels.",
    "No claim about MoE router or expert kernels is made.",
    "Whether RL-Kernel speeds up the experts was not measured.",
    "The router of the rollout engines listens on one port.",
    "No consistency closed loop is claimed.",
    "Both variants train on bitwise the same stored rollouts.",
    "The replay was bitwise: losses and rewards of all trials.",
    "Bitwise agreement of rollout and training, their aim, is no claim of this tool.",
    "train/rollout agreement is not inferior",
    "No end-to-end speed claim follows from the operator tier.",
    "The module tier says nothing about whether training is faster.",
    "An operator that is faster does not mean that training is faster.",
    "An operator is a part of a training step: this result does not show how much faster a step gets.",
    "RL-Kernel made training faster: ratio 0.95, interval 0.93 to 0.97, n = 6.",
    "The operator takes 0.4 of the time of vime's function at this shape.",
    "Published by its authors as 163x; a cold start.",
    "Their README says up to 10x less memory.",
    "A100, GB200 and MI300X: rendered only.",
    "Nothing ran on GB200.",
    "The published numbers were measured on A100.",
    "It was tested on H200 only.",
    "reproduced on H200, other hardware than the published A100",
)


def rules_of(text: str, *, is_html: bool = False) -> list[str]:
    return [offence.rule for offence in lint_text(text, is_html=is_html)]


@pytest.mark.parametrize(("rule", "sentence"), [(rule, text) for rule, texts in REFUSED.items() for text in texts])
def test_a_sentence_that_claims_too_much_is_found(rule: str, sentence: str) -> None:
    assert rules_of(sentence) == [rule]


@pytest.mark.parametrize("sentence", ALLOWED)
def test_a_sentence_that_the_evidence_carries_passes(sentence: str) -> None:
    assert rules_of(sentence) == []


def test_every_rule_has_sentences_that_it_refuses() -> None:
    assert set(REFUSED) == {rule.name for rule in RULES}


@pytest.mark.parametrize("sentence", [texts[0] for texts in REFUSED.values()])
def test_html_is_read_as_its_reader_sees_it(sentence: str) -> None:
    page = f"<!doctype html><title>x</title><style>p {{}}</style><p>All is well.</p><p>{sentence}</p>"
    assert len(rules_of(page, is_html=True)) == 1


def test_tags_inside_a_sentence_do_not_hide_it() -> None:
    assert rules_of("<p>RL-Kernel <b>replaces</b> <code>R3</code>&nbsp;now.</p>", is_html=True) == ["r3-replacement"]
    assert rules_of("<td>RL-Kernel replaces</td><td>R3</td>", is_html=True) == []


def test_invisible_characters_and_other_hyphens_do_not_hide_a_word() -> None:
    assert rules_of("RL‑Kernel repl\u00adaces R\u200b3.") == ["r3-replacement"]


def test_the_place_is_that_of_the_first_word_in_the_file() -> None:
    text = "# A\n\n| cell | <b>RL-Kernel</b> &amp; friends\n\nand\n  RL-Kernel [replaces\n  R3](x.md) now"
    (offence,) = lint_text(text)
    assert (offence.line, offence.column, offence.words) == (6, 14, "replaces R3")


def test_a_sentence_may_run_over_lines_but_not_over_paragraphs_items_and_headings() -> None:
    assert rules_of("RL-Kernel\nreplaces\nR3.") == ["r3-replacement"]
    for text in ("RL-Kernel replaces\n\nR3", "- RL-Kernel replaces\n- R3", "# RL-Kernel replaces\nR3", "replaces | R3"):
        assert rules_of(text) == []


def test_abbreviations_end_no_sentence() -> None:
    assert rules_of("Never say, e.g. RL-Kernel replaces R3.") == []
    assert rules_of("vime + R3 vs. vime + R3 + RL-Kernel") == []


def test_quoted_examples_pass_where_their_marks_are_visible_and_closed() -> None:
    sentence = "RL-Kernel replaces R3."
    assert rules_of(f"<!-- wording: example -->\n{sentence}\n<!-- /wording: example -->\n") == []
    assert rules_of(f"```text wording-example\n{sentence}\n```\n") == []
    for text in (
        f"<!-- wording: example -->\n{sentence}",
        f"```text\n{sentence}\n```",
        f"```wording-example\n{sentence}",
    ):
        assert rules_of(text) == ["r3-replacement"]
    after = f"```text wording-example\n{sentence}\n```\n{sentence}\n"
    assert [offence.line for offence in lint_text(after)] == [4]


def test_comments_are_not_read_and_unclosed_ones_are() -> None:
    assert rules_of("<!-- RL-Kernel replaces R3. -->") == []
    assert rules_of("<!-- RL-Kernel replaces R3.") == ["r3-replacement"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_product_keeps_to_its_own_policy(page: Path) -> None:
    assert [f"{page.name}:{offence}" for offence in lint_file(page)] == []


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "huge"])
def test_every_report_keeps_to_the_policy(name: str) -> None:
    analysis = EXAMPLES[name]()
    assert lint_text(render_markdown(analysis)) == []
    assert lint_text(render_html(analysis), is_html=True) == []


def test_the_page_of_the_policy_names_every_rule() -> None:
    page = (ROOT / "docs" / "wording.md").read_text()
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE) == [rule.name for rule in RULES]


def test_the_page_of_the_policy_quotes_a_sentence_of_every_rule() -> None:
    (block,) = re.findall(
        r"^```text wording-example\n(.*?)^```", (ROOT / "docs" / "wording.md").read_text(), re.M | re.S
    )
    assert sorted(set(rules_of(block))) == sorted(rule.name for rule in RULES)


@given(st.text())
@settings(max_examples=200)
def test_no_text_crashes_it_and_places_lie_in_the_text(text: str) -> None:
    for is_html in (False, True):
        for offence in lint_text(text, is_html=is_html):
            assert 1 <= offence.line <= text.count("\n") + 1


PARTS = [
    "RL-Kernel",
    " replaces ",
    "R3",
    ". ",
    "\n",
    "<b>",
    "<!--",
    "-->",
    "```",
    "wording-example\n",
    "&amp;",
    "](x)",
    "|",
    "…",
    "not ",
]


@given(st.lists(st.sampled_from(PARTS)).map("".join))
@settings(max_examples=300)
def test_no_mixture_of_markup_crashes_it(text: str) -> None:
    for is_html in (False, True):
        for offence in lint_text(text, is_html=is_html):
            line = text.split("\n")[offence.line - 1]
            assert 1 <= offence.column <= len(line)


@pytest.mark.parametrize(
    "unit", ["a", "<", "<a ", "<script ", "<!-- ", "](", "&amp", "\n   ", "-", "'", "replaces ", "does not replace R3 ",
             "vime + R3 vs ", "operators end to end ", "``` wording-example\n```\n"]
)  # fmt: skip
def test_a_long_line_takes_time_in_proportion_to_its_length(unit: str) -> None:
    """Twenty times the text may take a hundred times as long; were it quadratic it would be four hundred.

    In time of this process's own: others on the machine do not count.
    """
    took = []
    for size in (10_000, 200_000):
        times = []
        for _ in range(3):  # the shortest of three: Python's garbage collector may fall into any one of them
            begin = time.process_time()
            lint_text(unit * (size // len(unit)))
            times.append(time.process_time() - begin)
        took.append(min(times))
    assert took[1] < 100 * max(took[0], 0.002)


def run_lint(*files: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tools.wording", *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_the_command_prints_place_reason_and_better_words(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nAll is well. In MoE runs RL-Kernel replaces R3.\n")
    assert run_lint(page) == (
        1,
        f"{page}:3:36: r3-replacement: “replaces R3”: RL-Kernel leaves vime's R3 routing replay as it is\n"
        "  instead: vime + R3 vs vime + R3 + RL-Kernel\n",
    )


def test_the_command_says_how_many_clean_files_it_read(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>RL-Kernel does not replace R3.</p>")
    assert run_lint(page, page) == (0, "no claim found that goes beyond the evidence (2 files)\n")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.md"):
        lint_file(tmp_path / "none.md")
