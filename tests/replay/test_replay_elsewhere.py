"""A machine that cannot run a published bundle shows the re-analysis first, then what is missing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base.findings import Level
from rlk_repro.bundle.seal import open_bundle
from rlk_repro.probes.node import probe_node
from rlk_repro.replay.recorded import describe_own_patch
from rlk_repro.replay.steps import prepare, reanalyse
from rlk_repro.rundir.manifest import load_manifests
from rlk_repro.workloads.checkouts import FLAGS
from tests import ROOT

BUNDLES = sorted((ROOT / "docs" / "evidence").glob("*.tgz"))


@pytest.mark.usefixtures("rl_kernel_not_imported")
@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_a_replay_shows_the_analysis_first_then_everything_missing(
    bundle: Path, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in FLAGS:
        monkeypatch.delenv(source.variable, raising=False)
    recorded = reanalyse(bundle)
    monkeypatch.setattr("rlk_repro.replay.steps.reanalyse", lambda _: recorded)  # once is enough for both commands
    monkeypatch.setattr("rlk_repro.replay.steps.probe_node", functools.cache(probe_node))
    with open_bundle(bundle) as run_dir:
        patch = describe_own_patch(bundle, load_manifests(run_dir))
    blocking = [str(item) for item in prepare(recorded).known_drift if item.level is Level.BLOCKING]
    assert any("gpu.count" in text for text in blocking)
    needed = {*recorded.plan.run.workload.modules, *recorded.identity.sources}
    modules = [source.module for source in FLAGS if source.module in needed]
    for flag in ((), ("--dry-run",)):
        code, out, err = call("replay", str(bundle), *flag)
        lines = out.splitlines()
        assert lines[1 : 1 + len(patch)] == patch
        del lines[1 : 1 + len(patch)]
        assert lines[0].startswith(f"{bundle}: the analysis is reproduced ")
        assert lines[1] == recorded.analysis.verdict.headline
        assert lines[2].startswith("drift of this machine from the recorded machine")
        assert lines[3 : 3 + len(blocking)] == [f"  {text}" for text in sorted(blocking)]
        assert code == (0 if flag else 3)
        assert ("GPU (" in out) if flag else ("GPU: too few on this machine" in err)
        said = "missing on this machine: python module {} (give" if flag else "python module {}: missing"
        assert [module for module in modules if said.format(module) not in (out if flag else err)] == []


def test_json_has_reanalysis_rerun_and_a_command_for_each_missing_thing(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in FLAGS:
        monkeypatch.delenv(source.variable, raising=False)
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


def test_an_absent_cluster_is_named_after_the_analysis(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bundle = str(ROOT / "docs" / "evidence" / "operators-h200.tgz")
    code, out, err = call("replay", bundle, "--cluster", "slurm", "--profile", "generic-h200", "--yes")
    assert (code, out.startswith(f"{bundle}: the analysis is reproduced ")) == (3, True)
    assert f"hint: rlk-repro replay {bundle} --cluster local" in err
    code, out, err = call("replay", bundle, "--cluster", "slurm", "--json")
    assert (code, json.loads(out)["reanalysis"]["is_ok"]) == (2, True)
    assert "rlk-repro profile init" in json.loads(out)["rerun"]["needs"][0]["next"]
