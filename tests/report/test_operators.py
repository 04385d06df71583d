"""An operator run goes from log to report: it compares each cell with vime, names what ran, and judges no variants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.report.blocks import Tone
from rlk_repro.report.checks import describe_agreement, plot_drift
from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from rlk_repro.report.operators import describe_speedup
from rlk_repro.report.sections import choose_tone
from rlk_repro.report.view import make_view
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord, choose_word, describe_checks
from rlk_repro.rundir.operator_results import OperatorKind, OperatorResult, OperatorStatus
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, VerdictWord
from tests.support.analysis_examples import CELLS, EXAMPLES, LOGP, MadeCell, make_operator_run, operators


def find(analysis: Analysis, operator: str, implementation: str) -> OperatorResult:
    (found,) = [
        item for item in analysis.operators if (item.case.operator, item.implementation) == (operator, implementation)
    ]
    return found


def test_both_processes_stand_side_by_side_and_each_is_relative_to_its_own_reference() -> None:
    cell = find(operators(), "logp", "rl-kernel-online")
    assert [trial.trial for trial in cell.trials] == ["00-c1-baseline", "01-c1-baseline"]
    assert [trial.median_s for trial in cell.trials] == [0.0018, 0.001818]
    assert [trial.speedup for trial in cell.trials] == pytest.approx([7.7777, 7.7777], rel=1e-4)
    assert [trial.num_calls for trial in cell.trials] == [6, 6]
    assert cell.process_spread == pytest.approx(0.01)
    assert cell.trials[0].floor_fraction == pytest.approx(0.0013 / 0.0018)


def test_a_cell_that_did_not_pass_keeps_status_and_reason_without_numbers() -> None:
    found = {(item.case.operator, item.implementation): item for item in operators().operators}
    assert found["logp", "liger"].status is OperatorStatus.BLOCKED
    assert found["ratio_kl", "torch-compile"].status is OperatorStatus.OOM
    assert found["linear_logp", "cut-cross-entropy"].reason == "CompilationError: at 12:8"
    assert {trial.median_s for trial in found["logp", "liger"].trials} == {None}


def test_damaged_records_are_counted_in_their_trial(tmp_path: Path) -> None:
    def damage(run_dir: RunDir) -> None:
        log = run_dir.trial("00-c1-baseline").stdout
        log.write_text(log.read_text().replace('"sweep":1', '"sweep":-1', 1))

    analysis = analyse(make_operator_run(tmp_path / "id", change=damage))
    assert [trial.rejects for trial in analysis.trials] == [{"operators: not an operator record": 1}, {}]
    assert find(analysis, "logp", "vime").trials[0].num_calls == 3
    assert "00-c1-baseline: 1 × operators: not an operator record" in render_html(analysis)


def test_one_process_that_ran_native_code_makes_the_cell_native(tmp_path: Path) -> None:
    def degrade(run_dir: RunDir) -> None:
        log = run_dir.trial("01-c1-baseline").stdout
        log.write_text(log.read_text().replace('"kind":"fused"', '"kind":"native"'))

    analysis = analyse(make_operator_run(tmp_path / "id", change=degrade))
    assert find(analysis, "logp", "rl-kernel-online").kind is OperatorKind.NATIVE


def test_a_failed_check_removes_the_times(tmp_path: Path) -> None:
    def spoil(run_dir: RunDir) -> None:
        for name in ("00-c1-baseline", "01-c1-baseline"):
            log = run_dir.trial(name).stdout
            head, _, tail = log.read_text().rpartition('"reason":"","status":"pass"')
            log.write_text(head + '"reason":"returned values that are not finite","status":"failed"' + tail)

    cell = find(analyse(make_operator_run(tmp_path / "id", change=spoil)), "linear_logp", "rl-kernel")
    assert (cell.status, cell.reason) == (OperatorStatus.FAILED, "returned values that are not finite")
    assert {trial.median_s for trial in cell.trials} == {None}


def test_without_vime_no_speedup_is_computed(tmp_path: Path) -> None:
    blocked = MadeCell(case=LOGP, implementation="vime", kind="vime", status="blocked", reason="no vime here")
    analysis = analyse(make_operator_run(tmp_path / "id", (blocked, CELLS[1])))
    assert describe_speedup(find(analysis, "logp", "rl-kernel-online")) == ""
    assert "not measured, so no speedup is known: blocked (no vime here)" in render_markdown(analysis)


def test_a_process_without_a_log_does_not_affect_the_other_process(tmp_path: Path) -> None:
    def lose(run_dir: RunDir) -> None:
        run_dir.trial("01-c1-baseline").stdout.unlink()

    analysis = analyse(make_operator_run(tmp_path / "id", change=lose))
    cell = find(analysis, "logp", "vime")
    assert len(cell.trials) == 1
    assert cell.process_spread is None


# The section on engines, the matrix, the drawing of where drift starts, and the column of an index.


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
        *("fail", "not measured", "not measured")
    ]


def test_a_step_that_failed_earlier_comes_first_and_of_a_step_the_inputs() -> None:
    later = replace(FAILED, step=2)
    early = make_check(word=CheckWord.FAIL, found="far apart", step=1)
    assert "tokens of sample" in describe_checks([early, later, FAILED])
    assert "far apart" in describe_checks([early, later])


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        (("baseline", "enabled"), "in both variants alike, so RL-Kernel is not the cause"),
        (("baseline",), "only in baseline, so RL-Kernel is not the cause"),
        (("enabled",), "only in enabled: RL-Kernel may be the cause"),
    ],
)
def test_a_failed_agreement_says_whether_rl_kernel_is_the_cause(variants: tuple[str, ...], said: str) -> None:
    failed = [make_layers(variant=variant, word=CheckWord.FAIL) for variant in variants]
    failed = [replace(item, bound=2.5e-7) for item in failed]
    answer = describe_agreement(make_view(make_analysis((*failed, make_check()))))
    number = f"{len(failed)} of {len(failed) + 1} checks failed"
    first = "layer 0 residual by 3e-05 % between training and reference (limit 2.5e-05 %)"
    assert answer == f"{number}, {said}; first: {first}"


def test_a_failed_agreement_is_bad_even_where_rl_kernel_did_not_run() -> None:
    assert choose_tone(make_analysis(BOTH, "all-fallback")) is Tone.OPEN
    assert choose_tone(make_analysis((*BOTH, FAILED), "all-fallback")) is Tone.BAD


def test_engines_that_are_equal_everywhere_draw_nothing_and_a_gap_is_left_out() -> None:
    same = replace(make_layers(), curve=(0.0,) * 8)
    (empty,) = plot_drift(make_view(make_analysis((same,))))
    assert (empty.svg, empty.caption) == ("", "Between these engines no layer differs: training / reference.")
    gap = replace(make_layers(), curve=(0.0, None, *[1e-6] * 6))
    (figure,) = plot_drift(make_view(make_analysis((gap,))))
    assert figure.svg.count("<circle") == 1 + 6
    assert list(plot_drift(make_view(make_analysis((make_check(),))))) == []
