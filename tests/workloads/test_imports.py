"""What the trainer imports is tried in a child before the first trial."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Plan
from rlk_repro.rundir.differences import split_arguments
from rlk_repro.sources import RL_KERNEL, VIME
from rlk_repro.spec.load import load_stack
from rlk_repro.workloads import checkouts
from rlk_repro.workloads.checkouts import SOURCES, require_importable, try_imports, use_checkouts
from rlk_repro.workloads.vime.contract import Contract, load_contract
from tests.support.copied_package import Copy
from tests.support.probe_examples import write_tree
from tests.support.run_plans import make_tier_plan
from tests.support.vime_examples import COMMIT

WHERE = "import vime.backends.megatron_utils.loss"
LOSS = "vime/backends/megatron_utils/loss.py"


@pytest.fixture
def plan() -> Plan:
    return make_tier_plan("module-smoke")


def use(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    write_tree(folder, {"vime/__init__.py": "", "vime/backends/__init__.py": "",
                        "vime/backends/megatron_utils/__init__.py": "", **files})  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def test_modules_that_can_be_imported_give_no_finding(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, **{LOSS: "print('a line of its own')\n"})
    assert list(try_imports(plan)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("assert '2'.startswith('1.'), 'does not support numpy 2.x'", "AssertionError: does not support numpy 2.x"),
        ("import absent_one", "ModuleNotFoundError: No module named 'absent_one'"),
        ("import os; os._exit(7)", "exit code 7"),
    ],
)
def test_an_import_that_ends_otherwise_is_quoted(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    use(tmp_path, monkeypatch, **{LOSS: text})
    (finding,) = try_imports(plan)
    assert (finding.level, finding.where, finding.expected) == (Level.BLOCKING, WHERE, "no error")
    assert finding.found.startswith(words)


def test_a_child_that_does_not_end_is_a_warning(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch, **{LOSS: "import time; time.sleep(60)"})
    monkeypatch.setattr(checkouts, "IMPORT_TIMEOUT_S", 0.3)
    assert list(try_imports(plan)) == [Finding(Level.WARNING, WHERE, "imported within 0.3 s", "not imported yet")]


def test_other_workloads_import_nothing_before_their_trials() -> None:
    assert list(try_imports(make_tier_plan("operators-smoke"))) == []


# Checkouts that the flags name are found by the children of the process, and by nothing else.


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    for source in SOURCES:
        monkeypatch.setenv(source.variable, "")


def test_checkouts_come_first_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/vime", "b/rl_engine"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("VIME_SRC", str(tmp_path / "a"))
    monkeypatch.setenv("RLK_SRC", str(tmp_path / "b"))
    use_checkouts()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [f"{tmp_path}/a", f"{tmp_path}/b", "/inherited"]
    require_importable(VIME, RL_KERNEL)


def test_a_folder_without_the_package_is_refused_and_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_SRC", "/nowhere")
    before = dict(os.environ)
    with pytest.raises(SpecError) as caught:
        use_checkouts()
    assert str(caught.value) == (
        "MEGATRON_SRC: holds no package megatron, got '/nowhere', expected a folder with megatron/"
    )
    assert dict(os.environ) == before


# The recorded arguments of the pinned vime: what they hold, and what an argument list is refused for.


LEAST = ["--rollout-batch-size", "8"]


@pytest.fixture(scope="module")
def contract() -> Contract:
    return load_contract(COMMIT)


@pytest.mark.parametrize("stack", ["2026-07", "vime-host", "example"])
def test_every_stack_with_a_vime_has_its_contract_made_with_its_megatron(stack: str) -> None:
    pins = load_stack(stack).model.pins
    assert load_contract(pins["vime"].commit).megatron_lm == pins["megatron_lm"].commit


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--num-layer", "3"], "x: --num-layer: is unknown to vime 1fc199d9, which would ignore the flag\n"
         "  hint: did you mean '--num-layers'?"),
        (["--num-layers", "many"], "x: --num-layers: has a value of the wrong type, got 'many', expected a whole "
        "number"),
        (["--num-layers", "3", "4"], "x: --num-layers: has the wrong number of values, got '3 4', expected one value"),
        (["--swiglu", "true"], "x: --swiglu: has the wrong number of values, got 'true', expected no value"),
        (["--lr", "fast"], "x: --lr: has a value of the wrong type, got 'fast', expected a number"),
        (["--train-env-vars", "{A: 1}"], "x: --train-env-vars: has a value of the wrong type, got '{A: 1}', expected"
         " JSON"),
        (["--optimizer", "adm"], "x: --optimizer: is not one of the choices, got 'adm', expected one of adam, sgd, "
        "muon, "
         "dist_muon\n  hint: did you mean 'adam'?"),
        (["--seed", "1", "--seed", "2"], "x: --seed: is given twice, expected the flag once"),
    ],
)  # fmt: skip
def test_the_contract_refuses_wrong_flags_and_values(contract: Contract, argv: list[str], problem: str) -> None:
    found = [str(item) for item in contract.find_problems([*LEAST, *argv], "x")]
    assert any(item.startswith(problem) for item in found), found
    assert len(found) == 1


def test_required_flags_must_be_present(contract: Contract) -> None:
    assert [str(item) for item in contract.find_problems([], "x")] == [
        "x: --rollout-batch-size: missing, expected a value"
    ]


def test_flags_and_values_are_distinguished() -> None:
    words = ["--a", "-1", "--b=2=3", "--c", "--d", "x", "y"]
    assert list(split_arguments(words)) == [("--a", ("-1",)), ("--b", ("2=3",)), ("--c", ()), ("--d", ("x", "y"))]
    assert list(split_arguments(["stray"])) == [("", ("stray",))]


def test_a_commit_without_a_contract_is_refused() -> None:
    with pytest.raises(SpecError, match=r"stack: pins.vime: no argument contract for this commit, got '0000"):
        load_contract("0" * 40)


# A second trainer is two modules and a line in each of two tables; no other file knows of it.


FILES = Path(__file__).parent / "second_trainer"
PROFILE = (
    "profile: here\ncluster: local\nhardware: cpu\npreflight: {min_free_disk_gib: 0.01, min_free_memory_gib: 0.01}\n"
)


def test_a_second_trainer_is_measured_sealed_and_read(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "source")
    copy.add(FILES / "spec.py", "rlk_repro/spec/line.py")
    copy.add(FILES / "workload.py", "rlk_repro/workloads/line.py")
    copy.add(FILES / "trainer.py", "rlk_repro/workloads/line_trainer.py")
    table = "rlk_repro/workloads/__init__.py"
    copy.replace(
        table,
        "from rlk_repro.workloads.reference import",
        "from rlk_repro.workloads.line import Line\nfrom rlk_repro.workloads.reference import",
    )
    copy.replace(table, '    "reference": Reference(),', '    "line": Line(),\n    "reference": Reference(),')
    models = "rlk_repro/spec/files.py"
    copy.replace(
        models,
        "from rlk_repro.spec.vime import",
        "from rlk_repro.spec.line import LineWorkload\nfrom rlk_repro.spec.vime import",
    )
    copy.replace(models, "    ReferenceWorkload | ", "    LineWorkload | ReferenceWorkload | ")
    assert copy.touched() == {table: 2, models: 2}

    copy.add(FILES / "run.yaml", "jobs/line.yaml")
    (tmp_path / "here.yaml").write_text(PROFILE)
    runs = {"RLK_REPRO_RUNS": str(tmp_path / "runs")}
    request = ("submit", "--run", "line", "--profile", tmp_path / "here.yaml")
    ran = copy.run(*request, "--wait", cwd=tmp_path, **runs)
    assert ran.returncode == 0, ran.stderr
    (bundle,) = (tmp_path / "runs").rglob("bundle.tgz")
    report = copy.run("report", bundle, "-o", tmp_path / "report", "--json", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    (found,) = json.loads(report.stdout)
    assert found["verdict"] == "inconclusive"
    assert "01-p1-enabled: missing (the trainer wrote no ops file)" in found["headline"]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "a line through 50 points" in page
    assert "These numbers are of a line." in page
