"""What a reader holds and says is bounded, and what no writer of ours writes is refused; see ``test_corpus``."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.checks import check_agreement
from rlk_repro.base.errors import BundleUnreadable, SpecError
from rlk_repro.base.files import parse_json
from rlk_repro.base.findings import MAX_FINDINGS, Finding, Level, limit_findings
from rlk_repro.bundle import gzip_stream
from rlk_repro.bundle.archive import ArchiveReader
from rlk_repro.bundle.gzip_stream import LIMITS, Limits
from rlk_repro.bundle.seal import unpack
from rlk_repro.logs.metrics import metric_series
from rlk_repro.logs.ops import MAX_METRICS, read_ops
from rlk_repro.logs.vime import parse_log
from rlk_repro.plan import Plan
from rlk_repro.rundir.agreement import ENGINES
from rlk_repro.rundir.manifest import Manifest, diff_nodes
from rlk_repro.rundir.paths import RunDir, TrialDir
from rlk_repro.spec.layers import LayerCount, read_layer_pattern
from tests.security.corpus import CONTRACT, heavy_changes
from tests.security.hostile import EVIDENCE, PREFIX, begin, engine, make_bundle, step
from tests.security.sandbox import Sandbox
from tests.support.make_run import Recipe, make_plan_for, verify_bundle

PLACE = "workload.model.arguments.moe-layer-freq"
VIME = (
    *("submit", "--run", "qwen3-30b-a3b", "--stack", "2026-07", "--hardware", "h200"),
    *("--cluster", "slurm", "--profile", "generic-h200", "--dry-run"),
)


def test_a_small_archive_holds_few_lines_and_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\n" * 2000
    blocks = tarfile.TarInfo("log")
    blocks.size = len(data)
    path = tmp_path / "lines.tgz"
    path.write_bytes(gzip.compress(blocks.tobuf() + data + bytes(-len(data) % 512 + 1024), 9))
    for limits, said in (
        (Limits(small_num_lines=2000), ""),
        (Limits(small_num_lines=1999), "refused: too many lines, expected at most 1999 in a file of"),
        (Limits(small_num_members=1), "refused: too many members, expected at most 1"),
        (Limits(small_file_bytes=0, small_num_members=1, small_num_lines=1), ""),
    ):
        monkeypatch.setattr(gzip_stream, "LIMITS", limits)
        with path.open("rb") as stream:
            if not said:
                list(ArchiveReader(stream, str(path)))
                continue
            with pytest.raises(BundleUnreadable, match=said):
                list(ArchiveReader(stream, str(path)))


def test_what_an_archive_may_hold_grows_with_its_size() -> None:
    sizes = [LIMITS.most_bytes(size) for size in (10**6, 11 << 20, 1 << 40)]
    assert sizes == [32 << 20, (32 + 2000) << 20, LIMITS.total_bytes]


def test_many_files_below_many_folders_are_registered_once(sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    _, bundle = make_bundle(honest, case, heavy_changes()["files: 5000 480 folders deep"])
    outcome = sandbox.run("inspect", bundle)
    assert (outcome.is_bug, outcome.cpu_s < 5) == (False, True)


def test_the_cost_of_metrics_follows_the_printed_lines(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_bytes(b"".join(PREFIX + b"step %d: {'train/loss': %d}\n" % (step, step) for step in (0, 1, 4, 7)))
    series = metric_series(parse_log(log), num_rollouts=4, num_steps_per_rollout=2)["loss"]
    assert [sample and (sample.value, sample.line) for sample in series] == [(0.5, 2), None, None, None]
    metric_series(parse_log(log), num_rollouts=4, num_steps_per_rollout=10**9)


def test_findings_are_counted_up_to_a_limit_and_the_most_serious_are_listed(tmp_path: Path, honest: RunDir) -> None:
    first = Manifest(node="a", sections={"environment": {f"A{number}": 1 for number in range(600)}})
    found = list(diff_nodes([first, *(Manifest(node=f"b{number}", sections={}) for number in range(2000))]))
    assert (len(found), str(found[-1])) == (
        2 * 600 + 1,
        f"blocking: nodes: expected nodes alike, found more than {MAX_FINDINGS} differences up to node b1; "
        "later nodes were not compared",
    )
    alike = Manifest(node="c", sections=first.sections)
    assert list(diff_nodes([first, alike, alike])) == []
    many = [Finding(Level.INFO, f"{number:05}", "", "") for number in range(2 * MAX_FINDINGS)]
    listed = limit_findings([*many, Finding(Level.BLOCKING, "x", "", "")])
    said = f"info: findings: expected at most {MAX_FINDINGS}, found {MAX_FINDINGS + 1} more, not listed"
    assert (len(listed), listed[0].where, str(listed[-1])) == (MAX_FINDINGS + 1, "x", said)
    _, bundle = make_bundle(honest, tmp_path, heavy_changes()["checksums: empty lines"])
    wrong = verify_bundle(bundle)
    assert (len(wrong), wrong[-1].where) == (MAX_FINDINGS + 1, "findings")


def test_a_trial_has_a_limited_number_of_timers(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path / "00-p1-baseline")
    folder.ops.mkdir(parents=True)
    lines = (step(b'"t#":1').replace(b"#", b"%d" % number) for number in range(MAX_METRICS + 2))
    folder.ops_file(0).write_bytes(b"".join(lines))
    log = read_ops(folder)
    assert (len(log.timers), log.num_rejects) == (MAX_METRICS, {"too many metrics": 2})


def engines(tmp_path: Path, lines: list[bytes]) -> tuple[Plan, RunDir]:
    """Return sealed evidence whose records of engines hold these lines."""
    run_dir = unpack(EVIDENCE, tmp_path / "id")
    for trial in run_dir.trial_dirs():
        path = next(iter(trial.engines_files().values()))
        path.write_bytes(b"".join([begin(CONTRACT), *lines]))
    return Plan.load(run_dir.plan), run_dir


def test_records_of_engines_hold_planned_steps_and_give_a_bounded_number_of_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = engines(tmp_path / "late", [engine("log_probs", values=[], step=2)])
    with pytest.raises(BundleUnreadable, match="records steps that the plan lacks, got 2, expected steps below 2"):
        list(check_agreement(*late))
    cases = [engine("log_probs", values=[], engine=name, case=case) for name in ENGINES for case in ("", "a", "b")]
    many = engines(tmp_path / "many", cases)
    monkeypatch.setattr("rlk_repro.analysis.checks.MAX_CHECKS", len(list(check_agreement(*many))) - 1)
    with pytest.raises(BundleUnreadable, match="give more than"):
        list(check_agreement(*many))


@pytest.mark.parametrize("value", [
        "no", '"[1"', '"[1]]*48"', '"[1]*400000000"', f'"[1]*{10**400}"', '"((("', '"[1]*48*[1]"', '"[1]+1"',
        '"[x]*48"', '"[2]*48"', '"[1]*47"', "true", "1.5", "0", "-1", '"[1].__class__"', '"[1]*-48"', "[1, 1]",
        f'"{"[1]+" * 390}[1]"',
])  # fmt: skip
def test_an_invalid_layer_pattern_is_refused(value: str, sandbox: Sandbox) -> None:
    outcome = sandbox.run(*VIME, "--set", f"{PLACE}={value}")
    assert (outcome.code, f"--set {PLACE}: " in outcome.err) == (2, True), outcome.err
    assert outcome.peak_bytes < 300 << 20


def test_layers_are_counted() -> None:
    counts = {"[0]*1+[1]*45": (46, 45), "([0]*3+[1])*12": (48, 12), " [0, 1]*24": (48, 24), "[]": (0, 0),
              "[1]*400000000": (400_000_000, 400_000_000)}  # fmt: skip
    for text, found in counts.items():
        assert read_layer_pattern(text) == LayerCount(*found)
    for text in ("[1]**2", "[True]", "[1]*1.5", "[1" * 400, "(" * 1000, ""):
        assert read_layer_pattern(text) is None


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


def test_a_folder_or_a_key_twice_in_a_log_is_no_event(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path / "00-p1-baseline")
    folder.ops_file(0).mkdir(parents=True)
    assert read_ops(folder).ranks == ()
    folder.ops_file(1).write_bytes(step(number=b'0,"step":1'))
    [rank] = read_ops(folder).ranks
    assert rank.first_reject == "line 1: not an event: key 'step' is given twice"


def test_steps_that_no_analysis_can_hold_are_refused_with_their_line() -> None:
    with pytest.raises(SpecError, match=r"measure\.scored_steps: 12 trials of 5002 steps, got 5000"):
        make_plan_for(Recipe(settings=("measure.scored_steps=5000", "measure.pairs=6", "measure.warmup_steps=2")))
