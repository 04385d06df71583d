"""These inputs once ended in a traceback: numbers of 400 digits, 700 levels, folders for files, patterns of layers."""

from pathlib import Path

import pytest

from rlk_repro.base.errors import BundleUnreadable, SpecError
from rlk_repro.base.files import load_json, parse_json
from rlk_repro.logs.ops import read_ops
from rlk_repro.rundir.paths import RunDir, TrialDir
from rlk_repro.spec.layers import LayerCount, read_layer_pattern
from tests.security import hostile
from tests.security.sandbox import Sandbox

PLACE = "workload.model.arguments.moe-layer-freq"
VIME = (
    *("submit", "--run", "qwen3-30b-a3b", "--stack", "2026-07", "--hardware", "h200"),
    *("--cluster", "slurm", "--profile", "generic-h200", "--dry-run"),
)


@pytest.mark.parametrize(
    "value",
    [
        "no", '"[1"', '"[1]]*48"', '"[1]*400000000"', f'"[1]*{10**400}"', '"((("', '"[1]*48*[1]"', '"[1]+1"',
        '"[x]*48"', '"[2]*48"', '"[1]*47"', "true", "1.5", "0", "-1", '"[1].__class__"', '"[1]*-48"', "[1, 1]",
        f'"{"[1]+" * 390}[1]"',
    ],
)  # fmt: skip
def test_an_invalid_layer_pattern_is_refused(value: str, sandbox: Sandbox) -> None:
    outcome = sandbox.run(*VIME, "--set", f"{PLACE}={value}")
    assert outcome.code == 2, outcome.err
    assert f"--set {PLACE}: " in outcome.err
    assert outcome.peak_bytes < 300 << 20


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[0]*1+[1]*45", LayerCount(46, 45)),
        ("([0]*3+[1])*12", LayerCount(48, 12)),
        (" [0, 1]*24", LayerCount(48, 24)),
        ("[1]*400000000", LayerCount(400_000_000, 400_000_000)),
        ("[]", LayerCount(0, 0)),
        ("[1]**2", None),
        ("[True]", None),
        ("[1]*1.5", None),
        ("[1" * 400, None),
        ("(" * 1000, None),
        ("", None),
    ],
)
def test_layers_are_counted(text: str, found: LayerCount | None) -> None:
    assert read_layer_pattern(text) == found


@pytest.mark.parametrize(
    ("data", "reason"),
    [
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
    ],
)
def test_json_that_our_writer_never_writes_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BundleUnreadable) as caught:
        parse_json("x.json", data)
    assert str(caught.value) == f"x.json: not readable as JSON ({reason})"


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"[" * 64 + b"]" * 64, None),
        (b'{"sha256":"%s","x":1e308}' % (b"0" * 64), {"sha256": "0" * 64, "x": 1e308}),
        (b"[18446744073709551615, -9223372036854775808]", [2**64 - 1, -(2**63)]),
        (b'["12345678901234567890123", "1e999"]', ["12345678901234567890123", "1e999"]),
        (b'"\\ud800"', "\ud800"),
    ],
)
def test_unusual_but_valid_json_is_read(data: bytes, value: object) -> None:
    found = parse_json("x.json", data)
    assert value is None or found == value


def test_a_folder_or_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path / "00-p1-baseline")
    folder.ops_file(0).mkdir(parents=True)
    assert read_ops(folder).ranks == ()
    hostile.as_pipe("x.json")(RunDir(tmp_path))
    for path in (tmp_path, tmp_path / "x.json"):
        with pytest.raises(BundleUnreadable):
            load_json(path)


def test_a_report_into_a_file_names_it(sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    target = case / "file"
    target.write_text("mine")
    outcome = sandbox.run("report", honest.bundle, "-o", target)
    assert (outcome.code, target.read_text()) == (3, "mine")
    assert f"{target}: cannot be written (File exists)" in outcome.err


def test_steps_that_no_analysis_can_hold_are_refused_with_their_line() -> None:
    from tests.support.make_run import Recipe, make_plan_for

    with pytest.raises(SpecError, match=r"measure\.scored_steps: 12 trials of 5002 steps, got 5000"):
        make_plan_for(Recipe(settings=("measure.scored_steps=5000", "measure.pairs=6", "measure.warmup_steps=2")))
