from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base import logwriter, proc
from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, SpecError
from rlk_repro.base.files import (
    check_schema,
    dump_json,
    dump_json_line,
    load_json,
    parse_json,
    sha256_file,
    write_bytes,
    write_json,
)
from rlk_repro.base.guarded import run_shown
from rlk_repro.base.logwriter import LogWriter
from rlk_repro.base.secrets import Scrubber, scrub_bytes
from rlk_repro.base.units import canonical, format_bytes, format_duration, format_percent
from rlk_repro.base.yamlfile import parse_scalar, parse_yaml

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
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x").startswith("ba7816bf")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[" * 65 + b"]" * 65, "more than 64 levels"),
        (b'{"a":' * 700 + b"1" + b"}" * 700, "more than 64 levels"),
        (b"[" * 100_000, "more than 64 levels"),
        (b"9" * 400, "a number of 400 digits"),
        (b"-" + b"9" * 22, "a number of 23 digits"),
        (b"9" * 400 + b".5", f"{'9' * 40} is too large for a number"),
        (b"1e400", "1e400 is too large for a number"),
        (b"[NaN]", "NaN is not a number"),
        (b'{"a":-Infinity}', "-Infinity is not a number"),
        (b"[" + b"[]," * 400_000 + b"[]]", "400002 lists and objects, at most 400000 are read"),
        (b'"' + b"x" * (4 << 20) + b'"', "4.0 MiB, at most 4.0 MiB are read"),
        (b'{"a": [{"b": 1, "c": 2, "b": 1}]}', "key 'b' is given twice"),
    ],
)
def test_json_that_our_writer_never_writes_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BundleUnreadable) as caught:
        parse_json("x.json", data)
    assert str(caught.value) == f"x.json: not readable as JSON ({reason})"


@pytest.mark.parametrize("value", [json.loads("[" * 64 + "]" * 64), {"sha256": "0" * 64, "x": 1e308}, "\ud800",
                                   [2**64 - 1, -(2**63)], ["12345678901234567890123", "1e999"]])  # fmt: skip
def test_unusual_but_valid_json_is_read(value: Any) -> None:
    assert parse_json("x.json", json.dumps(value).encode()) == value


def test_a_newer_schema_is_refused() -> None:
    check_schema("x", {"schema": 1}, 1)
    values: list[object] = [{"schema": 2}, {}, [], None, {"schema": "1"}, {"schema": True}, {"schema": 0}]
    for value in values:
        with pytest.raises(BundleUnreadable):
            check_schema("x", value, 1)


def test_numbers_are_formatted_for_people() -> None:
    assert [format_duration(x) for x in (0.4, 12.34, 185, 7620)] == ["0.40 s", "12.3 s", "3 min 05 s", "2 h 07 min"]
    assert [format_bytes(x) for x in (512, 1536, 3 * 2**40)] == ["512 B", "1.5 KiB", "3.0 TiB"]
    assert format_percent(0.95) == "-5.00 %"
    assert format_percent(0.9999986) == format_percent(1.0) == "+0.00 %"


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def test_both_pipes_are_drained() -> None:
    code = "import sys; sys.stderr.write('e' * 2**20); sys.stdout.write('o' * 2**20); sys.exit(3)"
    done = proc.run(python(code))
    assert (len(done.stdout), len(done.stderr), done.returncode, done.is_ok) == (2**20, 2**20, 3, False)


def test_a_grandchild_that_left_the_group_and_holds_the_pipes_is_not_waited_for() -> None:
    began = time.monotonic()
    done = proc.run(["sh", "-c", "echo out; echo err >&2; setsid sleep 30 & sleep 60"], timeout_s=2)
    assert time.monotonic() - began < 10
    assert (done.is_timeout, done.is_ok, done.stdout, done.stderr) == (True, False, "out\n", "err\n")


def test_an_absent_program_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="no-such-tool: is not on PATH"):
        proc.run(["no-such-tool"])
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


def test_a_shown_command_past_its_time_is_ended() -> None:
    assert run_shown(["sleep", "60"], timeout_s=1) is None
    assert run_shown(["sh", "-c", "exit 3"], timeout_s=20) == 3


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


# The trainer's output on its way to the log.


STAMP = "2026-11-20T13:45:12.345Z"
TOKEN = b"hf_" + b"a1B2c3D4e5" * 3
KEY = b"-----BEGIN PRIVATE KEY-----\n" + b"MIIEvQIBADANBgkqhkiG9w0BAQ\n" * 3 + b"-----END PRIVATE KEY-----\n"


def write(path: Path, pieces: Sequence[bytes]) -> bytes:
    with LogWriter(path, scrub_bytes, lambda: STAMP) as writer:
        for piece in pieces:
            writer.feed(piece)
    return path.read_bytes()


def unstamped(data: bytes) -> bytes:
    stamp = STAMP.encode() + b" "
    assert all(line.startswith(stamp) for line in data.split(b"\n")[:-1])
    return data.replace(stamp, b"")


def test_every_physical_line_is_stamped_when_it_is_complete(tmp_path: Path) -> None:
    numbers = count()
    with LogWriter(tmp_path / "log", scrub_bytes, lambda: str(next(numbers))) as writer:
        assert writer.feed(b"one\ntw") == b"one\n"
        assert writer.feed(b"o\rthree") == b""
        assert writer.feed(b"\n\nfour\n") == b"two\rthree\n\nfour\n"
    assert (tmp_path / "log").read_bytes() == b"0 one\n1 two\rthree\n1 \n1 four\n"


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_nothing_is_lost_however_the_output_is_cut(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    with LogWriter(path, lambda line: line, lambda: STAMP) as writer:
        for piece in pieces:
            writer.feed(piece)
    lines = b"".join(pieces).split(b"\n")
    stamp = STAMP.encode() + b" "
    assert path.read_bytes() == b"\n".join(stamp + line if line or index + 1 < len(lines) else b""
                                           for index, line in enumerate(lines))  # fmt: skip


def test_a_token_cut_by_the_pipe_is_redacted(tmp_path: Path) -> None:
    line = b"login " + TOKEN + b" done\n"
    for cut in range(1, len(TOKEN) + 8):
        written = write(tmp_path / f"log{cut}", [line[:cut], line[cut:]])
        assert unstamped(written) == b"login <redacted:huggingface-token> done\n"


def test_a_known_value_is_redacted_and_the_watcher_sees_no_more(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", Scrubber(["correct horse"]).bytes, lambda: STAMP) as writer:
        seen = writer.feed(b"say correct horse\n")
    assert seen == writer.tail == b"say <redacted:known-value>\n"


def test_a_private_key_is_redacted_whole_however_its_lines_arrive(tmp_path: Path) -> None:
    text = b"before\n" + KEY + b"after\n"
    for cut in range(7, len(KEY) + 7, 7):
        written = unstamped(write(tmp_path / f"log{cut}", [text[:cut], text[cut:]]))
        assert written == b"before\n<redacted:private-key>\nafter\n"


def test_a_private_key_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logwriter, "MAX_HELD_BYTES", 1000)
    pieces = [b"-----BEGIN PRIVATE KEY-----\n", *[b"text that goes on\n"] * 100]
    with LogWriter(tmp_path / "log", scrub_bytes, lambda: STAMP) as writer:
        written = b"".join(writer.feed(piece) for piece in pieces)
    assert written.count(b"text that goes on\n") > 30


def test_an_endless_line_is_written_in_pieces_with_one_stamp(tmp_path: Path) -> None:
    progress = b"\r 50% |####    |" * 200_000
    with LogWriter(tmp_path / "log", scrub_bytes, lambda: STAMP) as writer:
        for start in range(0, len(progress), 65536):
            writer.feed(progress[start : start + 65536])
            assert len(writer._held) <= logwriter.MAX_HELD_BYTES + 65536
        writer.feed(b"\nnext\n")
    assert (tmp_path / "log").read_bytes() == f"{STAMP} ".encode() + progress + f"\n{STAMP} next\n".encode()


@pytest.mark.parametrize("offset", range(-45, 5, 7))
def test_an_endless_line_is_not_cut_through_a_token(tmp_path: Path, offset: int) -> None:
    where = logwriter.MAX_HELD_BYTES - logwriter._NEAR_BYTES + offset
    line = b"x," * (where // 2) + b"Bearer " + TOKEN + b"," + b"y," * 4096
    written = write(tmp_path / "log", [line[: logwriter.MAX_HELD_BYTES + 1], line[logwriter.MAX_HELD_BYTES + 1 :]])
    assert TOKEN not in written
    assert written.count(b"<redacted") == 1


def test_the_tail_is_bounded(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "log", scrub_bytes, lambda: STAMP) as writer:
        for _ in range(20):
            writer.feed(b"z" * 9_999 + b"\n")
        assert writer.tail == (b"z" * 9_999 + b"\n")[-(logwriter.TAIL_BYTES % 10_000) :] + (b"z" * 9_999 + b"\n") * 6
