"""These bundles of less than 1 MB once took minutes or gigabytes; ``test_corpus`` has more of them."""

import gzip
import json
import tarfile
from pathlib import Path

import pytest

from rlk_repro.analysis.checks import check_agreement
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import MAX_FINDINGS, Finding, Level, limit_findings
from rlk_repro.base.resources import data_dir
from rlk_repro.bundle import gzip_stream
from rlk_repro.bundle.archive import ArchiveReader
from rlk_repro.bundle.gzip_stream import LIMITS, Limits
from rlk_repro.bundle.seal import unpack
from rlk_repro.logs.metrics import metric_series
from rlk_repro.logs.ops import MAX_METRICS, read_ops
from rlk_repro.logs.vime import parse_log
from rlk_repro.plan import Plan
from rlk_repro.rundir.agreement import ENGINES
from rlk_repro.rundir.manifest import MAX_FACTS, Manifest, diff_nodes
from rlk_repro.rundir.paths import RunDir, TrialDir
from tests import ROOT
from tests.security import hostile
from tests.security.sandbox import Sandbox
from tests.security.test_corpus import MOST_BYTES, MOST_CPU_S
from tests.support.verifying import verify_bundle

EVIDENCE = ROOT / "docs" / "evidence"
AGREEMENT = data_dir("manifests") / "contracts" / "agreement.yaml"
# Each bundle and the reader's answer: a refusal with the limit, or a report.
NAMED = {
    "plan: 10^9 optimizer steps a rollout": "",
    "plan: 256 trials of 110000 steps": "expected at most 20000 steps in total, including warm-up",
    "nodes: 20000 facts, 2000 others": f"too many facts for one node, got 20000, expected at most {MAX_FACTS}",
    "log: a row that grows with each line": "",
    "command: 100 MB of lists": "refused: a compression bomb, got '100.",
    "command: 30 MB of lists": "",
    "ops: one line of 100 MB": "refused: a compression bomb, got '100.",
    "ops: one line of 30 MB": "",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_small_bundle_costs_little(name: str, sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    change = (hostile.small_changes() | hostile.heavy_changes())[name]
    _, bundle = hostile.make_bundle(honest, case, change, is_sealed=False)
    assert bundle.stat().st_size < 10**6
    outcome = sandbox.run("report", bundle, "-o", case / "report")
    assert (outcome.code, outcome.is_bug) == (5 if NAMED[name] else 1, False), outcome.err
    assert NAMED[name] in outcome.err
    assert outcome.cpu_s <= MOST_CPU_S
    assert outcome.peak_bytes <= MOST_BYTES


def write_lines(path: Path, num_lines: int) -> Path:
    data = hostile.many(num_lines, b"\n")
    blocks = tarfile.TarInfo("log")
    blocks.size = len(data)
    path.write_bytes(gzip.compress(blocks.tobuf() + data + bytes(-len(data) % 512 + 1024), 9))
    return path


def read_all(path: Path, limits: Limits) -> None:
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as stream:
        patch.setattr(gzip_stream, "LIMITS", limits)
        for _ in ArchiveReader(stream, str(path)):
            pass


def test_a_small_archive_holds_few_lines_and_members(tmp_path: Path) -> None:
    bundle = write_lines(tmp_path / "lines.tgz", 2000)
    read_all(bundle, Limits(small_num_lines=2000))
    with pytest.raises(BundleUnreadable, match="refused: too many lines, expected at most 1999 in a file of"):
        read_all(bundle, Limits(small_num_lines=1999))
    with pytest.raises(BundleUnreadable, match="refused: too many members, expected at most 1"):
        read_all(bundle, Limits(small_num_members=1))
    read_all(bundle, Limits(small_file_bytes=0, small_num_members=1, small_num_lines=1))


def test_what_an_archive_may_hold_grows_with_its_size() -> None:
    assert LIMITS.most_bytes(10**6) == 32 << 20
    assert LIMITS.most_bytes(11 << 20) == (32 + 2000) << 20
    assert LIMITS.most_bytes(1 << 40) == LIMITS.total_bytes


def test_many_files_below_many_folders_are_registered_once(sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    _, bundle = hostile.make_bundle(honest, case, hostile.heavy_changes()["5000 files 480 folders deep"])
    outcome = sandbox.run("inspect", bundle)
    assert not outcome.is_bug
    assert outcome.cpu_s < 5


def test_the_cost_of_metrics_follows_the_printed_lines(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_bytes(b"".join(hostile.PREFIX + b"step %d: {'train/loss': %d}\n" % (step, step) for step in (0, 1, 4, 7)))
    series = metric_series(parse_log(log), num_rollouts=4, num_steps_per_rollout=2)["loss"]
    assert [sample and (sample.value, sample.line) for sample in series] == [(0.5, 2), None, None, None]
    metric_series(parse_log(log), num_rollouts=4, num_steps_per_rollout=10**9)


def test_nodes_are_compared_up_to_a_limit() -> None:
    first = Manifest(node="a", sections={"environment": {f"A{number}": 1 for number in range(600)}})
    others = [Manifest(node=f"b{number}", sections={}) for number in range(2000)]
    found = list(diff_nodes([first, *others]))
    assert len(found) == 2 * 600 + 1
    assert str(found[-1]) == (
        f"blocking: nodes: expected nodes alike, found more than {MAX_FINDINGS} differences up to node b1; "
        "later nodes were not compared"
    )
    alike = Manifest(node="c", sections=first.sections)
    assert list(diff_nodes([first, alike, alike])) == []


def test_the_most_serious_of_many_findings_are_listed() -> None:
    many = [Finding(Level.INFO, f"{number:05}", "", "") for number in range(2 * MAX_FINDINGS)]
    found = limit_findings([*many, Finding(Level.BLOCKING, "x", "", "")])
    assert (len(found), found[0].where) == (MAX_FINDINGS + 1, "x")
    assert (
        str(found[-1]) == f"info: findings: expected at most {MAX_FINDINGS}, found {MAX_FINDINGS + 1} more, not listed"
    )


def test_a_trial_has_a_limited_number_of_timers(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path / "00-p1-baseline")
    folder.ops.mkdir(parents=True)
    step = '{"event":"step","step":%d,"timers":{"t%d":1},"memory":{},"calls":{}}\n'
    folder.ops_file(0).write_text("".join(step % (number, number) for number in range(MAX_METRICS + 2)))
    log = read_ops(folder)
    assert len(log.timers) == MAX_METRICS
    assert log.num_rejects == {"too many metrics": 2}


def test_many_wrong_lines_of_checksums_stop_the_reader(sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    _, bundle = hostile.make_bundle(honest, case, hostile.heavy_changes()["checksums: empty lines"])
    found = verify_bundle(bundle)
    assert len(found) == MAX_FINDINGS + 1
    assert (
        any("this line and all later lines were not read" in finding.found for finding in found)
        or found[-1].where == "findings"
    )


BEGIN = {"event": "begin", "schema": 1, "contract": AGREEMENT.read_text()}


def engines(tmp_path: Path, lines: list[dict[str, object]]) -> tuple[Plan, RunDir]:
    """Return sealed evidence whose records of engines hold these lines."""
    run_dir = unpack(EVIDENCE / "vime-agreement-h200.tgz", tmp_path / "id")
    for trial in run_dir.trial_dirs():
        path = next(iter(trial.engines_files().values()))
        path.write_text("".join(f"{json.dumps(line)}\n" for line in [BEGIN, *lines]))
    return Plan.load(run_dir.plan), run_dir


def test_records_of_engines_hold_planned_steps_and_give_a_bounded_number_of_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = {"event": "log_probs", "case": "", "dtype": "float32", "values": []}
    plan, run_dir = engines(tmp_path / "late", [{**empty, "step": 2, "engine": "training"}])
    with pytest.raises(BundleUnreadable, match="records steps that the plan lacks, got 2, expected steps below 2"):
        list(check_agreement(plan, run_dir))
    cases = [{**empty, "step": 0, "engine": name, "case": case} for name in ENGINES for case in ("", "a", "b", "c")]
    plan, run_dir = engines(tmp_path / "many", cases)
    found = list(check_agreement(plan, run_dir))
    monkeypatch.setattr("rlk_repro.analysis.checks.MAX_CHECKS", len(found) - 1)
    with pytest.raises(BundleUnreadable, match="give more than"):
        list(check_agreement(plan, run_dir))
