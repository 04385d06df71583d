from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base.errors import CheckFailed
from rlk_repro.base.files import dump_json_line, load_json, write_json, write_text
from rlk_repro.base.findings import Finding, Level
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.plan import Plan
from rlk_repro.replay.compare import Differences, Match, diff_bundles
from rlk_repro.replay.steps import check_drift, prepare, reanalyse
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Image
from rlk_repro.submit.finishing import report_context
from rlk_repro.workloads.checkouts import SOURCES
from tests import ROOT
from tests.conftest import WEIRD_NAMES
from tests.support.make_run import Recipe, finish_run, make_run, reseal, verify_bundle

ONE_PAIR = Recipe(settings=(*Recipe().settings, "measure.pairs=1"))


@pytest.fixture
def sealed(tmp_path: Path) -> RunDir:
    run_dir = make_run(tmp_path / "id", ONE_PAIR)
    finish_run(run_dir)
    return run_dir


def test_a_folder_unpacked_by_plain_tar_is_reproduced_like_the_bundle(sealed: RunDir, tmp_path: Path) -> None:
    recorded, described = reanalyse(sealed.bundle), inspect_bundle(sealed.bundle)
    for name in WEIRD_NAMES:
        folder = tmp_path / name
        folder.mkdir()
        subprocess.run(["tar", "xzf", sealed.bundle], cwd=folder, check=True)
        assert verify_bundle(folder) == []
        assert (inspect_bundle(folder), reanalyse(folder)) == (described, recorded)
        name_of_bundle = Path("bundle.tgz")
        expected, found = (report_context(RunDir(root), name_of_bundle) for root in (sealed.root, folder))
        assert found == expected


def test_a_changed_log_is_refused_with_and_without_redone_checksums(sealed: RunDir) -> None:
    log = sealed.trial("01-p1-enabled").stdout
    write_text(log, log.read_text().replace("'perf/step_time': ", "'perf/step_time': 1"))
    with pytest.raises(CheckFailed, match=r"trials/01-p1-enabled/stdout\.log"):
        reanalyse(sealed.root)
    with pytest.raises(CheckFailed, match=r"analysis\.json: differs from the values computed from the logs \(line"):
        reanalyse(reseal(sealed))


def test_a_forged_verdict_is_refused(sealed: RunDir) -> None:
    value = load_json(sealed.analysis)
    value["verdict"]["num_pairs"] = 9
    write_json(sealed.analysis, value)
    with pytest.raises(CheckFailed, match="differs from the values computed from the logs"):
        reanalyse(reseal(sealed))


def test_blocking_drift_stops_unless_accepted() -> None:
    drift = (Finding(Level.BLOCKING, "gpu.devices.0.name", "NVIDIA H200", "none"), Finding(Level.INFO, "x", "1", "2"))
    with pytest.raises(CheckFailed) as caught:
        check_drift(drift, is_accepted=False)
    assert str(caught.value) == (
        "gpu.devices.0.name: differs from the recorded machine, got 'none', expected NVIDIA H200\n"
        "  hint: --yes runs the replay anyway; the comparison will list the differences"
    )
    check_drift(drift, is_accepted=True)
    check_drift(drift[1:], is_accepted=False)


def test_a_run_of_several_nodes_or_images_is_reduced_to_this_machine_and_says_so(sealed: RunDir) -> None:
    recorded = reanalyse(sealed.bundle)
    hardware = recorded.plan.hardware.hardware
    layouts = {hardware: recorded.plan.layout.model_copy(update={"num_nodes": 2})}
    image = Image(reference="registry.example/x", digest=f"sha256:{'0' * 64}")
    larger = dataclasses.replace(
        recorded.plan,
        run=recorded.plan.run.model_copy(update={"layouts": layouts}),
        stack=recorded.plan.stack.model_copy(update={"images": {"cpu": image}}),
    )
    prepared = prepare(dataclasses.replace(recorded, plan=larger), cluster="local")
    assert (prepared.launch.plan.layout.num_nodes, prepared.launch.plan.stack.images) == (1, {})
    told = {item.where: item.expected for item in prepared.drift or () if item.level is Level.BLOCKING}
    assert told[f"run smoke: layouts.{hardware}.num_nodes"] == "2"
    assert told[f"stack {larger.stack.stack}: images"] == "cpu"


# A machine that cannot run a published bundle shows the re-analysis first, then what is missing.


def test_json_has_reanalysis_rerun_and_a_command_for_each_missing_thing(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", *(source.variable for source in SOURCES)):
        monkeypatch.delenv(name, raising=False)
    bundle = ROOT / "docs" / "evidence" / "qwen3-4b-random-live-h200.tgz"
    code, out, err = call("replay", str(bundle), "--json")
    found = json.loads(out)
    assert (code, json.loads(err)["exit_code"]) == (3, 3)
    assert (found["reanalysis"]["is_ok"], found["reanalysis"]["verdict"]) == (True, "inconclusive")
    assert found["rerun"]["is_done"] is False
    needs = {need["where"]: need["next"] for need in found["rerun"]["needs"]}
    assert (
        "git clone https://github.com/vllm-project/vime && git -C vime checkout 1fc199d9" in needs["python module vime"]
    )
    assert needs["GPU"].endswith(f"rlk-repro replay {bundle} --profile site.yaml")
    assert needs["prepared.model"] == "rlk-repro prepare qwen3-4b-random-live --hardware h200 --stack vime-host"
    shown = json.loads(call("replay", str(bundle), "--dry-run", "--json")[1])
    assert (shown["reanalysis"], shown["rerun"]) == (found["reanalysis"], found["rerun"])


# The code that ran is read from a run directory and compared with another run's code.


Change = Callable[[RunDir], None]
TREE, OTHER = "5" * 40, "6" * 40


def change_libraries(sources: dict[str, object]) -> Change:
    def change(run_dir: RunDir) -> None:
        for trial in Plan.load(run_dir.plan).trials:
            path = run_dir.trial(trial.name).libraries_file(0)
            write_json(path, {**load_json(path), "sources": sources})

    return change


def change_decisions(key: str, value: str) -> Change:
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
    sides = (("a", first), ("b", change))
    bundles = [finish_run(make_run(tmp_path / side / "id", ONE_PAIR, how)) for side, how in sides]
    return diff_bundles(*bundles)


def test_other_sources_are_blocking_and_missing_ones_leave_the_level_undecided(tmp_path: Path) -> None:
    difference = diff(tmp_path / "other", change_libraries({"rl_engine": OTHER}))
    assert Finding(Level.BLOCKING, "sources.rl_engine", TREE, OTHER) in difference.findings
    assert difference.comparison is not None
    assert difference.comparison.level is Match.NOT_COMPARABLE
    assert difference.comparison.obstacles == (f"sources.rl_engine: recorded {TREE}, now {OTHER}",)
    unknown = change_libraries({"rl_engine": {"unknown": "Permission denied"}})
    difference = diff(tmp_path / "unknown", unknown, unknown)
    missing = Finding(Level.WARNING, "sources.rl_engine", "not recorded", "not recorded")
    assert difference.findings == (missing,)
    assert difference.comparison is not None
    assert (difference.comparison.level, difference.comparison.is_ok) == (Match.UNDECIDED, False)
    told = "sources.rl_engine: not recorded in the old bundle, not recorded in the new bundle"
    assert difference.comparison.unidentified == (told,)


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
