from __future__ import annotations

from rlk_repro.base import errors
from rlk_repro.base.errors import Problem, RlkReproError, SpecError
from tests import ROOT


def test_a_problem_prints_where_what_got_expected_hint() -> None:
    problem = Problem("jobs/x.yaml:3: a.b", "wrong value", got="six", expected="a whole number", hint="write 6")
    assert str(problem) == "jobs/x.yaml:3: a.b: wrong value, got 'six', expected a whole number\n  hint: write 6"
    assert str(Problem("x", "missing")) == "x: missing"
    assert str(Problem("x", "wrong value", got=None)) == "x: wrong value, got None"


def test_an_error_prints_all_its_problems() -> None:
    assert str(SpecError(Problem("a", "missing"), Problem("b", "missing"))) == "a: missing\nb: missing"


def test_exit_codes_are_unique_and_documented() -> None:
    types = [value for value in vars(errors).values() if isinstance(value, type)]
    classes = [item for item in types if issubclass(item, RlkReproError) and item is not RlkReproError]
    codes = [item.exit_code for item in classes] + [errors.EXIT_BUG]
    assert len(set(codes)) == len(codes)
    text = (ROOT / "docs" / "commands.md").read_text()
    for item in classes:
        assert f"`{item.__name__}`" in text
        assert f"| {item.exit_code} |" in text
