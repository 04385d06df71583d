"""Twenty faults at seeded random moments on a real Slurm: a correct state, a bundle, and no half trial that counts."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.backends.api import JobState, Status
from rlk_repro.bundle import inspect_bundle
from rlk_repro.files import load_json
from rlk_repro.job.resume import find_whole_pairs
from rlk_repro.launch import load_plan
from rlk_repro.verify import verify_bundle
from tests.job_examples import find_descendants
from tests.slurm_cluster import Cluster
from tests.slurm_runs import LONG, Run, Site, on_site, start_or_skip

pytestmark = pytest.mark.real

NUM_FAULTS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start_or_skip(tmp_path_factory.mktemp("slurm") / "c", slurmd_timeout_s=5)
    yield running
    running.close()


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_real_tools: None) -> Iterator[Site]:
    with on_site(cluster, tmp_path, monkeypatch) as here:
        yield here


def cancel(run: Run) -> set[JobState]:
    """Returns the states that are right afterwards; DONE wherever the run may have been quicker."""
    return {JobState.CANCELLED} if run.cancel() else {JobState.DONE}


def cancel_hard(run: Run) -> set[JobState]:
    run.site.cluster.ask("scancel", run.job_id)
    return {JobState.CANCELLED, JobState.DONE}


def requeue(run: Run) -> set[JobState]:
    run.site.cluster.ask("scontrol", "requeue", run.job_id, check=False)
    return {JobState.DONE}


def kill_agent(run: Run) -> set[JobState]:
    for pid in find_descendants(run.run_dir):
        if b"rlk_repro.job\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            break
    return {JobState.FAILED, JobState.DONE}


def kill_node(run: Run) -> set[JobState]:
    """The job starts again on the other node; the dead one comes back."""
    cluster, node = run.site.cluster, run.poll().nodes
    if node not in cluster.processes:
        return {JobState.DONE}
    cluster.kill_node(node)
    run.wait_until(lambda: cluster.node_states()[node].startswith("down"), f"{node} is down")
    cluster.start_node(node)
    return {JobState.DONE}


def restart_controller(run: Run) -> set[JobState]:
    run.site.cluster.kill("slurmctld")
    assert run.poll().state is JobState.UNKNOWN or run.run_dir.is_sealed
    run.site.cluster.start_controller()
    return {JobState.DONE}


def restart_daemon(run: Run) -> set[JobState]:
    node = run.poll().nodes
    if node in run.site.cluster.processes:
        run.site.cluster.kill(node)
        run.site.cluster.start_node(node)
    return {JobState.DONE}


FAULTS = (cancel, cancel_hard, requeue, kill_agent, kill_node, restart_controller, restart_daemon)


def wait_for_end(run: Run) -> Status:
    """A requeued job starts again after some seconds; at once, while old steps are cleaned up, is not Slurm's way."""
    pending_since: float | None = None

    def has_ended() -> bool:
        nonlocal pending_since
        if run.site.cluster.revive_controller():
            print("slurmctld had died")
        status = run.poll()
        if status.state is not JobState.PENDING:
            pending_since = None
        elif pending_since is None:
            pending_since = time.monotonic()
        elif time.monotonic() - pending_since > 4:
            run.skip_delay()
            pending_since = None
        return status.state.is_final

    run.wait_until(has_ended, "the end", 180)
    run.site.cluster.wait_until(lambda: not run.site.cluster.ask("squeue", "-h"), "Slurm has let it go", 60)
    return run.poll()


def check_what_counts(run: Run) -> None:
    plan = load_plan(run.run_dir)
    for name, trials in plan.pairs().items():
        if name in find_whole_pairs(plan, run.run_dir):
            records = [load_json(run.run_dir.trial(trial.name).exit) for trial in trials]
            assert records[0]["allocation"] == records[1]["allocation"]
            assert {record["status"] for record in records} == {"ok"}


@pytest.mark.timeout(1800)
def test_twenty_faults_end_in_a_known_state_and_lose_nothing_that_counts(site: Site) -> None:
    source = random.Random(3)
    for number, fault in enumerate(itertools.islice(itertools.cycle(FAULTS), NUM_FAULTS)):
        run = site.submit((*LONG[:2], "measure.scored_steps=60", LONG[3]))
        run.wait_until(lambda: run.poll().state is not JobState.PENDING, "it runs")  # noqa: B023
        moment_s = source.uniform(0.0, 12.0)
        time.sleep(moment_s)
        right = fault(run)
        status = wait_for_end(run)
        what = f"{number}: {fault.__name__} after {moment_s:.1f} s: {status}"
        print(what)
        assert status.state in right, f"{what}\n{run.tail()}"
        assert inspect_bundle(run.collect()).is_sealed == (status.state is JobState.DONE), what
        check_what_counts(run)
        if status.state is JobState.DONE:
            assert verify_bundle(run.run_dir.bundle) == [], what
        site.cluster.wait_until(lambda: find_descendants(run.run_dir) == [], f"{what}: no process is left")  # noqa: B023
