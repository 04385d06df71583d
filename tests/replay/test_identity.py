"""The code that ran is read from a run directory and compared with another run's code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlk_repro.base.files import dump_json_line, load_json, write_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.cli import app
from rlk_repro.plan import Plan
from rlk_repro.replay.compare import Differences, Match, diff_bundles
from rlk_repro.replay.identity import Identity, compare_identities, find_source_drift, read_identity
from rlk_repro.rundir.manifest import Fact, Manifest, Section, Unknown
from rlk_repro.rundir.paths import RunDir
from rlk_repro.sources import RL_KERNEL
from tests.support.make_run import Recipe, finish_run, make_run

TREE, OTHER = "5" * 40, "6" * 40


def change_libraries(sources: dict[str, object]) -> Callable[[RunDir], None]:
    def change(run_dir: RunDir) -> None:
        for trial in Plan.load(run_dir.plan).trials:
            path = run_dir.trial(trial.name).libraries_file(0)
            write_json(path, {**load_json(path), "sources": sources})

    return change


def change_decisions(key: str, value: str) -> Callable[[RunDir], None]:
    def change(run_dir: RunDir) -> None:
        for trial in Plan.load(run_dir.plan).trials:
            path = run_dir.trial(trial.name).ops_file(0)
            events = [load_event(line) for line in path.read_text().splitlines()]
            changed = [{**event, key: value} if event["event"] == "decision" else event for event in events]
            path.write_text("".join(f"{dump_json_line(event)}\n" for event in changed))

    return change


def load_event(line: str) -> dict[str, object]:
    event: dict[str, object] = json.loads(line)
    return event


def diff(
    tmp_path: Path, change: Callable[[RunDir], None], first: Callable[[RunDir], None] | None = None
) -> Differences:
    bundles = [finish_run(make_run(tmp_path / side / "id", change=how)) for side, how in (("a", first), ("b", change))]
    return diff_bundles(*bundles)


def test_what_the_ranks_loaded_and_resolved_is_read_back(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id")
    found = read_identity(run_dir, Plan.load(run_dir.plan))
    assert found.sources == {RL_KERNEL.module: frozenset({TREE})}
    assert {op: {name for name, _ in resolved} for op, resolved in found.decisions.items()} == {
        "logp": {"FusedLogpGenericOp"},
        "ratio_kl": {"TritonRatioKLOp"},
    }


def test_the_manifest_replaces_ranks_without_a_record(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id", change=change_libraries({}))
    assert read_identity(run_dir, Plan.load(run_dir.plan)).sources == {RL_KERNEL.module: frozenset()}
    manifest = Manifest(node="node0", sections={"code": {"rl_kernel": {"package_tree": OTHER}}})
    write_json(run_dir.node("node0").manifest, manifest.to_json())
    assert read_identity(run_dir, Plan.load(run_dir.plan)).sources == {RL_KERNEL.module: frozenset({OTHER})}


def test_other_sources_are_blocking_and_never_match(tmp_path: Path) -> None:
    difference = diff(tmp_path, change_libraries({"rl_engine": OTHER}))
    assert Finding(Level.BLOCKING, "sources.rl_engine", TREE, OTHER) in difference.findings
    assert difference.comparison is not None
    assert difference.comparison.level is Match.NOT_COMPARABLE
    assert difference.comparison.obstacles == (f"sources.rl_engine: recorded {TREE}, now {OTHER}",)


def test_sources_that_are_missing_leave_the_level_undecided(tmp_path: Path) -> None:
    unknown = change_libraries({"rl_engine": {"unknown": "Permission denied"}})
    difference = diff(tmp_path, unknown, unknown)
    assert difference.findings == (Finding(Level.WARNING, "sources.rl_engine", "not recorded", "not recorded"),)
    assert difference.comparison is not None
    assert difference.comparison.level is Match.UNDECIDED
    assert not difference.comparison.is_ok
    assert difference.comparison.lines()[:2] == [
        "replay level: undecided (hashes are missing, so nothing proves that the same code ran)",
        "  sources.rl_engine: not recorded in the old bundle, not recorded in the new bundle",
    ]
    assert difference.comparison.unidentified


@pytest.mark.parametrize(
    ("key", "value"), [("implementation", "NativeRatioKLOp2"), ("version", "2.0 (rl_engine.runtime.registry)")]
)
def test_another_implementation_or_version_is_another_experiment(tmp_path: Path, key: str, value: str) -> None:
    unknown = change_libraries({})

    def change(run_dir: RunDir) -> None:
        unknown(run_dir)
        change_decisions(key, value)(run_dir)

    difference = diff(tmp_path, change, unknown)
    places = {item.where for item in difference.findings if item.level is Level.BLOCKING}
    assert places == {f"decisions.logp.{key}", f"decisions.ratio_kl.{key}"}
    assert difference.comparison is not None
    assert difference.comparison.level is Match.NOT_COMPARABLE


def test_the_same_files_are_one_version_however_they_were_installed() -> None:
    def make(version: str, implementation: str = "A") -> Identity:
        resolved = {"logp": frozenset({(implementation, version)})}
        return Identity(sources={RL_KERNEL.module: frozenset({TREE})}, decisions=resolved)

    assert compare_identities(make("unversioned"), make("0.1.0 at 202f0e30e567")) == []
    other = Finding(Level.BLOCKING, "decisions.logp.implementation", "A", "B")
    assert compare_identities(make("1"), make("1", "B")) == [other]


def record_early(version: str) -> Callable[[RunDir], None]:
    """Change the record to the form of the earliest bundles, in which no rank hashes what it loaded."""

    def change(run_dir: RunDir) -> None:
        change_decisions("version", version)(run_dir)
        for trial in Plan.load(run_dir.plan).trials:
            path = run_dir.trial(trial.name).libraries_file(0)
            record = load_json(path)
            del record["sources"]
            write_json(path, record)

    return change


def record_now(run_dir: RunDir) -> None:
    change_decisions("version", "0.1.0 at 202f0e30e567 (rl_engine.kernels.registry)")(run_dir)
    log = run_dir.trial("00-p1-baseline").stdout
    log.write_text(log.read_text().replace("'train/loss': 0.1", "'train/loss': 0.1000001"))


def finish(root: Path, ratio: float, change: Callable[[RunDir], None]) -> Path:
    return finish_run(make_run(root / "id", Recipe(speedup=1 / ratio, noise=0.0006), change))


def test_a_bundle_of_an_earlier_format_is_reproduced_with_a_caution(tmp_path: Path) -> None:
    """Two H200 gave almost the same result; since then versions name a commit and ranks hash what they load."""
    recorded = finish(tmp_path / "a", 0.2267, record_early("0.1.0 (rl_engine.kernels.registry)"))
    new = finish(tmp_path / "b", 0.2251, record_now)
    comparison = diff_bundles(recorded, new).comparison
    assert comparison is not None
    assert (comparison.level, comparison.is_ok) == (Match.REPRODUCED, True)
    lines = comparison.lines()
    assert re.fullmatch(
        r"replay level: reproduced within 1 %, with 3 cautions \(step time ratio 0\.2266 recorded, 0\.225 now; "
        r"difference -0\.\d\d %, 95 % interval -0\.\d\d to -0\.\d\d %\)",
        lines[0],
    )
    not_yet = "not recorded by this older format in the old bundle"
    assert lines[1:4] == [
        f"  caution: sources.rl_engine: {not_yet}, {TREE} in the new bundle",
        f"  caution: decisions.logp.commit: {not_yet}, 202f0e30e567 in the new bundle",
        f"  caution: decisions.ratio_kl.commit: {not_yet}, 202f0e30e567 in the new bundle",
    ]
    assert list(comparison.cautions) == [line.removeprefix("  caution: ") for line in lines[1:4]]
    result = CliRunner().invoke(app, ["diff", str(recorded), str(new)])
    assert (result.exit_code, lines[0] in result.stdout) == (0, True)


def test_another_version_number_is_other_code_in_every_format(tmp_path: Path) -> None:
    recorded = finish(tmp_path / "a", 0.2267, record_early("0.1.1 (rl_engine.kernels.registry)"))
    comparison = diff_bundles(recorded, finish(tmp_path / "b", 0.2251, record_now)).comparison
    assert comparison is not None
    assert comparison.level is Match.NOT_COMPARABLE
    assert comparison.obstacles[0] == "decisions.logp.version: recorded 0.1.1, now 0.1.0"


def test_a_missing_field_of_the_format_leaves_the_level_undecided(tmp_path: Path) -> None:
    """Ranks without hashes beside a manifest with hashes are no earlier format; a run without any record is none
    either.
    """

    def hash_in_manifest(run_dir: RunDir) -> None:
        record_early("0.1.0 (rl_engine.kernels.registry)")(run_dir)
        manifest = Manifest(node="node0", sections={"code": {"vime": {"package_tree": OTHER}}})
        write_json(run_dir.node("node0").manifest, manifest.to_json())

    def remove_libraries(run_dir: RunDir) -> None:
        change_decisions("version", "0.1.0 (rl_engine.kernels.registry)")(run_dir)
        for trial in Plan.load(run_dir.plan).trials:
            run_dir.trial(trial.name).libraries_file(0).unlink()

    new = finish(tmp_path / "new", 0.2251, record_now)
    for index, change in enumerate((hash_in_manifest, remove_libraries)):
        comparison = diff_bundles(finish(tmp_path / str(index), 0.2267, change), new).comparison
        assert comparison is not None
        assert (comparison.level, comparison.is_ok) == (Match.UNDECIDED, False)
        assert comparison.unidentified[0] == (
            f"sources.rl_engine: not recorded in the old bundle, {TREE} in the new bundle"
        )


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("0.1.0 at 202f0e30e567 (a.b)", "0.1.0 at 302f0e30e567 (a.b)", "commit"),
        ("0.1.0 (a.b)", "0.1.0 (c.d)", "registry"),
        ("0.1.0 (a.b), held against x", "0.1.0 (a.b), held against y", "reference"),
        ("any (thing) at all", "any (thing) other", "version"),
    ],
)
def test_versions_are_compared_field_by_field(old: str, new: str, where: str) -> None:
    first, second = (Identity(sources={}, decisions={"logp": frozenset({("A", text)})}) for text in (old, new))
    found = compare_identities(first, second)
    assert [(item.level, item.where) for item in found] == [(Level.BLOCKING, f"decisions.logp.{where}")]


def test_drift_of_sources_is_reported_once() -> None:
    recorded = Identity(sources={"vime": frozenset({TREE}), "megatron": frozenset({TREE})}, decisions={})
    code: Section = {"vime": {"package_tree": OTHER}, "megatron": {"package_tree": Unknown("absent")}}
    here = Manifest(node="here", sections={"code": code})
    finding = Finding(Level.BLOCKING, "code.vime.package_tree", TREE, OTHER)
    assert find_source_drift(recorded, here, []) == [finding]
    assert find_source_drift(recorded, here, [finding]) == []


def test_equal_files_prove_equal_versions_that_only_one_side_names() -> None:
    from rlk_repro.rundir.manifest import diff_manifests

    def make(**facts: Fact) -> Manifest:
        return Manifest(node="n", sections={"code": {"vime": facts}})

    archive = make(commit=Unknown("no checkout"), package_tree=TREE)
    assert [item.level for item in diff_manifests(make(commit="1", package_tree=TREE), archive)] == [Level.INFO]
    assert {item.where: item.level for item in diff_manifests(make(commit="1", package_tree=OTHER), archive)} == {
        "code.vime.commit": Level.WARNING,
        "code.vime.package_tree": Level.BLOCKING,
    }
