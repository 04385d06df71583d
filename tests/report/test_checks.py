"""The section on engines, the matrix, the drawing of where drift starts, and the column of an index."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlk_repro.report.answer import describe_answer, describe_words, suggest_next
from rlk_repro.report.basis import make_basis
from rlk_repro.report.blocks import Table, Tone
from rlk_repro.report.checks import make_checks, make_matrices, plot_drift
from rlk_repro.report.index import render_index
from rlk_repro.report.sections import choose_tone
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord, choose_word, describe_checks
from rlk_repro.rundir.results import Analysis, VerdictWord
from tests.support.analysis_examples import EXAMPLES

ENGINES = ("training", "rollout, generated", "rollout, prompts", "reference", "rollout, fifth")


def make_check(**changes: Any) -> AgreementCheck:
    fields: dict[str, Any] = {
        "kind": CheckKind.LOG_PROBS, "pair": "p1", "variant": "baseline", "step": 0, "first": "training",
        "second": "reference", "word": CheckWord.PASS, "found": "largest 1e-06", "num": 8, "num_unequal": 3,
        "largest": 1e-6, "mean": 1e-7, "dtype": "float32", "bound": 1e-4,
    }  # fmt: skip
    return AgreementCheck(**(fields | changes))


def make_layers(num_layers: int = 2, **changes: Any) -> AgreementCheck:
    points = [f"layer {n} {name}" for n in range(num_layers) for name in ("attention", "mlp", "residual")]
    points += ["final norm", "logits"]
    curve = tuple(1e-7 * (1 + place) for place in range(len(points)))
    return make_check(kind=CheckKind.LAYERS, points=tuple(points), curve=curve, bound=2.5e-5, **changes)


def view_of(*checks: AgreementCheck) -> Any:
    return SimpleNamespace(analysis=SimpleNamespace(checks=checks, trials=()))


def make_analysis(checks: tuple[AgreementCheck, ...], example: str = "faster") -> Analysis:
    """An agreement run with the trials of an example."""
    analysis = EXAMPLES[example]()
    verdict = replace(analysis.verdict, word=VerdictWord.NO_COMPARISON)
    return replace(analysis, verdict=verdict, effects=(), gates=(), checks=checks)


BOTH = (make_check(), make_check(variant="enabled"))
FAILED = make_check(kind=CheckKind.INPUTS, word=CheckWord.FAIL, found="tokens of sample 2, position 5", step=1)
MISSING = make_check(word=CheckWord.NOT_MEASURED, found="no engine", num=0, largest=None, second="rollout, prompts")


def test_the_first_failure_is_named_and_counted() -> None:
    assert describe_checks([make_check(), MISSING]) == "1 check within the contract, 1 not measured"
    assert describe_checks([make_check(), FAILED]) == (
        "1 check of 2 failed; first: inputs, step 1, baseline: training against reference: tokens of "
        "sample 2, position 5"
    )
    assert describe_checks([MISSING]) == "nothing was measured"
    assert [choose_word(found).value for found in ([make_check(), FAILED], [*BOTH, MISSING], [MISSING])] == [
        *("fail", "pass", "not measured")
    ]


def test_a_step_that_failed_earlier_comes_first_and_of_a_step_the_inputs() -> None:
    later = replace(FAILED, step=2)
    early = make_check(word=CheckWord.FAIL, found="far apart", step=1)
    assert "tokens of sample" in describe_checks([early, later, FAILED])
    assert "far apart" in describe_checks([early, later])


@pytest.mark.parametrize(
    ("checks", "words", "tone"),
    [
        (BOTH, "engines agree within the contract", Tone.GOOD),
        ((*BOTH, MISSING), "engines agree within the contract", Tone.GOOD),
        ((*BOTH, FAILED), "engines differ beyond the contract", Tone.BAD),
        ((make_check(),), "agreement not shown", Tone.FAINT),  # the other variant has no log-probs
        ((make_check(kind=CheckKind.INPUTS), MISSING), "agreement not shown", Tone.FAINT),
    ],
    ids=["pass", "pass in part", "fail", "one variant", "inputs alone"],
)
def test_the_answer_of_an_agreement_run_is_about_its_engines(
    checks: tuple[AgreementCheck, ...], words: str, tone: Tone
) -> None:
    analysis = make_analysis(checks)
    view = make_view(analysis)
    assert describe_words(analysis) == words
    assert choose_tone(analysis) is tone
    assert describe_answer(view) == f"Result: {describe_checks(checks)}."
    assert suggest_next(view, "bundle.tgz") == "rlk-repro agreement bundle.tgz"
    assert "step time" not in dict(make_basis(view))


def test_a_failed_agreement_is_bad_even_where_rl_kernel_did_not_run() -> None:
    assert choose_tone(make_analysis(BOTH, "all-fallback")) is Tone.OPEN
    assert choose_tone(make_analysis((*BOTH, FAILED), "all-fallback")) is Tone.BAD


def test_the_section_has_a_table_for_each_kind() -> None:
    section = make_checks(view_of(make_check(), FAILED, MISSING))
    tables = [block for block in section.blocks if isinstance(block, Table)]
    assert [table.title for table in tables] == ["Largest difference of log-probs, baseline, step 0", "Inputs",
                                                 "Log-probs"]  # fmt: skip
    cells = [cell.text for cell in tables[2].rows[0]]
    assert cells == ["training / reference", "baseline", "0", "pass", "8", "3", "1e-06", "0.0001 (float32)",
                     "largest 1e-06"]  # fmt: skip


def test_the_matrix_has_every_engine_twice() -> None:
    checks = [
        make_check(first=first, second=second, largest=1e-6 * (place + 1))
        for place, (first, second) in enumerate(
            (a, b) for number, a in enumerate(ENGINES) for b in ENGINES[number + 1 :]
        )
    ]
    (table,) = make_matrices([*checks, replace(checks[0], step=1)])
    assert [column.name for column in table.columns[1:]] == list(ENGINES)
    rows = [[cell.text for cell in row] for row in table.rows]
    assert rows[0] == ["training", "", "1e-06", "2e-06", "3e-06", "4e-06"]
    assert [rows[n][m + 1] for n in range(5) for m in range(5)] == [rows[m][n + 1] for n in range(5) for m in range(5)]


def test_equal_and_missing_are_words_in_the_matrix() -> None:
    equal = make_check(num_unequal=0, largest=0.0)
    (table,) = make_matrices([equal, MISSING, make_check(first="rollout, prompts", largest=None)])
    assert [cell.text for cell in table.rows[0]] == ["training", "", "equal", "–"]
    assert [cell.text for cell in table.rows[1]] == ["reference", "equal", "", "not finite"]


@pytest.mark.parametrize("num_layers", [2, 36])
def test_where_drift_starts_has_a_line_for_each_two_engines(num_layers: int) -> None:
    curves = [
        make_layers(num_layers, first=first, second=second, variant=variant)
        for variant in ("baseline", "enabled")
        for first, second in itertools.pairwise(ENGINES)
    ]
    case = make_layers(num_layers, second="training, alone")
    (figure,) = plot_drift(view_of(*curves, case))
    assert figure.svg.count("<polyline") == 8
    assert figure.svg.count('class="legend"') == 8
    assert "training, alone" not in figure.svg
    assert figure.svg.count('class="floor"') == 1
    assert figure.svg.count('class="tick"') <= 24


def test_engines_that_are_equal_everywhere_draw_nothing_and_a_gap_is_left_out() -> None:
    same = replace(make_layers(), curve=(0.0,) * 8)
    (empty,) = plot_drift(view_of(same))
    assert (empty.svg, empty.caption) == ("", "Between these engines no layer differs: training / reference.")
    gap = replace(make_layers(), curve=(0.0, None, *[1e-6] * 6))
    (figure,) = plot_drift(view_of(gap))
    assert figure.svg.count("<circle") == 1 + 6
    assert list(plot_drift(view_of(make_check()))) == []


def test_an_index_has_a_column_only_where_a_run_compares_engines() -> None:
    analysis = next(iter(EXAMPLES.values()))()
    plain = (analysis, Context(bundle_id="ab" * 32))
    assert "engines agree" not in render_index([plain])
    checked = (make_analysis(BOTH), Context(bundle_id="cd" * 32))
    page = render_index([plain, checked])
    assert page.count("engines agree") >= 1
    assert ">pass<" in page
