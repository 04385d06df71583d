"""A real Slurm with two nodes on this machine: the whole road, and what goes wrong on clusters."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from rlk_repro.analysis.allocations import list_allocations
from rlk_repro.base.files import load_json
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.bundle.verify import open_verified
from rlk_repro.clusters.api import JobState, Submission
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.rundir.store import find_run_dir
from rlk_repro.submit import planning, sending
from rlk_repro.submit.authored import find_rewritten
from rlk_repro.submit.sending import Launched
from tests.conftest import WEIRD_NAMES
from tests.support.make_run import verify_bundle
from tests.support.slurm.runs import LONG, SETTINGS, Run, Site, make_profile


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
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "agent", "profile.yaml"}
    assert list(tmp_path.rglob("pwned")) == []
    code, out, err = call("replay", str(bundle), "--analyze-only")
    assert (code, err) == (0, "")
    assert "the analysis is reproduced byte for byte" in out
    with open_verified(bundle) as (sealed, _):
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
def test_submissions_at_once_run_on_different_nodes(call, site: Site) -> None:
    settings = [word for item in SETTINGS for word in ("--set", item)]
    where = ("--cluster", "slurm", "--profile", str(make_profile(site.folder)), "--exploratory", "--json")
    sent = json.loads(call("submit", "smoke", *where, *settings, "--machines", "2")[1])
    run_dirs = [find_run_dir(item["id"]) for item in sent["submissions"]]
    assert sent["combine"] == f"rlk-repro combine {' '.join(run_dir.run_id for run_dir in run_dirs)}"
    for run_dir in run_dirs:
        launched = Launched(run_dir=run_dir, submission=Submission.from_json(load_json(run_dir.submission)))
        assert Run(site=site, launched=launched).wait_for_end().state is JobState.DONE
    assert {node.path.name for run_dir in run_dirs for node in run_dir.node_dirs()} == {"node-0", "node-1"}
    plans = [Plan.load(run_dir.plan) for run_dir in run_dirs]
    assert not set.intersection(*({trial.seed for trial in plan.trials} for plan in plans))
    assert [find_rewritten(*found) for found in zip(plans, run_dirs, strict=True)] == [[], []]


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
def test_a_bundle_is_replayed_on_the_nodes_it_names_and_on_this_machine(call, site: Site) -> None:
    site.cluster.ask("scontrol", "update", "nodename=node-0", "state=drain", "reason=test")
    run = site.submit(python=sys.executable)
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


NUM_PAIRS = 6


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(900)
def test_a_run_that_takes_longer_than_its_job_may_goes_on_in_further_jobs_pair_by_pair(site: Site) -> None:
    """About 13 seconds a trial, for jobs that have two minutes before they are told to end."""
    settings = ("measure.warmup_steps=1", "measure.scored_steps=260", f"measure.pairs={NUM_PAIRS}", "time_limit_min=1")
    request = planning.Request(
        run="smoke",
        cluster="slurm",
        profile=str(make_profile(site.folder)),
        settings=settings,
        is_exploratory=True,
        max_job_time="3m",
    )
    run = Run(site=site, launched=sending.submit(planning.prepare(request)))
    planned = Plan.load(run.run_dir.plan).experiment_hash

    def is_over() -> bool:
        status = run.poll()
        if status.state is JobState.PENDING:
            time.sleep(3)  # a start in the second of the requeue would have the credential that was just revoked
            run.skip_delay()
            site.cluster.revive_controller()
        return status.state.is_final

    run.wait_until(is_over, "the end", 800)
    assert run.poll().reason == f"sealed, {2 * NUM_PAIRS} of {2 * NUM_PAIRS} trials ok", run.tail()
    bundle = run.collect()
    assert verify_bundle(bundle) == []
    with open_verified(bundle) as (sealed, _):
        by_pair: dict[str, set[str]] = {}
        for folder in sealed.trial_dirs():
            by_pair.setdefault(folder.name.split("-")[1], set()).add(load_json(folder.exit)["allocation"])
        plan = Plan.load(sealed.plan)
        found = [item.name for item in list_allocations(plan, sealed, list(plan.groups()))]
    assert {len(names) for names in by_pair.values()} == {1}, "no pair spans jobs"
    allocations = {name for names in by_pair.values() for name in names}
    assert (len(by_pair), len(allocations) >= 2) == (NUM_PAIRS, True)
    assert (set(found), plan.experiment_hash) == (allocations, planned)
