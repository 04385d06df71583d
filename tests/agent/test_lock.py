"""One agent leads in a run directory, also where locks hold on one node only; a requeued job takes over."""

from __future__ import annotations

import fcntl
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.agent.lock import Holder, RunLock
from rlk_repro.agent.parts import Agent, Deadlines, make_place
from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.base.files import load_json
from rlk_repro.base.stop import Stop
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_state
from tests import ROOT
from tests.support.job_examples import find_descendants, make_parts, make_staged, run_example
from tests.support.make_run import verify_bundle
from tests.support.waiting import wait_until

QUICK = Deadlines(pulse_s=0.1, silent_s=1.0, handover_s=1.0)


def make_lock(run_dir: RunDir, node: str, allocation: str, deadlines: Deadlines = QUICK, **tell: Any) -> RunLock:
    return RunLock(make_agent(run_dir, node, allocation, deadlines), tell.get("tell", print))


def make_agent(run_dir: RunDir, node: str, allocation: str, deadlines: Deadlines) -> Agent:
    parts = make_parts(deadlines=deadlines)
    place = make_place(node, (node,), allocation)
    return Agent(plan=Plan.load(run_dir.plan), run_dir=run_dir, place=place, parts=parts, stop=Stop())


@pytest.fixture(params=["common", "local"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """``local``: on the run directory's file system, flock excludes nobody, as between two nodes of BeeGFS."""
    kind: str = request.param
    if kind == "local":
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    return kind


@pytest.mark.parametrize(
    ("later", "earlier", "is_later"),
    [("12.1", "12.0", True), ("12.10", "12.9", True), ("12.0", "12.1", False), ("12.0", "12.0", False),
     ("13.1", "12.0", False), ("0f.1", "0f", True), ("0f", "0e", False)],
)  # fmt: skip
def test_only_a_later_allocation_of_the_same_job_may_take_over(later: str, earlier: str, is_later: bool) -> None:
    assert Holder("a", later).comes_after(Holder("b", earlier)) is is_later


def test_another_job_is_refused_at_once(tmp_path: Path, locks: str) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    with make_lock(run_dir, "a", "12.0") as held:
        assert held.is_taken
        with pytest.raises(SpecError) as caught, make_lock(run_dir, "b", "13.0"):
            pass
    assert str(caught.value) == (
        f"{run_dir.root}: another agent runs here (node a, allocation 12.0)\n"
        "  hint: wait for that agent, or cancel its job"
    )
    with make_lock(run_dir, "b", "13.0") as free:
        assert free.is_taken


def test_an_orphan_that_does_not_end_is_named_with_what_to_do(tmp_path: Path, locks: str) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    told: list[str] = []
    with make_lock(run_dir, "a", "12.0", Deadlines(pulse_s=0.1)) as orphan:
        orphan._is_ending = True  # it says so, and stays
        with pytest.raises(SpecError, match="end the agent on node a by hand"):
            make_lock(run_dir, "b", "12.1", tell=told.append).__enter__()
    assert "waits until the agent of node a, allocation 12.0 has ended" in told


def test_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    _, run_dir = make_staged(tmp_path / "run")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(EnvironmentMissing, match="cannot be locked"):
        make_lock(run_dir, "a", "1").__enter__()


def test_what_a_killed_agent_left_is_watched_only_if_it_ran_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    watched: list[str] = []
    for node in ("a", "b"):
        run_dir.lock.write_text("a\n12.0\n7\n")
        with make_lock(run_dir, node, "13.0", tell=watched.append) as taken:
            assert taken.is_taken
    assert watched == ["looks whether the agent of node a, allocation 12.0 still runs"]


# An agent as a process of its own, whose flock excludes nobody if the first argument is ``local``.
AGENT = """
import fcntl, sys
from pathlib import Path
from rlk_repro.agent.agent import run_agent
from rlk_repro.agent.parts import Agent, Deadlines, make_place
from rlk_repro.base.errors import RlkReproError
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from tests.support.job_examples import FakeWorkload, make_parts
kind, root, node, allocation, *actions = sys.argv[1:]
if kind == "local":
    fcntl.flock = lambda *_: None
deadlines = Deadlines(grace_s=5, idle_s=0.05, pulse_s=0.2, silent_s=3, handover_s=60)
place = make_place(node, (node,), allocation)
try:
    code = run_agent(RunDir(Path(root)), place,
                     parts=make_parts(FakeWorkload(actions=actions), deadlines=deadlines))
except RlkReproError as error:
    sys.stderr.write(f"{error}")
    code = error.exit_code
sys.exit(code)
"""


class Agents:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        _, self.run_dir = make_staged(folder / "run", ["measure.pairs=2"])
        self.output = folder / "output"
        self.all: list[Any] = []

    def start(self, node: str, allocation: str, *actions: str) -> Any:
        argv = [sys.executable, "-c", AGENT, self.kind, str(self.run_dir.root), node, allocation, *actions]
        with self.output.open("ab") as output:
            agent = proc.start(argv, output_fd=output.fileno(), cwd=ROOT)
        self.all.append(agent)
        return agent

    def allocations(self) -> dict[str, str]:
        return {folder.name: load_json(folder.exit)["allocation"] for folder in self.run_dir.trial_dirs()}

    def close(self) -> None:
        for agent in self.all:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        wait_until(lambda: find_descendants(self.run_dir) == [])


@pytest.fixture(params=["common", "local"])
def agents(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agents]:
    with ExitStack() as stack:
        made = Agents(request.param, tmp_path)
        stack.callback(made.close)
        yield made


@pytest.mark.real
def test_a_requeued_job_takes_over_from_its_orphan_and_mixes_nothing(agents: Agents) -> None:
    run_dir = agents.run_dir
    orphan = agents.start("a", "9.0", "begin", "sleep:60")
    wait_until(run_dir.trial("00-p1-baseline").stdout.exists)
    successor = agents.start("b", "9.1", "begin", "steps:3:0.001", "end")
    assert orphan.wait(timeout=60) == 143
    assert "this allocation is gone: node b, allocation 9.1 has begun; this agent ends" in agents.output.read_text()
    assert successor.wait(timeout=60) == 0, agents.output.read_text()
    assert set(agents.allocations().values()) == {"9.1"}
    assert (run_dir.interrupted / "1" / "00-p1-baseline").is_dir()
    assert verify_bundle(run_dir.bundle) == []


@pytest.mark.real
def test_an_orphan_that_completes_the_run_leaves_nothing_to_do(agents: Agents) -> None:
    run_dir = agents.run_dir
    with make_lock(run_dir, "a", "9.0") as orphan:
        orphan._is_ending = True  # the claim would end this process, if a loaded machine gives the lock time to see it
        successor = agents.start("b", "9.1", "begin", "end")
        wait_until(lambda: (state := read_state(run_dir)) is not None and "allocation 9.0" in state.message)
        run_dir.checksums.write_text("sealed\n")
    assert successor.wait(timeout=60) == 0, agents.output.read_text()
    assert agents.allocations() == {}


@pytest.mark.real
def test_an_agent_of_another_job_changes_nothing(agents: Agents) -> None:
    run_dir = agents.run_dir
    first = agents.start("a", "9.0", "begin", "sleep:60")
    wait_until(run_dir.trial("00-p1-baseline").stdout.exists)
    assert agents.start("b", "10.0", "begin", "end").wait(timeout=60) == 2
    assert "another agent runs here (node a, allocation 9.0)" in agents.output.read_text()
    first.terminate()
    assert first.wait(timeout=60) == 143
    assert set(agents.allocations().values()) == {"9.0"}
    assert not run_dir.interrupted.exists()


def test_an_agent_that_is_stopped_while_it_waits_says_so(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    agent = make_agent(run_dir, "b", "9.1", Deadlines())
    waiting = RunLock(agent, lambda _: agent.stop.request(signal.SIGTERM))
    with make_lock(run_dir, "a", "9.0", Deadlines(pulse_s=60)), waiting:
        assert not waiting.is_taken
    assert run_dir.claim.read_text() == "b\n9.1\n"


def test_an_agent_whose_lock_was_taken_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after its node stood still for longer than others wait."""
    _, run_dir = make_staged(tmp_path / "run")
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda _, number: killed.append(number))
    with make_lock(run_dir, "a", "9.0"):
        run_dir.lock.write_text("b\n10.0\n1\n")
        wait_until(lambda: killed == [signal.SIGTERM])
    assert run_dir.lock.read_text() == "b\n10.0\n1\n"


def test_the_lock_file_changes_while_its_holder_runs_and_is_empty_after(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    with make_lock(run_dir, "a", "9.0"):
        before = run_dir.lock.read_bytes()
        wait_until(lambda: run_dir.lock.read_bytes() != before)
    assert run_dir.lock.read_bytes() == b""
    assert run_example(run_dir) == 0
