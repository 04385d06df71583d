"""Comparing records of engines: what differs first is named, and what cannot be compared says why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.checks import check_agreement, check_pair
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.resources import data_dir
from rlk_repro.bundle.verify import unpack
from rlk_repro.logs.engines import EngineLog, read_engines
from rlk_repro.plan import Plan
from rlk_repro.rundir.agreement import ENGINES, AgreementCheck, CheckKind, CheckWord, choose_word, list_failures
from rlk_repro.rundir.paths import RunDir, TrialDir
from rlk_repro.spec.agreement import DTYPES, parse_contract
from tests import ROOT

EVIDENCE = ROOT / "docs" / "evidence" / "vime-agreement-h200.tgz"
CONTRACT = (data_dir("manifests") / "contracts" / "agreement.yaml").read_text()
BEGIN = {"event": "begin", "schema": 1, "contract": CONTRACT}
SAMPLE = {"tokens": [5, 6, 7, 1], "loss_mask": [1, 1], "padding": 0}


def make_lines(**changes: Any) -> list[dict[str, Any]]:
    """One step of two engines; ``changes`` are the training's."""
    values = {"sample": SAMPLE, "hash": "ab", "log_probs": [[-1.0, -2.0]], "layer": [1.0, 0.0]} | changes
    common = {"step": 0, "case": "", "dtype": "float32"}
    return [
        {"event": "inputs", "step": 0, "engine": "rollout", "samples": [SAMPLE], "special": {"end": 1, "padding": 0}},
        {"event": "inputs", "step": 0, "engine": "training", "samples": [values["sample"]]},
        {"event": "weights", "step": 0, "engine": "training", "tensors": [["b", "ab"], ["a", values["hash"]]]},
        {"event": "weights", "step": 0, "engine": "rollout", "tensors": [["b", "ab"], ["a", "ab"]]},
        {"event": "log_probs", "engine": "training", "values": values["log_probs"], **common},
        {"event": "log_probs", "engine": "rollout, generated", "values": [[-1.0, -2.0]], **common},
        {"event": "layer", "engine": "training", "point": "layer 0 mlp", "norms": [1.0], "values": [values["layer"]],
         **common},
        {"event": "layer", "engine": "reference", "point": "layer 0 mlp", "norms": [1.0], "values": [[1.0, 0.0]],
         **common},
    ]  # fmt: skip


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def write_and_read(lines: list[dict[str, Any]], begin: dict[str, Any] = BEGIN) -> EngineLog | None:
        folder = TrialDir(tmp_path)
        folder.engines.mkdir(exist_ok=True)
        text = "".join(f"{json.dumps(line)}\n" for line in [begin, *lines])
        (folder.engines / "0.jsonl").write_text(text)
        return read_engines(folder)

    return write_and_read


def check(log: EngineLog | None) -> list[AgreementCheck]:
    return list(check_pair("p1", [("baseline", log), ("enabled", log)]))


def test_equal_engines_pass_every_check_and_so_does_a_difference_within_the_contract(read: Any) -> None:
    checks = check(read(make_lines()))
    assert {item.word for item in checks} == {CheckWord.PASS}
    assert [item.kind.value for item in checks if item.variant == "both"] == ["layers", "log-probs"]
    assert checks[0].found == "4 tokens equal"
    checks = check(read(make_lines(log_probs=[[-1.0, -2.00003]])))
    item = next(item for item in checks if item.kind is CheckKind.LOG_PROBS)
    assert (item.word, item.num, item.num_unequal, item.bound) == (CheckWord.PASS, 2, 1, 1e-4)
    assert item.largest == pytest.approx(3e-5)


@pytest.mark.parametrize(
    ("change", "kind", "found"),
    [
        ({"sample": SAMPLE | {"tokens": [5, 6, 7, 0]}}, "inputs",
         "tokens of sample 0, position 3: rollout 1 (end) against training 0 (padding)"),
        ({"sample": SAMPLE | {"tokens": [5, 6, 7]}}, "inputs", "tokens of sample 0: length 4 against 3"),
        ({"sample": SAMPLE | {"loss_mask": [0, 1]}}, "inputs",
         "loss_mask of sample 0, position 0: rollout 1 against training 0"),
        ({"sample": SAMPLE | {"padding": 2}}, "inputs", "padding in front of sample 0: rollout 0 against training 2"),
        ({"hash": "ac"}, "weights", "a is not equal, the first of 1 such tensor"),
        ({"layer": [1.0, 1e-4]}, "layers", "first outside at layer 0 mlp: relative difference 0.0001"),
        ({"layer": [1.0, None]}, "layers", "first outside at layer 0 mlp: not finite"),
        ({"log_probs": [[-1.0, -2.5]]}, "log-probs",
         "largest 0.5 at sample 0, position 1 of its response, token 1"),
        ({"log_probs": [[-1.0, None]]}, "log-probs", "not finite at sample 0, position 1 of its response, token 1"),
        ({"log_probs": [[-1.0]]}, "log-probs", "the engines give different numbers of tokens"),
    ],
)  # fmt: skip
def test_what_differs_first_is_named(change: dict[str, Any], kind: str, found: str, read: Any) -> None:
    first = list_failures(check(read(make_lines(**change))))[0]
    assert (first.kind.value, first.found) == (kind, found)


def test_unequal_shapes_of_layers_fail_and_empty_records_are_not_measured(read: Any) -> None:
    changes: list[dict[str, Any]] = [{"values": []}, {"values": [[1.0]]}, {"norms": []}]
    for change in changes:
        lines = make_lines()
        lines[6] |= change
        first = list_failures(check(read(lines)))[0]
        assert first.found == "layer 0 mlp: the engines recorded different numbers of rows or columns"
    lines = [{**line, "norms": []} if line["event"] == "layer" else line for line in make_lines(layer=[9.0, 0.0])]
    assert choose_word(check(read(lines))) is CheckWord.FAIL
    lines = [*make_lines()[:4], *(line | {"values": [], "norms": []} for line in make_lines()[4:])]
    empty = [item.kind.value for item in check(read(lines)) if item.word is CheckWord.NOT_MEASURED]
    assert empty[:2] == ["layers", "log-probs"]


def test_training_of_two_trials_is_compared_only_with_known_equal_weights(read: Any) -> None:
    without = [line for line in make_lines() if line["event"] != "weights"]

    def compare(*sides: list[dict[str, Any]]) -> str:
        logs = zip(("baseline", "enabled"), map(read, sides), strict=True)
        return next(item.found for item in check_pair("p1", list(logs)) if item.variant == "both")

    assert compare(without, without) == "bitwise"
    later = [line | {"step": 1} for line in without]
    assert compare(later, later) == "the weights of training are not recorded in both trials"
    assert compare(make_lines(), make_lines(hash="ac")) == "the trials have different weights at this step"
    assert compare(make_lines()[1:], make_lines()[1:]) == "the tokens of a trial are not recorded at this step"


def test_a_case_is_bitwise_or_within_the_contract_or_outside_or_not_measured(read: Any) -> None:
    case = {"event": "log_probs", "step": 0, "engine": "training", "dtype": "float32"}
    lines = [case | {"case": str(gap), "values": [[-1.0, -2.0 - gap]]} for gap in (0.0, 1e-5, 1e-3)]
    lines.append({"event": "skipped", "step": 0, "what": "log_probs", "engine": "training", "case": "alone",
                  "reason": "x"})  # fmt: skip
    found = [item for item in check(read([*make_lines(), *lines])) if item.kind is CheckKind.INVARIANCE][:4]
    assert [item.word.value for item in found] == ["pass", "pass", "fail", "not measured"]
    assert [item.found.partition(":")[0] for item in found[:2]] == ["bitwise", "within the contract"]
    assert found[3].found == "x"
    assert [item.word for item in check(None)] == [CheckWord.NOT_MEASURED] * 2


def test_engines_do_not_agree_where_a_planned_step_left_no_record(read: Any) -> None:
    log = read(make_lines())
    logs = [("baseline", log), ("enabled", log)]
    assert choose_word(list(check_pair("p1", logs, range(1)))) is CheckWord.PASS
    checks = list(check_pair("p1", logs, range(2)))
    assert [item.found for item in checks if item.step == 1] == ["the record lacks this step"] * 2
    assert choose_word(checks) is CheckWord.NOT_MEASURED


def test_damaged_lines_are_skipped_and_another_contract_or_engine_is_refused(read: Any, tmp_path: Path) -> None:
    damaged = read([{"event": "inputs", "step": -1}, *make_lines()])
    assert damaged == replace(read(make_lines()), num_dropped=1)
    found = [item.found for item in check(damaged) if item.word is CheckWord.NOT_MEASURED]
    assert found == ["lines of the record that cannot be read: 1"] * 2
    another = {**make_lines()[0], "engine": "another"}
    for lines, begin, message in (
        ([], {**BEGIN, "contract": "bounds: 7"}, "the agreement contract is not valid"),
        ([], {**BEGIN, "schema": 99}, "newer"),
        ([another], BEGIN, "names an unknown engine"),
    ):
        with pytest.raises(BundleUnreadable, match=message):
            read(lines, begin)
    assert read_engines(TrialDir(tmp_path / "none")) is None


def test_the_shipped_contract_bounds_every_data_type_and_names_its_sources() -> None:
    contract = parse_contract("agreement.yaml", CONTRACT)
    for compares in ("log-probs", "layers"):
        found = [contract.find_bound(compares, dtype) for dtype in DTYPES[1:]]
        assert found == sorted(found, key=lambda bound: bound or 0)  # a narrower type is given more room
        assert None not in found
    assert all(len(bound.source) > 20 for bound in contract.bounds)


def make_routing(engine: str, first: list[list[int]], second: list[list[int]], **more: Any) -> dict[str, Any]:
    """Two layers; each has the experts of four tokens of sample 0."""
    return {
        "event": "routing", "step": 0, "engine": engine, "case": "", "dtype": "bfloat16",
        "tokens": [[0, row] for row in range(4)], "layers": ["layer 0", "layer 1"], "experts": [first, second], **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "word", "found"),
    [
        ([[1, 2]] * 4, [[3, 4]] * 4, "pass", "8 choices of experts equal"),
        ([[2, 1], *[[1, 2]] * 3], [[3, 4]] * 4, "pass", "8 choices of experts equal"),
        ([[1, 5], *[[1, 2]] * 3], [[7, 8], *[[3, 4]] * 3], "pass",
         "6 of 8 choices of experts equal; first at layer 0, sample 0, row 0: expert 2 against 5"),
        ([[1, 5]] * 3 + [[1, 2]], [[3, 4]] * 4, "fail",
         "5 of 8 choices of experts equal; first at layer 0, sample 0, row 0: expert 2 against 5"),
        ([[1, 2]] * 4, [[3, 4], *[[3, 5]] * 3], "fail",
         "5 of 8 choices of experts equal; first at layer 1, sample 0, row 1: expert 4 against 5"),
        # three tokens went to other experts in layer 0; their experts in layer 1 follow from that
        ([[1, 5]] * 2 + [[1, 2]] * 2, [[3, 4], *[[3, 5]] * 2, [3, 4]], "pass",
         "4 of 8 choices of experts equal; first at layer 0, sample 0, row 0: expert 2 against 5"),
        ([[1, 2]] * 3, [[3, 4]] * 4, "not measured", "layer 0: the record lacks the experts of some tokens"),
    ],
)  # fmt: skip
def test_experts_that_engines_choose_themselves_may_differ_for_half_of_the_tokens(
    first: list[list[int]], second: list[list[int]], word: str, found: str, read: Any
) -> None:
    lines = [make_routing("training", [[1, 2]] * 4, [[3, 4]] * 4), make_routing("rollout, prompts", first, second)]
    checks = check(read([{"event": "inputs", "step": 0, "engine": "rollout", "samples": []}, *lines]))
    routing = [item for item in checks if item.kind is CheckKind.ROUTING]
    assert [(item.variant, item.second) for item in routing] == [
        ("baseline", "rollout, prompts"), ("enabled", "rollout, prompts"), ("both", "training, enabled"),
    ]  # fmt: skip
    assert (routing[0].word.value, routing[0].found) == (word, found)
    assert routing[2].word is CheckWord.PASS


def test_one_other_expert_fails_where_the_training_replays_the_generation(read: Any) -> None:
    lines = [
        make_routing("training", [[1, 2]] * 4, [[3, 4]] * 4, is_replayed=True),
        make_routing("rollout, generated", [[1, 2]] * 4, [[3, 4]] * 3 + [[3, 5]]),
    ]
    checks = check(read([{"event": "inputs", "step": 0, "engine": "rollout", "samples": [SAMPLE]}, *lines]))
    item = next(item for item in checks if item.kind is CheckKind.ROUTING)
    assert (item.word, item.bound) == (CheckWord.FAIL, 0)
    assert item.found == "7 of 8 choices of experts equal; first at layer 1, sample 0, row 3: expert 4 against 5"


@pytest.mark.parametrize("kind", ["inputs", "weights", "layer", "log_probs"])
def test_engines_agree_only_if_every_kind_of_record_was_compared(read: Any, kind: str) -> None:
    whole = make_lines()
    assert choose_word(check(read(whole))) is CheckWord.PASS
    for engine in ("training", "rollout", "rollout, generated", "reference"):
        left = [line for line in whole if (line["event"], line["engine"]) != (kind, engine)]
        if left != whole:
            assert choose_word(check(read(left))) is CheckWord.NOT_MEASURED


def write_engines(tmp_path: Path, *cases: dict[str, Any]) -> tuple[Plan, RunDir]:
    """Return sealed evidence whose records of engines are empty log-probs of these cases."""
    common = {"event": "log_probs", "step": 0, "engine": "training", "case": "", "dtype": "float32", "values": []}
    text = "".join(f"{json.dumps(line)}\n" for line in [BEGIN, *({**common, **case} for case in cases)])
    run_dir = unpack(EVIDENCE, tmp_path / "id")
    for trial in run_dir.trial_dirs():
        next(iter(trial.engines_files().values())).write_text(text)
    return Plan.load(run_dir.plan), run_dir


def test_records_of_engines_hold_planned_steps_and_give_a_bounded_number_of_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = write_engines(tmp_path / "late", {"step": 2})
    with pytest.raises(BundleUnreadable, match="records steps that the plan lacks, got 2, expected steps below 2"):
        list(check_agreement(*late))
    cases = [{"engine": name, "case": case} for name in ENGINES for case in ("", "a", "b")]
    many = write_engines(tmp_path / "many", *cases)
    monkeypatch.setattr("rlk_repro.analysis.checks.MAX_CHECKS", len(list(check_agreement(*many))) - 1)
    with pytest.raises(BundleUnreadable, match="give more than"):
        list(check_agreement(*many))
