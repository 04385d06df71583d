"""The section on engines, the matrix, the drawing of where drift starts, and the column of an index."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rlk_repro.report.blocks import Tone
from rlk_repro.report.checks import plot_drift
from rlk_repro.report.sections import choose_tone
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord, choose_word, describe_checks
from rlk_repro.rundir.results import Analysis, VerdictWord
from tests.support.analysis_examples import EXAMPLES


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


def test_a_failed_agreement_is_bad_even_where_rl_kernel_did_not_run() -> None:
    assert choose_tone(make_analysis(BOTH, "all-fallback")) is Tone.OPEN
    assert choose_tone(make_analysis((*BOTH, FAILED), "all-fallback")) is Tone.BAD


def test_engines_that_are_equal_everywhere_draw_nothing_and_a_gap_is_left_out() -> None:
    same = replace(make_layers(), curve=(0.0,) * 8)
    (empty,) = plot_drift(view_of(same))
    assert (empty.svg, empty.caption) == ("", "Between these engines no layer differs: training / reference.")
    gap = replace(make_layers(), curve=(0.0, None, *[1e-6] * 6))
    (figure,) = plot_drift(view_of(gap))
    assert figure.svg.count("<circle") == 1 + 6
    assert list(plot_drift(view_of(make_check()))) == []
