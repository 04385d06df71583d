"""A run that takes longer than its job may, on a real Slurm: the job goes on where it ended, pair by pair."""

from __future__ import annotations

import json
import re
import time

import pytest

from rlk_repro.base.files import load_json
from rlk_repro.base.findings import Level
from rlk_repro.bundle.seal import open_bundle
from rlk_repro.clusters.api import JobState
from rlk_repro.plan import Plan
from rlk_repro.submit import planning, sending
from tests.support.make_run import verify_bundle
from tests.support.slurm.runs import Run, Site, make_profile

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1500)]

NUM_PAIRS = 12
# About 15 s a trial and six minutes in all, for jobs that have two before they are told to end.
SETTINGS = (
    f"measure.pairs={NUM_PAIRS}", "measure.warmup_steps=1", "measure.scored_steps=260", "time_limit_min=1",
    "workload.grpo.rollout_batch_size=8",
)  # fmt: skip


def submit(site: Site, max_job_time: str, settings: tuple[str, ...] = SETTINGS) -> Run:
    profile = str(make_profile(site.folder))
    request = planning.Request(
        run="smoke",
        cluster="slurm",
        profile=profile,
        settings=settings,
        is_exploratory=True,
        max_job_time=max_job_time,
    )
    return Run(site=site, launched=sending.submit(planning.prepare(request)))


def wait_for_end(run: Run) -> None:
    def is_over() -> bool:
        status = run.poll()
        if status.state is JobState.PENDING:
            time.sleep(3)  # a start in the second of the requeue would have the credential that was just revoked
            run.skip_delay()
            run.site.cluster.revive_controller()
        return status.state.is_final

    run.wait_until(is_over, "the end", 1200)


def require_one_allocation_per_pair(run: Run) -> dict[str, set[str]]:
    """A bundle that verifies, in which no pair spans jobs and the analysis names the jobs; each pair's allocation."""
    bundle = run.collect()
    assert verify_bundle(bundle) == []
    with open_bundle(bundle) as sealed:
        by_pair: dict[str, set[str]] = {}
        for folder in sealed.trial_dirs():
            by_pair.setdefault(folder.name.split("-")[1], set()).add(load_json(folder.exit)["allocation"])
        analysis = json.loads(sealed.analysis.read_bytes())
    assert all(len(allocations) == 1 for allocations in by_pair.values()), by_pair
    allocations = {name for names in by_pair.values() for name in names}
    assert analysis["experiment_hash"] == Plan.load(run.run_dir.plan).experiment_hash
    (told,) = [item for item in analysis["findings"] if item["where"] == "allocations"]
    assert (told["level"], told["expected"]) == (Level.WARNING, "1")
    assert re.match(rf"{len(allocations)}: p1, .* in {run.job_id}\.0 on node-\d; ", told["found"])
    return by_pair


def test_twelve_pairs_complete_in_jobs_of_a_third_of_their_time(site: Site) -> None:
    run = submit(site, max_job_time="3m")
    hashes = Plan.load(run.run_dir.plan).experiment_hash
    wait_for_end(run)
    assert run.poll().reason == f"sealed, {2 * NUM_PAIRS} of {2 * NUM_PAIRS} trials ok", run.tail()
    by_pair = require_one_allocation_per_pair(run)
    assert Plan.load(run.run_dir.plan).experiment_hash == hashes
    assert len(by_pair) == NUM_PAIRS
    assert len({name for names in by_pair.values() for name in names}) >= 3
