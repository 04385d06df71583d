"""A real Ray cluster of two agents: up and down around every trial, and what becomes of one when a part of it dies."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.agent.node import read_preflight
from rlk_repro.agent.ray.members import parse_names
from rlk_repro.base import proc, procfs
from rlk_repro.base.files import load_json
from rlk_repro.rundir.paths import RunDir
from tests import ROOT
from tests.support.job_examples import PROFILE, find_alive, find_descendants, make_staged, statuses
from tests.support.make_run import verify_bundle
from tests.support.ray.examples import ALLOCATION, NODES

LIMIT_S = 240.0

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs ray, which has no build for this Python"
)


class Nodes:
    """One run directory and the agents that work in it; none of them is left behind."""

    def __init__(self, folder: Path, *, seconds: float, ray_up_s: float) -> None:
        self.pids = folder / "pids"
        self.pids.mkdir()
        self.port = find_ports()
        profile = PROFILE + b"ray: {first_port: %d}\ntelemetry_interval_s: 0.1\n" % self.port
        _, self.run_dir = make_staged(folder / "run", ["measure.pairs=1"], profile=profile)
        self.options = [str(seconds), str(ray_up_s), str(self.pids)]
        self.agents: dict[str, Any] = {}
        self.output = folder / "output"

    def start(self, nodes: Sequence[str] = NODES) -> None:
        # as in a shell that has seen another Ray: none of it may reach this one
        stray = {"RAY_ADDRESS": "127.0.0.1:1", "RAY_AUTH_TOKEN": "0" * 64, "http_proxy": "http://127.0.0.1:1"}
        env = {**os.environ, **stray, "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100 << 20)}
        for node in nodes:
            argv = [sys.executable, "-m", "tests.support.ray.examples", str(self.run_dir.root), node]
            with self.output.open("ab") as output:
                self.agents[node] = proc.start([*argv, *self.options], output_fd=output.fileno(), cwd=ROOT, env=env)

    def wait(self) -> dict[str, int]:
        """As ``srun --kill-on-bad-exit=1``: an agent that ends badly ends the others."""
        self.wait_until(lambda: all(agent.poll() is not None for agent in self.agents.values()) or self.has_bad_end())
        if self.has_bad_end():
            for agent in self.agents.values():
                agent.terminate()
        return {node: agent.wait(timeout=LIMIT_S) for node, agent in self.agents.items()}

    def has_bad_end(self) -> bool:
        return any(agent.poll() for agent in self.agents.values())

    def wait_until(self, is_there: Callable[[], object]) -> None:
        until = time.monotonic() + LIMIT_S
        while not is_there():
            assert time.monotonic() < until, self.output.read_text()
            time.sleep(0.05)

    def wait_for_steps(self) -> None:
        """The first trial has run its tasks."""
        log = self.run_dir.trial("00-p1-baseline").stdout
        self.wait_until(lambda: log.exists() and b"perf 2" in log.read_bytes())

    def find_raylet(self, node: str) -> int:
        found = procfs.find_descendants(self.agents[node].pid)
        return next(pid for pid in found if Path(f"/proc/{pid}/exe").resolve().name == "raylet")

    def find_left(self) -> list[int]:
        """Whatever the run has started and still runs: known by what it inherited."""
        return find_alive(find_descendants(self.run_dir))

    def require_nothing_left(self) -> None:
        self.wait_until(lambda: not self.find_left())
        assert find_alive([int(path.name) for path in self.pids.iterdir()]) == []
        assert not is_taken(self.port)

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGCONT)
                agent.kill()
                agent.wait()
        self.wait_until(lambda: not self.find_left())


def find_ports() -> int:
    """The first of some ports in a row that nobody uses."""
    source = random.Random()
    while True:
        first = source.randrange(6400, 7900)
        if not any(is_taken(first + number) for number in range(15)):
            return first


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    with ExitStack() as stack:

        def make(*, seconds: float = 0.0, ray_up_s: float = 150) -> Nodes:
            nodes = Nodes(tmp_path, seconds=seconds, ray_up_s=ray_up_s)
            stack.callback(nodes.close)
            return nodes

        yield make


def exit_of(run_dir: RunDir, trial: str) -> Any:
    return load_json(run_dir.trial(trial).exit)


def find_blocking(run_dir: RunDir, node: str) -> list[str]:
    return [str(item) for item in read_preflight(run_dir, node, ALLOCATION) or [] if item.level == "blocking"]


@pytest.mark.real
def test_every_trial_gets_a_fresh_ray_on_all_nodes_with_its_own_environment(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes()
    nodes.start()
    assert nodes.wait() == {"a": 0, "b": 0}, nodes.output.read_text()
    run_dir = nodes.run_dir
    for trial, switch in (("00-p1-baseline", "0"), ("01-p1-enabled", "1")):
        log = run_dir.trial(trial).stdout.read_text()
        for node, address in (("a", "127.0.0.2"), ("b", "127.0.0.3")):
            assert f"task on {node} host={address} switch={switch} proxy=none\n" in log
            assert not run_dir.node(node).ray_logs(trial).exists()
        assert "RAY_ADDRESS" not in load_json(run_dir.trial(trial).env)["env"]
    assert len(list(nodes.pids.iterdir())) == 4
    nodes.require_nothing_left()
    assert not run_dir.ray_token.exists()
    assert verify_bundle(run_dir.bundle) == []


def test_ray_talks_around_the_names_of_its_nodes() -> None:
    line = 'rlk-repro nodes: ["a", "b"]'
    assert parse_names(f"2026-11-20 INFO worker.py: connected\n\n{line}\n[2026-11-20 core_worker.cc] slow\n") == NODES
    assert parse_names("Traceback\n") == ()


INTERRUPTED = {"00-p1-baseline": "interrupted"}


@pytest.mark.real
@pytest.mark.parametrize(
    ("node", "number", "code", "trials"),
    [
        ("a", signal.SIGKILL, -9, {}),
        ("b", signal.SIGKILL, -9, INTERRUPTED),
        ("a", signal.SIGTERM, 143, INTERRUPTED),
        ("b", signal.SIGTERM, 143, INTERRUPTED),
    ],
)
def test_a_lost_agent_interrupts_the_trial_and_leaves_no_process(
    make_nodes: Callable[..., Nodes], node: str, number: signal.Signals, code: int, trials: dict[str, str]
) -> None:
    nodes = make_nodes(seconds=300)
    nodes.start()
    nodes.wait_for_steps()
    nodes.agents[node].send_signal(number)
    codes = nodes.wait()
    # the leader is asked to stop as well, or has seen the loss before
    assert (codes[node], codes["a"] in {code, 3, 143}) == (code, True)
    assert statuses(nodes.run_dir) == trials
    assert not nodes.run_dir.is_sealed
    nodes.require_nothing_left()


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("node", NODES)
def test_ray_that_ends_on_a_node_fails_the_trial_and_the_next_one_gets_a_new_one(
    make_nodes: Callable[..., Nodes], node: str
) -> None:
    nodes = make_nodes(seconds=12)
    nodes.start()
    nodes.wait_for_steps()
    os.kill(nodes.find_raylet(node), signal.SIGKILL)
    assert nodes.wait() == {"a": 1, "b": 0}, nodes.output.read_text()
    assert statuses(nodes.run_dir) == {"00-p1-baseline": "failed", "01-p1-enabled": "ok"}
    assert f"Ray ended on node {node}: ray start ended with 1: " in exit_of(nodes.run_dir, "00-p1-baseline")["reason"]
    for name in NODES:
        logs = nodes.run_dir.node(name).ray_logs
        assert (logs("00-p1-baseline") / "raylet.out").is_file()
        assert not logs("01-p1-enabled").exists()
    assert nodes.run_dir.is_sealed
    nodes.require_nothing_left()


@pytest.mark.long
@pytest.mark.real
def test_a_port_that_is_taken_is_named_on_the_node_that_needs_it(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(ray_up_s=20)
    with socket.create_server(("127.0.0.1", nodes.port)):
        nodes.start()
        assert nodes.wait()["a"] == 3
    expected = f"expected a node that joins Ray's head 127.0.0.2:{nodes.port} within 20 s"
    taken = f"did not join: port {nodes.port} (port) is taken on 127.0.0.2"
    assert f"nodes.a: {taken}, {expected}\n" in nodes.output.read_text()
    assert find_blocking(nodes.run_dir, "a") == [
        f"blocking: nodes.a.00-p1-baseline: nodes.a: {expected}, found {taken}"
    ]
    assert statuses(nodes.run_dir) == {}
    nodes.require_nothing_left()


@pytest.mark.real
def test_a_node_that_does_not_join_is_named(make_nodes: Callable[..., Nodes]) -> None:
    """Its agent stands still after preflight, as on a node that hangs."""
    nodes = make_nodes(ray_up_s=20)
    nodes.start()
    nodes.wait_until(lambda: read_preflight(nodes.run_dir, "b", ALLOCATION) is not None)
    nodes.agents["b"].send_signal(signal.SIGSTOP)
    assert nodes.agents["a"].wait(timeout=LIMIT_S) == 3
    assert "nodes.b: did not join: not known to Ray's head" in nodes.output.read_text()
    nodes.agents["b"].send_signal(signal.SIGCONT)
    assert nodes.wait()["a"] == 3
    nodes.require_nothing_left()
