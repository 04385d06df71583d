"""What differs between the variants: the declared switches and the record folders, in every plan that may run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import SpecError
from rlk_repro.base.files import load_json, write_json
from rlk_repro.plan import Plan, Trial
from rlk_repro.replay.recorded import load_result
from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from rlk_repro.rundir.differences import Kind, Started, compare
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import GateStatus
from rlk_repro.spec.values import ENABLED
from rlk_repro.submit import finishing, planning
from rlk_repro.submit.show import plan_lines
from rlk_repro.switches import ENGINES_DIR, LIBRARIES_DIR, OPS_DIR, SWITCH, SWITCH_MODE, SWITCH_OPS
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.differences import find_undeclared, list_differences, read_differences
from tests import ROOT
from tests.support.make_run import finish_run, make_run
from tests.support.run_plans import list_all_plans, make_run_plan
from tests.support.vime_examples import list_plans

REFERENCE = WORKLOADS["reference"]

PLANS = dict([*list_all_plans(), *list_plans()])
EVIDENCE = ROOT / "docs" / "evidence"
PAIRED = sorted(
    path
    for path in EVIDENCE.glob("*.tgz")
    if not re.search("operators|sessions|random|replay|record|027c809|202f0e3|compile", path.name)
)
SWITCHES = {SWITCH, SWITCH_MODE, SWITCH_OPS}
Change = Callable[[Command], Command]


def started(variant: str, argv: str = "train.py --seed 1", **env: str) -> Started:
    number = {"baseline": "00", "enabled": "01"}[variant]
    return Started(trial=f"{number}-p1-{variant}", variant=variant, argv=argv.split(), env=env)


@pytest.mark.parametrize("name", PLANS)
def test_a_shipped_plan_differs_in_the_declared_switches_only(name: str) -> None:
    plan = PLANS[name]
    found = list_differences(plan)
    if not plan.has_enabled or plan.is_crossover:  # a session runs both variants in the same processes
        assert found == ()
        return
    assert {item.name for item in found if item.kind is Kind.SWITCH} == SWITCHES
    engines = {ENGINES_DIR} if plan.run.workload.compares_engines else set()
    assert {item.name for item in found if item.kind is Kind.FOLDER} == {OPS_DIR, LIBRARIES_DIR} | engines
    assert len(found) == 5 + len(engines)
    assert find_undeclared(plan) == []
    values = {item.name: (item.baseline, item.enabled) for item in found}
    assert values[SWITCH_OPS] == ("not set", ",".join(plan.ops))
    assert values[OPS_DIR][0] == "{run_dir}/trials/<nn>-<pair>-baseline/ops"


@pytest.mark.parametrize(
    ("argv", "env", "expected"),
    [
        ("train.py --seed 2", {}, "--seed 1 2"),
        ("train.py --seed 1 --use-tis", {}, "--use-tis not set given"),
        ("train.py", {}, "--seed 1 not set"),
        ("other.py --seed 1", {}, "program train.py other.py"),
        ("train.py --seed 1", {"NCCL_ALGO": "Ring"}, "NCCL_ALGO not set Ring"),
        ("train.py --seed 1", {"RLK_REPRO_ENTROPY_METRIC": "0"}, "RLK_REPRO_ENTROPY_METRIC not set 0"),
        ("train.py --seed 1", {OPS_DIR: "/elsewhere"}, f"{OPS_DIR} not set /elsewhere"),
    ],
)
def test_other_differences_are_not_declared(argv: str, env: dict[str, str], expected: str) -> None:
    (found,) = compare(started("baseline"), started("enabled", argv, **env))
    assert (f"{found.name} {found.baseline} {found.enabled}", found.kind) == (expected, Kind.UNDECLARED)


def test_a_folder_is_one_only_by_the_name_of_its_own_trial() -> None:
    own = compare(started("baseline", X="/r/00-p1-baseline"), started("enabled", X="/r/01-p1-enabled"))
    assert [item.kind for item in own] == [Kind.FOLDER]
    other = compare(started("baseline", X="/r/00-p1-baseline"), started("enabled", X="/r/03-p2-enabled"))
    assert [item.kind for item in other] == [Kind.UNDECLARED]


def test_secrets_are_compared_and_never_shown() -> None:
    first, second = "hf_" + "a1" * 12, "hf_" + "b2" * 12
    found = list(compare(started("baseline", HF_TOKEN=first), started("enabled", HF_TOKEN=second)))
    found += compare(started("baseline", f"t --note {first}"), started("enabled", f"t --note {second}"))
    found += compare(started("baseline", f"t --a 1 --note {first}"), started("enabled", f"t --note {first} --a 1"))
    assert [item.kind for item in found] == [Kind.UNDECLARED] * 3
    assert not any(secret in str(item) for item in found for secret in (first, second))


def break_enabled(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """A reference workload that starts its enabled trials otherwise."""
    real = REFERENCE.trainer_command

    def trainer_command(plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        command = real(plan, trial, run_dir)
        return change(command) if trial.variant == ENABLED else command

    monkeypatch.setattr(REFERENCE, "trainer_command", trainer_command)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda item: dataclasses.replace(item, argv=(*item.argv, "--lr", "1")), "run smoke: --lr: differs between"),
        (lambda item: dataclasses.replace(item, env={**item.env, "TF32": "1"}), "run smoke: TF32: differs between"),
    ],
)
def test_a_plan_whose_variants_differ_in_more_is_refused(
    change: Change, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_run_plan("smoke", "cpu")
    break_enabled(monkeypatch, change)
    with pytest.raises(SpecError, match=expected):
        planning.prepare(planning.Request(run="smoke", hardware="cpu"))
    assert "a difference between the variants is not declared" in "\n".join(plan_lines(plan))


def test_a_report_shows_what_was_recorded_and_the_gate_agrees(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id")
    finish_run(run_dir)
    plan = Plan.load(run_dir.plan)
    trial = next(trial for trial in plan.trials if trial.variant == ENABLED)
    path = run_dir.trial(trial.name).env
    record = load_json(path)
    before = read_differences(plan, run_dir)
    assert before is not None
    assert Kind.UNDECLARED not in {item.kind for item in before}
    write_json(path, {**record, "env": {**record["env"], "NCCL_ALGO": "Ring"}})
    after = read_differences(plan, run_dir)
    assert after is not None
    found = [item for item in after if item.kind is Kind.UNDECLARED]
    assert [(item.name, item.baseline, item.enabled) for item in found] == [("NCCL_ALGO", "not set", "Ring")]
    analysis = analyse(run_dir)
    gate = next(gate for gate in analysis.gates if gate.name == "manifests")
    assert gate.status is GateStatus.FAILED
    context = finishing.report_context(run_dir, run_dir.bundle)
    for text in (render_markdown(analysis, context), render_html(analysis, context)):
        assert "What differs between the variants" in text
        assert "NOT DECLARED: NCCL" in text.replace("\\", "")


@pytest.mark.parametrize("bundle", PAIRED, ids=lambda path: path.name)
def test_the_pairs_of_the_evidence_differed_in_the_switches_only(bundle: Path) -> None:
    analysis, context = load_result(bundle, is_linked=False)
    assert {item.name for item in context.differences if item.kind is Kind.SWITCH} == SWITCHES
    assert Kind.UNDECLARED not in {item.kind for item in context.differences}
    assert "- variants differ in: " in render_markdown(analysis, context)
