"""An operator run goes from log to report: it compares each cell with vime, names what ran, and judges no variants."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import dump_json
from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from rlk_repro.report.operators import describe_case, describe_memory, describe_speedup, format_ms
from rlk_repro.report.plots import make_figures
from rlk_repro.report.terminal import print_summary
from rlk_repro.report.view import make_view
from rlk_repro.rundir.operator_results import OperatorCase, OperatorKind, OperatorResult, OperatorStatus
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, VerdictWord
from tests.support.analysis_examples import small
from tests.support.operator_examples import CELLS, LOGP, MadeCell, hostile_operators, make_operator_run, operators


def find(analysis: Analysis, operator: str, implementation: str) -> OperatorResult:
    (found,) = [
        item for item in analysis.operators if (item.case.operator, item.implementation) == (operator, implementation)
    ]
    return found


def render_terminal(analysis: Analysis, width: int) -> str:
    stream = io.StringIO()
    print_summary(analysis, Console(file=stream, width=width, highlight=False, no_color=True))
    return stream.getvalue()


def test_both_processes_stand_side_by_side_and_each_is_relative_to_its_own_reference() -> None:
    cell = find(operators(), "logp", "rl-kernel-online")
    assert [trial.trial for trial in cell.trials] == ["00-c1-baseline", "01-c1-baseline"]
    assert [trial.median_s for trial in cell.trials] == [0.0018, 0.001818]
    assert [trial.speedup for trial in cell.trials] == pytest.approx([7.7777, 7.7777], rel=1e-4)
    assert [trial.num_calls for trial in cell.trials] == [6, 6]
    assert cell.process_spread == pytest.approx(0.01)
    assert cell.trials[0].floor_fraction == pytest.approx(0.0013 / 0.0018)


def test_an_operator_run_compares_no_variants_and_says_so() -> None:
    analysis = operators()
    assert analysis.verdict.word is VerdictWord.NO_COMPARISON
    assert (analysis.effects, analysis.gates) == ((), ())
    assert analysis.verdict.headline == (
        "operators are measured one by one: no variants are compared, and nothing is said about a trainer's speed"
    )


def test_a_cell_that_did_not_pass_keeps_status_and_reason_without_numbers() -> None:
    found = {(item.case.operator, item.implementation): item for item in operators().operators}
    assert found["logp", "liger"].status is OperatorStatus.BLOCKED
    assert found["ratio_kl", "torch-compile"].status is OperatorStatus.OOM
    assert found["linear_logp", "cut-cross-entropy"].reason == "CompilationError: at 12:8"
    assert {trial.median_s for trial in found["logp", "liger"].trials} == {None}


def test_the_analysis_reads_back_as_written() -> None:
    analysis = operators()
    assert Analysis.from_json(json.loads(dump_json(analysis.to_json()))) == analysis


def test_runs_without_operators_have_no_such_field() -> None:
    assert "operators" not in small().to_json()


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
    assert "not measured, so no speedup is known: blocked (no vime here)" in render_terminal(analysis, 120)


def test_a_process_without_a_log_does_not_affect_the_other_process(tmp_path: Path) -> None:
    def lose(run_dir: RunDir) -> None:
        run_dir.trial("01-c1-baseline").stdout.unlink()

    analysis = analyse(make_operator_run(tmp_path / "id", change=lose))
    cell = find(analysis, "logp", "vime")
    assert len(cell.trials) == 1
    assert cell.process_spread is None


def test_the_table_says_what_ran_and_how_fast() -> None:
    lines = render_markdown(operators()).splitlines()
    assert "**logp, forward: 9,216 tokens, vocabulary 151,936, float32**" in lines
    assert (
        "| `rl-kernel-online` | fused | pass | 1.800 | 1.818 | 1.0 % | 1.0 % | 7.78 | 0 B | 1.7e-06 | 72 % |" in lines
    )
    assert any(line.startswith("| `rl-kernel-native` | native | pass | 15.00 | 15.15 |") for line in lines)


def test_native_is_never_called_fused_in_any_format() -> None:
    analysis = operators()
    for text in (render_markdown(analysis), render_html(analysis), render_terminal(analysis, 120)):
        rows = [line for line in text.splitlines() if "rl-kernel-native" in line and "<svg" not in line]
        assert rows
        assert all("native" in row.replace("rl-kernel-native", "") for row in rows)
        assert not any("fused" in row for row in rows)


def test_a_kernel_is_shown_by_its_own_name() -> None:
    page = render_html(operators())
    assert ">fused_logp_online_kernel</td>" in page
    assert "anonymous namespace" not in page


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_every_case_and_each_reason_once(width: int) -> None:
    text = render_terminal(operators(), width)
    assert text.count("liger_kernel is not installed") == 1
    for operator in ("logp", "ratio_kl", "linear_logp"):
        assert f"\n{operator}, forward" in text
    assert "\nNO COMPARISON\n" in text
    assert "Gates" not in text


def test_there_is_one_plot_per_operator_and_the_reference_is_its_line_at_one() -> None:
    figures = make_figures(make_view(operators()))
    titles = [figure.title for figure in figures]
    assert titles == [f"{name}: speed relative to vime" for name in ("logp", "ratio_kl", "linear_logp")]
    assert "rl-kernel-online: 7.78" in figures[0].svg
    assert not any("<title>vime:" in figure.svg for figure in figures)
    assert all(figure.svg.count("<circle") + figure.svg.count("<polygon") >= 2 for figure in figures)


def test_hostile_texts_do_not_become_markup() -> None:
    assert "<script>" not in render_html(hostile_operators())
    outside_code = re.sub(r"(`+).+?\1", "", render_markdown(hostile_operators()))
    assert "<script>" not in outside_code.replace(r"\<script\>", "")
    assert "\x1b" not in render_terminal(hostile_operators(), 120)


def test_cases_times_and_memory_are_shown_for_people() -> None:
    case = OperatorCase(operator="linear_logp", num_tokens=4096, vocab_size=151936, hidden_size=2048, dtype="bfloat16",
                        density=0.5, work="forward_backward")  # fmt: skip
    assert describe_case(case) == (
        "linear_logp, forward and backward: 4,096 tokens, hidden 2,048, vocabulary 151,936, bfloat16, "
        "the loss uses 50 % of the tokens"
    )
    assert [format_ms(value) for value in (1.234e-5, 0.0044801, 0.5321, 12.0)] == [
        "0.01234",
        "4.480",
        "532.1",
        "12,000",
    ]
    assert describe_memory(find(operators(), "logp", "vime")) == "5.2 GiB"
