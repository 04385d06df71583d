"""Claims as files, and the words that measurements earn."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import SpecError
from rlk_repro.claims.files import BYTES, Claim, MeasureCheck, chosen_rows, find_published, load_claims
from rlk_repro.claims.judge import NO_GPU, is_same_gpu, judge_claim, list_cells
from rlk_repro.claims.results import Basis, Cell, Measurement, RowResult, Word, join_words
from rlk_repro.claims.text import check_lines, list_lines
from rlk_repro.rundir.operator_results import OperatorStatus
from tests.support.claim_examples import CLAIM, MEASURABLE, cell, make_claim, measured, obstructed

H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"
CPU = ""
MIB = 2**20


def judge(gpu: str, *measurements: Measurement, text: str = CLAIM) -> RowResult:
    found: Mapping[Cell, Measurement] = {item.cell: item for item in measurements}
    (row,) = judge_claim(make_claim(text), gpu, found).rows
    return row


def everything(native_s: float = 4.0, triton_s: float = 1.0, native_mib: int = 3) -> tuple[Measurement, ...]:
    return (
        measured("native", native_s, peak_extra_bytes=native_mib * MIB),
        measured("triton", triton_s, peak_extra_bytes=MIB),
    )


def test_every_shipped_claim_loads_and_is_named_as_its_file() -> None:
    claims = load_claims()
    assert len(claims) == 23
    assert [claim.claim for claim in claims] == sorted(claim.claim for claim in claims)
    assert all(claim.doubts for claim in claims)


@pytest.mark.parametrize("claim", load_claims(), ids=lambda claim: claim.claim)
def test_a_shipped_claim_names_its_source_and_only_what_it_defines(claim: Claim) -> None:
    assert claim.source.document or claim.source.thread
    names = [row.row for row in claim.rows]
    assert len(set(names)) == len(names)
    assert {name for row in claim.rows for values in row.published.values() for name in values} <= set(claim.quantities)


@pytest.mark.parametrize(
    "claim", [item for item in load_claims() if isinstance(item.check, MeasureCheck)], ids=lambda claim: claim.claim
)
def test_a_shipped_claim_compares_published_values_that_can_be_measured(claim: Claim) -> None:
    assert isinstance(claim.check, MeasureCheck)
    measurable = MEASURABLE[claim.check.operator]
    assert set(claim.check.settings) == set(measurable.settings)
    assert claim.dtype is not None
    assert all(set(row.shape) == set(measurable.dimensions) for row in claim.rows)
    for comparison in claim.check.compare:
        quantity = claim.quantities[comparison.quantity]
        assert quantity.unit in (BYTES if comparison.kind == "memory" else {"ms", "s", "x"})
        assert quantity.pass_ in measurable.passes
        assert set(comparison.implementations) <= set(measurable.implementations)
        assert set(comparison.rows) <= {row.row for row in claim.rows}
        assert any(find_published(claim, row, comparison) is not None for row in chosen_rows(claim, comparison))


def test_published_memory_follows_from_the_shapes_wherever_the_file_says_what_it_is_made_of() -> None:
    num_checked = 0
    for claim in load_claims():
        for comparison in claim.check.compare if isinstance(claim.check, MeasureCheck) else ():
            if comparison.kind == "memory" and comparison.bytes_per_logit is not None:
                assert comparison.made_of
                for row in chosen_rows(claim, comparison):
                    published = find_published(claim, row, comparison)
                    assert published is not None
                    scale = BYTES[claim.quantities[comparison.quantity].unit]
                    demanded = comparison.bytes_per_logit * row.num_logits / scale
                    assert published == pytest.approx(demanded, rel=2e-3, abs=5e-3), (claim.claim, row.row)
                    num_checked += 1
    assert num_checked > 30


def test_claims_of_unknown_names_are_all_named_with_the_nearest() -> None:
    with pytest.raises(SpecError) as caught:
        load_claims(["ratio-kl-foward", "ratio-kl-forward", "zzz"])
    assert str(caught.value) == (
        "ID: no claim of this name, got 'ratio-kl-foward'\n"
        "  hint: did you mean 'ratio-kl-forward'?\n"
        "ID: no claim of this name, got 'zzz'\n"
        "  hint: rlk-repro claims list prints all claims"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: measure", "kind: meassure",
         "example.yaml:16: check.kind: wrong value, got 'meassure', expected 'measure' or 'not_runnable'\n"
         "  hint: did you mean 'measure'?"),
        ("operator: ratio-kl", "operator: ratio_kl",
         "example.yaml:17: check.operator: wrong value, got 'ratio_kl', expected 'logp', 'sampler-logp', 'ratio-kl', "
         "'grpo-loss', 'linear-logp' or 'sampling'\n  hint: did you mean 'ratio-kl'?"),
    ],
)  # fmt: skip
def test_a_claim_that_cannot_be_is_refused_at_its_line(old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_claim(CLAIM.replace(old, new))
    assert str(caught.value) == message


def test_everything_that_a_comparison_needs_is_measured_once() -> None:
    assert list_cells(make_claim()) == [cell("native"), cell("triton")]


def test_a_cold_row_is_measured_cold_and_warm() -> None:
    claim = make_claim(CLAIM.replace("candidate: triton}", "candidate: triton, is_cold: true}"))
    assert list_cells(claim) == [cell("native"), cell("triton"), cell("native", is_cold=True)]


def test_a_row_whose_every_number_holds_is_reproduced() -> None:
    row = judge(H100, *everything())
    assert (row.word, row.reason) == (Word.REPRODUCED, "")
    assert [(item.published, item.here) for item in row.compared] == [(4.0, 4.0), (3.0, 3.0), (1.0, 1.0)]


@pytest.mark.parametrize("ratio", [3.3, 4.9])
def test_a_ratio_within_its_tolerance_is_reproduced(ratio: float) -> None:
    assert judge(H100, *everything(native_s=ratio)).word is Word.REPRODUCED


@pytest.mark.parametrize("ratio", [3.1, 5.1])
def test_a_ratio_beyond_its_tolerance_is_not_however_much_better(ratio: float) -> None:
    assert judge(H100, *everything(native_s=ratio)).word is Word.NOT_REPRODUCED


def test_absolute_times_are_not_judged() -> None:
    assert judge(H100, *everything(native_s=4000.0, triton_s=1000.0)).word is Word.REPRODUCED


def test_memory_beyond_its_tolerance_fails_the_row() -> None:
    text = CLAIM.replace("peak: 3}", "peak: 300}")
    assert judge(H100, *everything(native_mib=310), text=text).word is Word.NOT_REPRODUCED
    assert judge(H100, *everything(native_mib=303), text=text).word is Word.REPRODUCED


def test_about_nothing_may_be_a_workspace() -> None:
    text = CLAIM.replace("triton: {time: 2, peak: 1}", "triton: {time: 2, peak: 0}")
    assert judge(H100, *everything(), text=text).word is Word.REPRODUCED


def test_without_a_gpu_memory_is_computed_where_the_shape_demands_it_and_speed_is_not_judged() -> None:
    row = judge(CPU)
    assert row.word is Word.ARITHMETIC
    assert row.reason == f"{NO_GPU}; the published memory figure was only compared with a formula; nothing was measured"
    assert [item.basis for item in row.compared if item.here is not None] == [Basis.ARITHMETIC]


def test_without_a_gpu_a_claim_about_speed_alone_is_not_runnable() -> None:
    text = CLAIM[: CLAIM.index("    - {kind: memory")]
    row = judge(CPU, text=text)
    assert row.word is Word.NOT_RUNNABLE
    assert row.reason.startswith(NO_GPU)


def test_values_that_nothing_is_compared_with_keep_a_row_from_being_reproduced_whole() -> None:
    row = judge(H100, *everything(), text=CLAIM.replace("triton: {time: 2", "cuda: {time: 1}, triton: {time: 2"))
    assert (row.word, row.reason) == (Word.PARTLY, "time of cuda is not compared")


def test_an_implementation_that_is_absent_here_is_named() -> None:
    row = judge(H100, everything()[0], obstructed("triton", OperatorStatus.BLOCKED, "cannot be imported (no triton)"))
    assert (row.word, row.reason) == (Word.PARTLY, "triton: cannot be imported (no triton)")


def test_out_of_memory_is_a_result_on_the_published_hardware_only() -> None:
    oom = (obstructed("native", OperatorStatus.OOM), everything()[1])
    assert judge(H100, *oom).word is Word.NOT_REPRODUCED
    elsewhere = judge(H200, *oom)
    assert elsewhere.word is Word.PARTLY
    assert elsewhere.reason == "native ran out of memory here"


def test_a_cold_start_is_held_against_the_first_call_and_the_warm_ratio_is_shown() -> None:
    text = CLAIM.replace("candidate: triton}", "candidate: triton, is_cold: true}")
    row = judge(H100, *everything(native_s=1.1), measured("native", 4.2, is_cold=True), text=text)
    assert row.word is Word.REPRODUCED
    assert (row.compared[0].here, row.compared[0].warm) == pytest.approx((4.2, 1.1))


@pytest.mark.parametrize(
    ("part", "name", "is_same"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H200", "NVIDIA GH200 480GB", False),
        ("B200", "NVIDIA GB200", False),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("MI300X", "AMD Instinct MI300X", True),
        ("MI300", "AMD Instinct MI3005", False),
        ("", "NVIDIA H200", None),
        ("H200", "", None),
    ],
)
def test_hardware_is_the_same_by_a_whole_part_of_its_name(part: str, name: str, is_same: bool | None) -> None:
    assert is_same_gpu(name, part) is is_same


def test_other_hardware_is_named_and_refutes_nothing() -> None:
    from rlk_repro.claims.results import ClaimsCheck

    found = {item.cell: item for item in everything(native_s=40.0)}
    result = judge_claim(make_claim(), H200, found)
    lines = list(check_lines(ClaimsCheck(version="0", results=(result,))))
    assert "  here:      NVIDIA H200, other hardware" in lines
    assert lines[-2:] == [
        "0 reproduced, 0 reproduced in part, 1 not reproduced, 0 arithmetic only, 0 not runnable here (rows)",
        "where the hardware differs from the published one, speed and memory results hold for this machine only",
    ]


def test_a_claim_that_never_runs_gives_the_reason_in_every_row() -> None:
    for claim in load_claims():
        if not isinstance(claim.check, MeasureCheck):
            assert list_cells(claim) == []
            rows = judge_claim(claim, H200, {}).rows
            assert {(row.word, row.reason) for row in rows} == {(Word.NOT_RUNNABLE, claim.check.reason)}


def test_the_list_names_every_claim_with_its_source() -> None:
    text = "\n".join(list_lines(load_claims()))
    assert all(claim.claim in text and str(claim.source) in text for claim in load_claims())


@given(st.lists(st.sampled_from(Word)))
def test_a_failure_outweighs_everything_and_silence_never_reads_as_success(words: list[Word]) -> None:
    word = join_words(words)
    assert (word is Word.NOT_REPRODUCED) == (Word.NOT_REPRODUCED in words)
    assert word is not Word.REPRODUCED or set(words) <= {Word.REPRODUCED, Word.PARTLY}


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_the_word_about_a_ratio_does_not_depend_on_the_direction(published: float, off: float) -> None:
    text = CLAIM[: CLAIM.index("    - {kind: memory")].replace("native: {time: 8", f"native: {{time: {published * 2!r}")
    words = {judge(H100, *everything(native_s=published * factor), text=text).word for factor in (off, 1 / off)}
    assert len(words) == 1


def test_every_measurable_operator_is_used_by_a_claim() -> None:
    used = {claim.check.operator for claim in load_claims() if isinstance(claim.check, MeasureCheck)}
    assert used == set(MEASURABLE)
