from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import (
    check_schema,
    dump_json,
    dump_json_line,
    load_json,
    sha256_file,
    write_bytes,
    write_json,
)
from rlk_repro.base.units import canonical, format_bytes, format_duration, format_percent

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_dumping_again_what_was_dumped_gives_the_same_bytes(value: object) -> None:
    data = dump_json(value)
    assert dump_json(json.loads(data)) == data
    assert "\n" not in dump_json_line(value)


def test_floats_keep_12_digits_and_drop_digits_that_differ_between_machines() -> None:
    assert dump_json(0.1 + 0.2) == b"0.3\n"
    assert dump_json([1 / 3, math.nan, -math.inf]) == b"[\n 0.333333333333,\n null,\n null\n]\n"
    assert canonical(1234567890123.456) == 1234567890120.0


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new folder" / "a.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_bytes(path, b"half")
    assert load_json(path) == {"a": 1}
    assert [item.name for item in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100000])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(BundleUnreadable, match=r"x\.json: not readable as JSON"):
        load_json(path)


def test_a_newer_schema_is_refused() -> None:
    check_schema("x", {"schema": 1}, 1)
    values: list[object] = [{"schema": 2}, {}, [], None, {"schema": "1"}, {"schema": True}, {"schema": 0}]
    for value in values:
        with pytest.raises(BundleUnreadable):
            check_schema("x", value, 1)


def test_hash_of_a_file_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x").startswith("ba7816bf")


def test_numbers_are_formatted_for_people() -> None:
    assert [format_duration(x) for x in (0.4, 12.34, 185, 7620)] == ["0.40 s", "12.3 s", "3 min 05 s", "2 h 07 min"]
    assert [format_bytes(x) for x in (512, 1536, 3 * 2**40)] == ["512 B", "1.5 KiB", "3.0 TiB"]
    assert format_percent(0.95) == "-5.00 %"
    assert format_percent(0.9999986) == format_percent(1.0) == "+0.00 %"
