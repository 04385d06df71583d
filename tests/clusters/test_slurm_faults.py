"""Faults on a real Slurm: a correct state, a bundle, and no half trial that counts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.agent.resume import find_whole_pairs
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.base.files import load_json
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.clusters.api import JobState, JobStatus
from rlk_repro.plan import Plan
from rlk_repro.rundir.state import Phase, read_state
from rlk_repro.submit import planning, sending
from tests.support.job_examples import fill_disk, find_descendants
from tests.support.make_run import verify_bundle
from tests.support.slurm.cluster import NODES, Cluster
from tests.support.slurm.runs import LONG, Run, Site, make_profile, start_or_skip
from tests.support.two_node_agent import allow_nodes

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SETTINGS = (*LONG[:2], "measure.scored_steps=60", LONG[3])
TWO_NODES = (*LONG, "layouts.cpu.num_nodes=2")
LAST_MOMENT_S = 8.0
DONE, FAILED, CANCELLED = JobState.DONE, JobState.FAILED, JobState.CANCELLED


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start_or_skip(tmp_path_factory.mktemp("slurm") / "c", slurmd_timeout_s=5)
    yield running
    running.close()


# Each breaks something and returns the states that are right afterwards; DONE wherever the run may have been quicker.


def cancel(run: Run) -> set[JobState]:
    if not run.cancel():
        return {DONE}
    state = read_state(run.run_dir)
    is_ending = state is not None and state.phase in {Phase.ENDING, Phase.ENDED}  # what seals is not stopped
    return {CANCELLED, DONE} if is_ending else {CANCELLED}


def cancel_with_slurm(run: Run) -> set[JobState]:
    run.site.cluster.ask("scancel", run.job_id)
    return {CANCELLED, DONE}


def reach_time_limit(run: Run) -> set[JobState]:
    run.site.cluster.ask("scontrol", "update", f"jobid={run.job_id}", "timelimit=1", check=False)
    return {FAILED, DONE}


def requeue(run: Run) -> set[JobState]:
    run.site.cluster.ask("scontrol", "requeue", run.job_id, check=False)
    return {DONE}


def kill_agent(run: Run) -> set[JobState]:
    """The script packs what it left."""
    run.wait_until(lambda: find_agents(run) or run.run_dir.is_sealed, "an agent")
    for pid in find_agents(run)[:1]:
        os.kill(pid, signal.SIGKILL)
    return {FAILED, DONE}


def find_agents(run: Run, node: str = "") -> list[int]:
    found = []
    for pid in find_descendants(run.run_dir):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            is_agent = b"python" in words[0] and b"rlk_repro.job" in words  # srun has the latter, too
            if is_agent and (not node or node.encode() in words):
                found.append(pid)
    return found


def kill_node(run: Run) -> set[JobState]:
    """The job starts again on the other node; the dead one comes back."""
    return lose_node(run, run.site.cluster.kill_node)


def kill_daemon(run: Run) -> set[JobState]:
    """Slurm starts the job again while the agent of the node that it believes dead still trains."""
    return lose_node(run, run.site.cluster.kill)


def lose_node(run: Run, kill: object) -> set[JobState]:
    assert callable(kill)
    cluster, node = run.site.cluster, run.poll().nodes
    if node in cluster.processes:
        kill(node)
        run.wait_until(lambda: cluster.node_states()[node].startswith("down"), f"{node} is down")
        cluster.start_node(node)
    return {DONE}


def restart_daemon(run: Run) -> set[JobState]:
    cluster, node = run.site.cluster, run.poll().nodes
    if node in cluster.processes:
        cluster.kill(node)
        cluster.start_node(node)
    return {DONE}


def drain_node(run: Run) -> set[JobState]:
    """A node that drains lets its job end."""
    node = run.poll().nodes
    if node in run.site.cluster.processes:
        run.site.cluster.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    return {DONE}


def lose_controller(run: Run) -> set[JobState]:
    """For some seconds nobody knows how the run is, and nothing is done to it for that."""
    run.site.cluster.stop_controller()
    try:
        status = run.poll()
        if not run.run_dir.is_sealed:
            assert (status.state, status.is_unreachable) == (JobState.UNKNOWN, True)
            assert "squeue did not answer" in status.reason
            for ask in (run.cancel, run.collect):
                with contextlib.suppress(EnvironmentMissing):
                    ask()
                    assert run.run_dir.is_sealed
        time.sleep(3)
    finally:
        run.site.cluster.start_controller()
    return {DONE}


FAULTS = (
    *(cancel, reach_time_limit, requeue, kill_node, lose_controller),
    *(cancel_with_slurm, drain_node, kill_daemon, restart_daemon, kill_agent),
)


def wait_for_end(run: Run) -> JobStatus:
    """A requeued job starts again after some seconds; at once, while old steps are cleaned up, is not Slurm's way."""
    pending_since: float | None = None

    def has_ended() -> bool:
        nonlocal pending_since
        run.site.cluster.revive_controller()
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
    run.site.cluster.wait_until(lambda: not run.site.cluster.ask("squeue", "-h"), "Slurm has let it go", 150)
    return run.poll()


def check_end(run: Run, right: set[JobState], what: str) -> None:
    """Check the state, the bundle, and that the trials of each complete pair ran in one allocation."""
    status = wait_for_end(run)
    assert status.state in right, f"{what}: {status}\n{run.tail()}"
    assert inspect_bundle(run.collect()).is_sealed == (status.state is DONE), what
    plan = Plan.load(run.run_dir.plan)
    pairs = plan.pairs()
    for name in find_whole_pairs(plan, run.run_dir):
        records = [load_json(run.run_dir.trial(trial.name).exit) for trial in pairs[name]]
        assert {record["status"] for record in records} == {"ok"}
        assert len({record["allocation"] for record in records}) == 1
    if status.state is DONE:
        assert verify_bundle(run.run_dir.bundle) == [], what
    run.site.cluster.wait_until(lambda: find_descendants(run.run_dir) == [], "no process is left")


def wait_for_a_moment(run: Run, number: int) -> float:
    run.wait_until(lambda: run.poll().state is not JobState.PENDING, "it runs")
    moment_s = random.Random(number).uniform(0.0, LAST_MOMENT_S)
    time.sleep(moment_s)
    return moment_s


@pytest.mark.parametrize(
    "number", [*range(5), *(pytest.param(number, marks=pytest.mark.long) for number in range(5, len(FAULTS)))]
)
def test_a_fault_ends_in_a_known_state_and_loses_nothing_that_counts(site: Site, number: int) -> None:
    fault = FAULTS[number]
    run = site.submit(SETTINGS)
    moment_s = wait_for_a_moment(run, number)
    right = fault(run)
    try:
        check_end(run, right, f"{fault.__name__} after {moment_s:.1f} s")
    finally:
        site.cluster.resume()


def test_a_full_disk_ends_the_run_and_its_records_are_collected(
    site: Site, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLK_REPRO_RUNS", str(small_disk / "runs"))
    run = site.submit(SETTINGS)
    moment_s = wait_for_a_moment(run, 1)
    ballast = fill_disk(small_disk)
    run.wait_until(lambda: not site.cluster.ask("squeue", "-h"), "the job is over")
    ballast.unlink()
    check_end(run, {FAILED, DONE}, f"disk full after {moment_s:.1f} s")


def test_a_waiting_job_gives_the_reason_and_is_cancelled_without_a_trial(site: Site) -> None:
    site.cluster.ask("scontrol", "update", f"nodename={','.join(NODES)}", "state=drain", "reason=test")
    try:
        run = site.submit(SETTINGS)
        run.wait_for_drained()
        check_end(run, cancel(run), "cancelled while it waited")
        assert not run.run_dir.trials.exists()
    finally:
        site.cluster.resume()


def test_a_refusal_quotes_sbatch_and_leaves_no_job(call, site: Site) -> None:
    profile = make_profile(site.folder, partition="nope")
    code, out, err = call("submit", "--run", "smoke", "--cluster", "slurm", "--profile", str(profile))
    assert (code, out) == (4, "")
    assert "invalid partition specified: nope" in err
    assert site.cluster.ask("squeue", "-h") == ""


@pytest.mark.long
@pytest.mark.parametrize("place", [0, 1], ids=["leader", "follower"])
def test_a_killed_agent_of_two_nodes_ends_the_job_with_a_bundle(
    site: Site, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    allow_nodes(monkeypatch)
    run = site.submit(TWO_NODES)
    run.wait_for_step()
    os.kill(find_agents(run, NODES[place])[0], signal.SIGKILL)
    status = run.wait_for_end()
    assert status.state is JobState.FAILED
    if place:
        assert "the agent of node-1 ended first (Killed), stopped by SIGTERM" in status.reason
    run.wait_for_script()
    assert (run.run_dir.bundle.is_file(), run.run_dir.is_sealed) == (True, False)


@pytest.mark.long
@pytest.mark.parametrize("place", [0, 1], ids=["leader", "follower"])
def test_a_lost_node_of_two_is_named_and_the_run_goes_on_with_both(
    site: Site, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    allow_nodes(monkeypatch)
    run = site.submit(TWO_NODES)
    run.wait_for_step()
    node = NODES[place]
    site.cluster.kill_node(node)
    try:
        run.wait_until(lambda: run.poll().state is JobState.PENDING, "waiting again")
        assert f"lost node {node}" in run.poll().reason, run.tail()
        # both nodes of this cluster are one machine: a node that comes back at once still has its old job's processes
        assert run.cancel()
        assert run.wait_for_end().state is JobState.CANCELLED
        assert not run.run_dir.is_sealed
    finally:
        site.cluster.start_node(node)
        site.cluster.wait_for_nodes()
    again = dataclasses.replace(run, launched=sending.submit(planning.prepare_resume(run.run_dir.run_id)))
    check_end(again, {DONE}, "resumed")
    assert (run.run_dir.interrupted / "1" / "00-p1-baseline").is_dir()
