from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base import proc
from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, SpecError
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
from rlk_repro.base.yamlfile import format_path, parse_scalar, parse_yaml
from tests.support.waiting import is_written, wait_until

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


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def test_arguments_arrive_as_they_are(weird_name: str, tmp_path: Path) -> None:
    done = proc.run(python("import sys; sys.stdout.write(sys.argv[1])", weird_name), cwd=tmp_path)
    assert done.stdout == weird_name
    assert list(tmp_path.iterdir()) == []


def test_both_pipes_are_drained() -> None:
    code = "import sys; sys.stderr.write('e' * 2**20); sys.stdout.write('o' * 2**20); sys.exit(3)"
    done = proc.run(python(code))
    assert (len(done.stdout), len(done.stderr), done.returncode, done.is_ok) == (2**20, 2**20, 3, False)


def test_a_command_that_hangs_is_killed_with_its_children() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    done = proc.run(python(code), timeout_s=0.5)
    assert done.is_timeout
    assert not done.is_ok
    assert time.monotonic() - began < 10


def test_a_grandchild_that_left_the_group_and_holds_the_pipes_is_not_waited_for() -> None:
    began = time.monotonic()
    done = proc.run(["sh", "-c", "echo out; echo err >&2; setsid sleep 30 & sleep 60"], timeout_s=4)
    assert time.monotonic() - began < 10
    assert (done.is_timeout, done.stdout, done.stderr) == (True, "out\n", "err\n")


def test_an_absent_program_is_named() -> None:
    with pytest.raises(EnvironmentMissing, match="no-such-tool: is not on PATH"):
        proc.run(["no-such-tool"])


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="no such folder"):
        proc.run([sys.executable, "-V"], cwd=tmp_path / "absent")


def test_a_started_process_leads_its_own_group() -> None:
    read, write = os.pipe()
    process = proc.start(python("import time; print('up', flush=True); time.sleep(60)"), output_fd=write)
    os.close(write)
    with os.fdopen(read) as output:
        assert output.readline() == "up\n"
    assert os.getpgid(process.pid) == process.pid
    assert proc.signal_group(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not proc.signal_group(process.pid, signal.SIGKILL)


def test_sigterm_ends_a_shown_command(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    shown = f"from rlk_repro.base import proc\nproc.run_shown({python(code)!r}, timeout_s=60)"
    process = subprocess.Popen(python(shown))
    wait_until(lambda: is_written(pid))
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not proc.signal_process(int(pid.read_text()), signal.SIGKILL)


def test_a_shown_command_past_its_time_is_ended() -> None:
    assert proc.run_shown(["sleep", "60"], timeout_s=0.1) is None
    assert proc.run_shown(["sh", "-c", "exit 3"], timeout_s=20) == 3
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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
