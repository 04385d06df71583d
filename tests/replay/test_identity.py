"""Which code ran: read back from a run directory, and held against another one's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base.files import dump_json_line, load_json, write_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.replay.compare import EffectDifference, Match, diff_bundles
from rlk_repro.replay.identity import RL_KERNEL, Identity, compare_identities, find_source_drift, read_identity
from rlk_repro.rundir.manifest import Fact, Manifest, Section, Unknown
from rlk_repro.rundir.paths import RunDir
from rlk_repro.submit.sending import load_plan
from tests.support.make_run import finish_run, make_run

TREE, OTHER = "5" * 40, "6" * 40


def change_libraries(sources: dict[str, object]) -> Callable[[RunDir], None]:
    def change(run_dir: RunDir) -> None:
        for trial in load_plan(run_dir).trials:
            path = run_dir.trial(trial.name).libraries_file(0)
            write_json(path, {**load_json(path), "sources": sources})

    return change


def change_decisions(key: str, value: str) -> Callable[[RunDir], None]:
    def change(run_dir: RunDir) -> None:
        for trial in load_plan(run_dir).trials:
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
) -> EffectDifference:
    bundles = [finish_run(make_run(tmp_path / side / "id", change=how)) for side, how in (("a", first), ("b", change))]
    return diff_bundles(*bundles)


def test_what_the_ranks_loaded_and_resolved_is_read_back(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id")
    found = read_identity(run_dir, load_plan(run_dir))
    assert found.sources == {RL_KERNEL: frozenset({TREE})}
    assert {op: {name for name, _ in resolved} for op, resolved in found.decisions.items()} == {
        "logp": {"FusedLogpGenericOp"},
        "ratio_kl": {"TritonRatioKLOp"},
    }


def test_a_manifest_stands_in_for_ranks_that_say_nothing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id", change=change_libraries({}))
    assert read_identity(run_dir, load_plan(run_dir)).sources == {RL_KERNEL: frozenset()}
    manifest = Manifest(node="node0", sections={"code": {"rl_kernel": {"package_tree": OTHER}}})
    write_json(run_dir.node("node0").manifest, manifest.to_json())
    assert read_identity(run_dir, load_plan(run_dir)).sources == {RL_KERNEL: frozenset({OTHER})}


def test_other_sources_are_blocking_and_never_a_match(tmp_path: Path) -> None:
    difference = diff(tmp_path, change_libraries({"rl_engine": OTHER}))
    assert Finding(Level.BLOCKING, "sources.rl_engine", TREE, OTHER) in difference.findings
    assert difference.comparison is not None
    assert difference.comparison.level is Match.NOT_COMPARABLE
    assert difference.comparison.obstacles == (f"sources.rl_engine: recorded {TREE}, now {OTHER}",)


def test_nobody_knowing_the_sources_is_no_agreement(tmp_path: Path) -> None:
    unknown = change_libraries({"rl_engine": {"unknown": "Permission denied"}})
    difference = diff(tmp_path, unknown, unknown)
    assert difference.findings == (Finding(Level.WARNING, "sources.rl_engine", "not recorded", "not recorded"),)
    assert difference.comparison is not None
    assert difference.comparison.is_ok
    meaning = "nothing differs beyond its uncertainty, but nobody knows whether the same code ran"
    assert difference.comparison.lines()[:2] == [
        f"replay level: statistical ({meaning})",
        "  sources.rl_engine: recorded not recorded, now not recorded",
    ]
    assert difference.comparison.to_json()["unidentified"]


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
    assert places == {"decisions.logp", "decisions.ratio_kl"}
    assert difference.comparison is not None
    assert difference.comparison.level is Match.NOT_COMPARABLE


def test_the_same_files_are_one_version_however_they_were_installed() -> None:
    def make(version: str, implementation: str = "A") -> Identity:
        resolved = {"logp": frozenset({(implementation, version)})}
        return Identity(sources={RL_KERNEL: frozenset({TREE})}, decisions=resolved)

    assert compare_identities(make("unversioned"), make("0.1.0 at 202f0e30e567")) == []
    assert compare_identities(make("1"), make("1", "B")) == [Finding(Level.BLOCKING, "decisions.logp", "A", "B")]


def test_drift_of_sources_is_told_once() -> None:
    recorded = Identity(sources={"vime": frozenset({TREE}), "megatron": frozenset({TREE})}, decisions={})
    code: Section = {"vime": {"package_tree": OTHER}, "megatron": {"package_tree": Unknown("absent")}}
    here = Manifest(node="here", sections={"code": code})
    finding = Finding(Level.BLOCKING, "code.vime.package_tree", TREE, OTHER)
    assert find_source_drift(recorded, here, []) == [finding]
    assert find_source_drift(recorded, here, [finding]) == []


def test_the_same_files_settle_what_only_one_side_names() -> None:
    from rlk_repro.rundir.manifest import diff_manifests

    def make(**facts: Fact) -> Manifest:
        return Manifest(node="n", sections={"code": {"vime": facts}})

    archive = make(commit=Unknown("no checkout"), package_tree=TREE)
    assert [item.level for item in diff_manifests(make(commit="1", package_tree=TREE), archive)] == [Level.INFO]
    assert {item.where: item.level for item in diff_manifests(make(commit="1", package_tree=OTHER), archive)} == {
        "code.vime.commit": Level.WARNING,
        "code.vime.package_tree": Level.BLOCKING,
    }
