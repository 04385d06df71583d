"""A real Slurm with two nodes on this machine: the whole road, and what goes wrong on clusters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlk_repro.base.files import load_json
from rlk_repro.bundle.seal import inspect_bundle, open_bundle
from rlk_repro.clusters.api import JobState
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.rundir.store import find_run_dir
from tests.conftest import WEIRD_NAMES
from tests.support.make_run import verify_bundle
from tests.support.slurm.runs import LONG, SETTINGS, Site
from tests.support.two_node_agent import allow_nodes


def status_of(run_dir: RunDir, trial: str) -> str:
    return str(load_json(run_dir.trial(trial).exit)["status"])


def test_a_run_goes_from_submission_to_a_bundle_that_verifies_and_replays(
    call, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder whose name arrives as it is, and of which nothing is executed."""
    folder = tmp_path / f"{''.join(WEIRD_NAMES)},%j"
    monkeypatch.setenv("RLK_REPRO_RUNS", str(folder))
    run = site.submit()
    assert (run.wait_for_end().state, run.poll().reason) == (JobState.DONE, "sealed, 2 of 2 trials ok")
    bundle = run.collect()
    assert verify_bundle(bundle) == []
    assert run.run_dir.job_output(run.job_id).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "profile.yaml"}
    assert list(tmp_path.rglob("pwned")) == []
    code, out, err = call("replay", str(bundle), "--analyze-only")
    assert (code, err) == (0, "")
    assert "the analysis is reproduced byte for byte" in out
    with open_bundle(bundle) as sealed:
        allocations = {load_json(folder.exit)["allocation"] for folder in sealed.trial_dirs()}
        assert allocations == {f"{run.job_id}.0"}
        topics = {path.name for path in sealed.scheduler.iterdir()}
        assert {"config.txt", "topology.txt", f"job-{run.job_id}.0.txt", f"nodes-{run.job_id}.0.txt"} <= topics
        assert f"JobId={run.job_id} " in (sealed.scheduler / f"job-{run.job_id}.0.txt").read_text()
        assert "ClusterName = test" in sealed.scheduler_file("config").read_text()


def test_cancelling_lets_the_agent_record_and_pack(site: Site) -> None:
    run = site.submit(LONG)
    run.wait_for_step()
    assert run.poll().nodes in {"node-0", "node-1"}
    assert run.cancel()
    status = run.wait_for_end()
    assert (status.state, status.reason) == (JobState.CANCELLED, "stopped by SIGTERM")
    assert status_of(run.run_dir, "00-p1-baseline") == TrialStatus.INTERRUPTED
    assert run.run_dir.bundle.is_file()
    assert not inspect_bundle(run.collect()).is_sealed


@pytest.mark.real
def test_a_requeued_job_repeats_whole_pairs_and_keeps_interrupted_trials(site: Site) -> None:
    run = site.submit((*LONG[:2], "measure.scored_steps=20", LONG[3]))
    run.wait_for_step("01-p1-enabled")
    site.cluster.ask("scontrol", "requeue", run.job_id)
    run.wait_until(lambda: run.poll().state is JobState.PENDING, "waiting again")
    run.skip_delay()
    assert run.wait_for_end().reason == "sealed, 2 of 2 trials ok"
    found = {path.name for path in (run.run_dir.interrupted / "1").iterdir()}
    assert found == {"00-p1-baseline", "01-p1-enabled"}
    allocations = {load_json(folder.exit)["allocation"] for folder in run.run_dir.trial_dirs()}
    assert allocations == {f"{run.job_id}.1"}
    assert verify_bundle(run.collect()) == []


@pytest.mark.real
def test_a_controller_that_restarts_does_not_disturb_a_run(site: Site) -> None:
    run = site.submit()
    run.wait_for_step()
    site.cluster.stop_controller()
    site.cluster.start_controller()
    assert run.wait_for_end().state is JobState.DONE


@pytest.mark.real
def test_a_node_daemon_that_restarts_does_not_disturb_a_run(site: Site) -> None:
    run = site.submit()
    run.wait_for_step()
    node = run.poll().nodes
    site.cluster.kill(node)
    site.cluster.start_node(node)
    assert run.wait_for_end().state is JobState.DONE


@pytest.mark.real
def test_two_nodes_have_one_agent_each(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_nodes(monkeypatch)
    agent = site.folder / "agent"
    agent.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.support.two_node_agent "$@"\n')
    agent.chmod(0o755)
    run = site.submit((*SETTINGS, "layouts.cpu.num_nodes=2"), python=str(agent))
    assert run.wait_for_end().reason == "sealed, 2 of 2 trials ok"
    assert {node.path.name for node in run.run_dir.node_dirs()} == {"node-0", "node-1"}
    assert all(node.manifest.is_file() and node.telemetry.is_file() for node in run.run_dir.node_dirs())
    assert verify_bundle(run.collect()) == []


@pytest.mark.real
def test_a_bundle_is_replayed_on_the_nodes_it_names_and_on_this_machine(call, site: Site) -> None:
    site.cluster.ask("scontrol", "update", "nodename=node-0", "state=drain", "reason=test")
    run = site.submit()
    run.wait_for_end()
    bundle = str(run.collect())
    site.cluster.ask("scontrol", "update", "nodename=node-0", "state=resume")
    profile = str(site.folder / "profile.yaml")
    code, out, err = call("replay", bundle, "--profile", profile, "--same-nodes", "--yes", "--json")
    assert (code, json.loads(out)["level"]) == (0, "bitwise"), err
    again = find_run_dir(None)
    assert [node.path.name for node in again.node_dirs()] == ["node-1"]
    code, out, err = call("replay", bundle, "--cluster", "local", "--yes", "--json")
    assert (code, json.loads(out)["level"]) == (0, "bitwise"), err


@pytest.mark.long
@pytest.mark.real
def test_a_dead_node_ends_in_a_requeued_and_sealed_run(site: Site) -> None:
    run = site.submit((*LONG[:2], "measure.scored_steps=60", LONG[3]))  # the whole pair runs again after the loss
    run.wait_for_step()
    node = run.poll().nodes
    site.cluster.kill_node(node)
    try:
        run.wait_until(lambda: run.poll().state is JobState.PENDING, "waiting again")
        run.skip_delay()
        assert run.wait_for_end().reason == "sealed, 2 of 2 trials ok"
        assert {path.name for path in (run.run_dir.interrupted / "1").iterdir()} == {"00-p1-baseline"}
    finally:
        site.cluster.start_node(node)
        site.cluster.wait_for_nodes()


@pytest.mark.real
def test_the_time_limit_comes_with_a_warning_that_the_agent_uses(site: Site) -> None:
    run = site.submit(("measure.scored_steps=9000", *LONG[:2]))
    run.wait_for_step()
    site.cluster.ask("scontrol", "update", f"jobid={run.job_id}", "timelimit=2")
    status = run.wait_for_end(240)
    reason = "Slurm says FAILED, stopped by SIGTERM, which Slurm sends before the time limit"
    assert (status.state, status.reason) == (JobState.FAILED, reason)
    assert status_of(run.run_dir, "00-p1-baseline") == TrialStatus.INTERRUPTED
    assert not inspect_bundle(run.collect()).is_sealed
