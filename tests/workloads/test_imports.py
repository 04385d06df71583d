"""What the trainer imports is tried in a child before the first trial; all that is missing is named at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Plan
from rlk_repro.workloads import imports
from rlk_repro.workloads.imports import find_absent, try_imports
from tests.support.probe_examples import write_tree
from tests.support.tier_examples import make_tier_plan

WHERE = "import vime.backends.megatron_utils.loss"
LOSS = "vime/backends/megatron_utils/loss.py"


@pytest.fixture
def plan() -> Plan:
    return make_tier_plan("module-smoke")


def use(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    write_tree(folder, {"vime/__init__.py": "", "vime/backends/__init__.py": "",
                        "vime/backends/megatron_utils/__init__.py": "", **files})  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def test_everything_missing_is_in_one_finding_with_the_line_that_installs_it(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import absent_one\nfrom absent_two.sub import Base\nclass Own(Base): ...\nimport json, absent_three\n"
    use(tmp_path, monkeypatch, **{LOSS: text})
    assert list(try_imports(plan)) == [
        Finding(
            Level.BLOCKING,
            WHERE,
            "all modules installed (by pip install absent-one absent-three absent-two)",
            "not installed: absent_one, absent_three, absent_two",
        )
    ]


def test_modules_that_can_be_imported_give_no_finding(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, **{LOSS: "print('a line of its own')\n"})
    assert list(try_imports(plan)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("assert '2'.startswith('1.'), 'does not support numpy 2.x'", "AssertionError: does not support numpy 2.x"),
        ("from json import no_such_name", "ImportError: cannot import name 'no_such_name' from 'json'"),
        ("import os; os._exit(7)", "exit code 7"),
        ("raise ModuleNotFoundError('for a reason of its own')", "ModuleNotFoundError: for a reason of its own"),
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
    monkeypatch.setattr(imports, "IMPORT_TIMEOUT_S", 0.3)
    assert list(try_imports(plan)) == [Finding(Level.WARNING, WHERE, "imported within 0.3 s", "not imported yet")]


def test_other_workloads_import_nothing_before_their_trials() -> None:
    assert list(try_imports(make_tier_plan("operators-smoke"))) == []


def test_a_missing_module_blocks() -> None:
    found = list(find_absent(("json", "no_such_module")))
    assert found == [Finding(Level.BLOCKING, "python module no_such_module", "installed", "missing")]
