from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import SpecError
from rlk_repro.base.yamlfile import format_path, parse_scalar, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.5", 1.5),
        ("-3", -3),
        ("0x1F", 31),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("012", 12),
        ("true", True),
        ("~", None),
        ('"1"', "1"),
        ("2026-11-20", "2026-11-20"),
        ("[1, a]", [1, "a"]),
        ("{a: 1.0}", {"a": 1.0}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_every_key_knows_its_line() -> None:
    source = parse_yaml("x.yaml", b"a: 1\nb:\n  - c: 2\n    d: 3\n")
    assert source.where(("b", 0, "d")) == "x.yaml:4: b[0].d"
    assert source.where(("b", 0, "missing")) == "x.yaml:3: b[0].missing"
    assert source.where(()) == "x.yaml:1"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: 1\na: 2\n", "x.yaml:2: a: key given twice (first on line 1), expected one value"),
        (b"a: &x 1\nb: *x\n", "x.yaml:1: anchors and aliases are not allowed, expected the value itself"),
        (b"a: !!python/name:os.system x\n", "x.yaml:1: a: tag tag:yaml.org,2002:python/name:os.system is not allowed,"
         " expected a plain value"),
        (b"a: .nan\n", "x.yaml:1: a: .nan is not a finite number, expected a finite number"),
        (b"a: 1e999\n", "x.yaml:1: a: 1e999 is too large, expected a finite number"),
        (b"a: \xff\n", "x.yaml:1: not UTF-8 text, expected UTF-8"),
        (b"a: [1\nb: 2\n", "x.yaml:2: not YAML (did not find expected ',' or ']'), expected one YAML document"),
        (b"? [1]\n: 2\n", "x.yaml:1: a key must be text, expected a name"),
        (b'a: "\\ud800"\n', "x.yaml:1: not YAML (found invalid Unicode character escape code), "
         "expected one YAML document"),
        (b"[" * 100, "x.yaml:1: nested too deeply, expected at most 40 levels"),
    ],
)  # fmt: skip
def test_ambiguous_yaml_is_refused_with_its_line(data: bytes, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml("x.yaml", data)
    assert str(caught.value) == message


def test_a_huge_file_is_refused() -> None:
    with pytest.raises(SpecError, match="file is too large"):
        parse_yaml("x.yaml", b"a: 1\n" * 300000)


@given(st.binary(max_size=300))
def test_any_bytes_parse_or_raise_a_located_error(data: bytes) -> None:
    places = ["x.yaml"]
    try:
        parse_yaml("x.yaml", data)
    except SpecError as error:
        places = [problem.where for problem in error.problems]
    assert all(place.startswith("x.yaml") for place in places)


def test_paths_are_formatted_like_code() -> None:
    assert format_path(("a", 0, "b")) == "a[0].b"
