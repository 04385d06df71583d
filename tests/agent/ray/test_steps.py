"""The leader's steps with a stand-in for Ray: what becomes of a trial that loses a node or its Ray."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.agent.parts import Agent, Deadlines, make_place
from rlk_repro.agent.process import Ended
from rlk_repro.agent.ray import steps
from rlk_repro.agent.ray.node import MIN_STORE_BYTES, RayNode, find_store_bytes, require_tokens
from rlk_repro.agent.ray.steps import Steps
from rlk_repro.agent.step import Report, Stage, Step, read_step, write_report
from rlk_repro.agent.trial import Outcome
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.base.findings import Finding
from rlk_repro.base.stop import Stop
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.workloads.api import Command
from tests.support.job_examples import make_parts, make_staged

ENDED = Ended(code=1, signal=None, cause=None, duration_s=1.0)
FAILED = Outcome(status=TrialStatus.FAILED, reason="exit code 1", ended=ENDED, started_unix_s=0.0)
RAY = Command(argv=("true",), env={}, needs_ray=True)
TRIAL = "00-p1-baseline"
QUICK = Deadlines(grace_s=0.5, idle_s=0.2, ray_down_s=0.3, ray_up_s=0.2)
SILENT = "its agent did not report the end of the step within 1 s"


class StandIn:
    """Ray on the leader's node, up until it has a reason to be down."""

    client_env = {"RAY_ADDRESS": "127.0.0.1:6379"}  # noqa: RUF012

    def __init__(self) -> None:
        self.reason = ""

    @property
    def is_up(self) -> bool:
        return not self.reason

    def keep(self, *, is_joining: bool) -> None: ...

    def put_away(self, *, keeps_logs: bool) -> None: ...


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(steps, "RayNode", lambda *_: made)
    monkeypatch.setattr(steps, "require_tokens", lambda: None)
    monkeypatch.setattr(steps, "find_members", lambda *_: ("a", "b"))
    return made


def make_agent(folder: Path) -> Agent:
    plan, run_dir = make_staged(folder / "run")
    place = make_place("a", ("a", "b"), "job-7")
    parts = make_parts(deadlines=QUICK, find_address=lambda *_: "127.0.0.1")
    return Agent(plan=plan, run_dir=run_dir, place=place, parts=parts, stop=Stop())


@pytest.mark.parametrize(
    ("changes", "own", "status", "reason", "loss"),
    [
        ({"has_left": True}, "", TrialStatus.INTERRUPTED, "node b is lost: {loss}", "the node's agent has ended"),
        ({"number": 1}, "", TrialStatus.INTERRUPTED, "node b is lost: {loss}", SILENT),
        ({"number": 1, "is_over": True}, "", TrialStatus.FAILED, "", ""),
        ({"number": 1, "is_over": True, "reason": "x"}, "", TrialStatus.FAILED, "Ray ended on node b: x", ""),
        ({"number": 1, "is_over": True}, "y", TrialStatus.FAILED, "Ray ended on node a: y", ""),
    ],
)
def test_a_trial_that_lost_a_node_is_interrupted_and_one_that_lost_ray_failed(
    tmp_path: Path, ray: StandIn, changes: dict[str, Any], own: str, status: TrialStatus, reason: str, loss: str
) -> None:
    agent = make_agent(tmp_path)
    led = Steps(agent, lambda *_, **__: None, lambda _: None)
    is_lost = pytest.raises(EnvironmentMissing, match=f"nodes.b: is lost: {loss}") if loss else nullcontext()
    with is_lost, led.serve(TRIAL, RAY) as watch:
        assert watch.find_trouble() == ""
        write_report(agent.run_dir, "b", Report(allocation="job-7", **changes))
        ray.reason = own
        settled = watch.settle(FAILED)
    expected = "; ".join(filter(None, (reason.format(loss=loss), "exit code 1")))
    assert (settled.status, settled.reason) == (status, expected)
    assert led.lost == ({"b": loss} if loss else {})


def test_nodes_that_stay_away_are_an_error_and_a_finding(
    tmp_path: Path, ray: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "find_members", lambda *_: ("a",))
    agent, found = make_agent(tmp_path), list[Finding]()
    write_report(agent.run_dir, "b", Report(allocation="job-7", number=1, reason="port 6379 is taken"))
    led = Steps(agent, lambda *_, **__: None, found.extend)
    expected = "nodes.b: did not join: port 6379 is taken"
    with pytest.raises(EnvironmentMissing, match=expected), led.serve(TRIAL, RAY):
        pass
    assert [finding.where for finding in found] == [f"{TRIAL}: nodes.b"]


def test_the_other_nodes_are_told_each_stage_and_the_token_is_gone_after(tmp_path: Path, ray: StandIn) -> None:
    agent = make_agent(tmp_path)
    led = Steps(agent, lambda *_, **__: None, lambda _: None)
    write_report(agent.run_dir, "b", Report(allocation="job-7", number=1, is_over=True))
    with led.serve(TRIAL, RAY):
        step = read_step(agent.run_dir, "job-7")
        assert step is not None
        assert (step.number, step.stage, step.use, step.head) == (1, Stage.RUNNING, TRIAL, "127.0.0.1:6379")
        assert agent.run_dir.ray_token.stat().st_mode & 0o777 == 0o600
    step = read_step(agent.run_dir, "job-7")
    assert step is not None
    assert step.stage is Stage.OVER
    assert not agent.run_dir.ray_token.exists()
    assert read_step(agent.run_dir, "job-8") is None


def test_a_command_that_needs_no_ray_gets_nothing(tmp_path: Path) -> None:
    with Steps(make_agent(tmp_path), print, print).serve(TRIAL, Command(argv=("true",), env={})) as watch:
        assert watch.env == {}


GIB = 1 << 30


@pytest.mark.parametrize(
    ("shm_bytes", "memory_bytes", "expected"),
    [
        (64 * GIB, 2000 * GIB, 32 * GIB),
        (1000 * GIB, 100 * GIB, 30 * GIB),
        (1000 * GIB, 2000 * GIB, 200 * 10**9),
        (64 << 20, GIB, 80 << 20),
    ],
)
def test_ray_s_object_store_gets_half_of_the_shared_memory_and_no_more_than_ray_would_take(
    shm_bytes: int, memory_bytes: int, expected: int
) -> None:
    assert find_store_bytes(shm_bytes, memory_bytes) == expected


def test_our_own_ray_has_no_dashboard_and_a_token_which_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2.51.1")
    with pytest.raises(EnvironmentMissing, match="python module ray: has no authentication"):
        require_tokens()
    agent = make_agent(tmp_path)
    node = RayNode(agent, Step(allocation="job-7", use=TRIAL, head="192.0.2.1:6379"))
    argv = node.render_start("/tmp/x")
    assert argv[argv.index("--include-dashboard") + 1] == "false"
    assert argv[argv.index("--port") + 1] == "6379"
    assert int(argv[argv.index("--object-store-memory") + 1]) >= MIN_STORE_BYTES
    assert not [word for word in argv if "token" in word]
    assert node.client_env["RAY_AUTH_MODE"] == "token"
    assert node.client_env["RAY_AUTH_TOKEN_PATH"] == str(agent.run_dir.ray_token)
    names = ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "RAY_USAGE_STATS_ENABLED")
    assert [node.client_env[name] for name in names] == ["1", "1", "0"]
    node.put_away(keeps_logs=False)
