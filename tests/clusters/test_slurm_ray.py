"""A real Ray cluster across the nodes of a real Slurm: up before every trial, down after it.

Both nodes are this machine: what lies between two machines (their network, a shared file system that shows changes
late) is not tested.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import pytest

from rlk_repro.rundir.paths import RunDir
from tests import SUPPORT
from tests.support.make_run import verify_bundle
from tests.support.slurm.cluster import NODES
from tests.support.slurm.runs import SETTINGS, Site
from tests.support.two_node_agent import ADDRESSES, allow_nodes

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TRIALS = {"00-p1-baseline": "0", "01-p1-enabled": "1"}


def require_ray_around_every_trial(run_dir: RunDir, trials: Mapping[str, str]) -> None:
    """Each trial saw both nodes of a Ray of its own, with its own switch; no Ray lived longer than its trial."""
    for trial, switch in trials.items():
        log = run_dir.trial(trial).stdout.read_text()
        for node in NODES:
            assert f"task on {node} host={ADDRESSES[node]} switch={switch}\n" in log
            assert not run_dir.node(node).ray_logs(trial).exists()
    events = [json.loads(line) for line in run_dir.agent_log.read_text().splitlines()]
    ups_and_downs = [(item["event"], item["use"]) for item in events if item["event"] in {"ray up", "ray down"}]
    assert ups_and_downs == [(event, trial) for trial in trials for event in ("ray up", "ray down")]
    assert not run_dir.ray_token.exists()


@pytest.fixture
def two_nodes(site: Site, monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter of the nodes: their agents put up a Ray over both."""
    allow_nodes(monkeypatch)
    agent = site.folder / "agent"
    command = f'{sys.executable} -m tests.support.two_node_agent --ray "$@"'
    agent.write_text(f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{SUPPORT}/fake_rl_engine"\nexec {command}\n')
    agent.chmod(0o755)
    return str(agent)


def test_both_variants_run_on_a_ray_of_two_nodes(site: Site, two_nodes: str) -> None:
    run = site.submit((*SETTINGS, "layouts.cpu.num_nodes=2"), python=two_nodes)
    assert run.wait_for_end(480).reason == "sealed, 2 of 2 trials ok"
    require_ray_around_every_trial(run.run_dir, TRIALS)
    assert verify_bundle(run.collect()) == []


def test_sessions_run_on_a_ray_of_two_nodes(site: Site, two_nodes: str) -> None:
    """Both variants by turns in the processes of one session, each session in a Ray of its own."""
    design = ("measure.design=crossover", "measure.sessions=2", "measure.blocks=2", "measure.control_blocks=1")
    run = site.submit((*design, *SETTINGS[3:], "layouts.cpu.num_nodes=2"), python=two_nodes)
    assert run.wait_for_end(480).reason == "sealed, 2 of 2 trials ok"
    require_ray_around_every_trial(run.run_dir, dict.fromkeys(("00-s1-crossover", "01-s2-crossover"), "1"))
    assert verify_bundle(run.collect()) == []
    analysis = json.loads(run.run_dir.analysis.read_text())
    assert [pair["status"] for pair in analysis["pairs"]] == ["scored", "scored"]
    assert len(analysis["blocks"]) == 6
    assert not any(block["reason"] for block in analysis["blocks"])
    assert {trial["proof"] for trial in analysis["trials"]} == {"not requested", "native"}
