"""Losses on a real Slurm: a node's daemon alone, and what one of two nodes had to do with a run."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest

from rlk_repro.base.files import load_json
from rlk_repro.clusters.api import JobState
from rlk_repro.rundir.state import read_last_word
from rlk_repro.submit import planning, sending
from tests.clusters.test_slurm_faults import find_agents
from tests.support.make_run import verify_bundle
from tests.support.slurm.runs import LONG, Run, Site
from tests.support.two_node_agent import allow_nodes

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(900)]

# long enough on a quick machine, and not too long on a busy one
SETTINGS = (*LONG[:2], "measure.scored_steps=150", LONG[3])
LIMIT_S = 500.0


def wait_for_requeue(run: Run) -> None:
    run.wait_until(lambda: run.poll().state is JobState.PENDING or run.run_dir.is_sealed, "waiting again", LIMIT_S)
    run.skip_delay()


def require_one_allocation(run: Run) -> None:
    allocations = {load_json(folder.exit)["allocation"] for folder in run.run_dir.trial_dirs()}
    assert len(allocations) == 1
    assert verify_bundle(run.collect()) == []


def test_a_node_whose_daemon_alone_dies_ends_in_a_sealed_run(site: Site) -> None:
    """Slurm starts the job again while the agent of the node that it believes dead still trains."""
    run = site.submit(SETTINGS)
    run.wait_for_step()
    node = run.poll().nodes
    site.cluster.kill(node)
    try:
        wait_for_requeue(run)
        told: list[str] = []
        states: list[JobState] = []

        def has_ended() -> bool:
            states.append(run.poll().state)
            last = read_last_word(run.run_dir).line
            if last not in told:
                told.append(last)
            return states[-1] is JobState.DONE

        run.wait_until(has_ended, "the end", LIMIT_S)
        print(told)
        assert JobState.FAILED not in states
        require_one_allocation(run)
    finally:
        site.cluster.start_node(node)
        site.cluster.wait_for_nodes()


@pytest.fixture
def two_nodes(site: Site, monkeypatch: pytest.MonkeyPatch) -> str:
    allow_nodes(monkeypatch)
    agent = site.folder / "agent"
    agent.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.support.two_node_agent "$@"\n')
    agent.chmod(0o755)
    return str(agent)


@pytest.mark.parametrize("place", [0, 1], ids=["leader", "follower"])
def test_a_killed_agent_of_two_nodes_ends_the_job_with_a_bundle(site: Site, two_nodes: str, place: int) -> None:
    run = site.submit((*SETTINGS, "layouts.cpu.num_nodes=2"), python=two_nodes)
    run.wait_for_step()
    node = run.poll().nodes.split(",")[place] if "," in run.poll().nodes else f"node-{place}"
    agents = [pid for pid in find_agents(run) if f"--node\0{node}\0" in read_words(pid)]
    os.kill(agents[0], signal.SIGKILL)
    status = run.wait_for_end(LIMIT_S)
    assert status.state is JobState.FAILED
    if place:
        assert "the agent of node-1 ended first (Killed), stopped by SIGTERM" in status.reason
    run.wait_for_script()
    assert run.run_dir.bundle.is_file()
    assert not run.run_dir.is_sealed


def read_words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.parametrize("place", [0, 1], ids=["leader", "follower"])
def test_a_lost_node_of_two_is_named_and_the_run_goes_on_with_both(site: Site, two_nodes: str, place: int) -> None:
    run = site.submit((*SETTINGS, "layouts.cpu.num_nodes=2"), python=two_nodes)
    run.wait_for_step()
    node = f"node-{place}"
    site.cluster.kill_node(node)
    try:
        run.wait_until(lambda: run.poll().state is JobState.PENDING, "waiting again", LIMIT_S)
        told = run.poll().reason
        assert f"lost node {node}" in told, (told, run.tail())
        # both nodes of this cluster are one machine: a node that comes back at once still has its old job's processes
        assert run.cancel()
        assert run.wait_for_end(LIMIT_S).state is JobState.CANCELLED
        assert not run.run_dir.is_sealed
    finally:
        site.cluster.start_node(node)
        site.cluster.wait_for_nodes()
    again = dataclasses.replace(run, launched=sending.submit(planning.prepare_resume(run.run_dir.run_id)))
    assert again.wait_for_end(LIMIT_S).state is JobState.DONE, again.tail()
    require_one_allocation(again)
    assert (run.run_dir.interrupted / "1" / "00-p1-baseline").is_dir()
