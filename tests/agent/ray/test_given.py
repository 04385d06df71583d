"""Ray that is there already and stays: a trial's own environment reaches workers that are older than the trial."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlk_repro.agent.parts import Agent, Deadlines, NodePlace
from rlk_repro.agent.process import Ended
from rlk_repro.agent.ray import steps
from rlk_repro.agent.ray.given import ADDRESS_VARIABLE
from rlk_repro.agent.ray.steps import Steps
from rlk_repro.agent.step import Report, write_report
from rlk_repro.agent.stop import Stop
from rlk_repro.agent.trial import Outcome
from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.base.findings import Finding
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import resolve_env
from tests.support.job_examples import make_parts

PORT = "6311"
QUICK_END = {"grace_s": 0.5, "idle_s": 0.2, "ray_down_s": 0.3}
DRIVER = """
import json, os, sys
import ray
ray.init(log_to_driver=False)

@ray.remote(num_cpus=0)
def read(names):
    return {name: os.environ.get(name) for name in names}

print(json.dumps(ray.get(read.remote(sys.argv[1:]))))
"""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Steps]:
    def make(
        *nodes: str,
        address: str = "127.0.0.1:6379",
        folder: Path = Path(),
        record: Callable[..., object] = lambda *_, **__: None,
        note: Callable[[list[Finding]], None] = lambda _: None,
        **deadlines: float,
    ) -> Steps:
        monkeypatch.setenv(ADDRESS_VARIABLE, address)
        place = NodePlace(node="node-0", nodes=nodes, allocation="a")
        parts = make_parts(deadlines=Deadlines(**deadlines))
        agent = Agent(plan=None, run_dir=RunDir(folder), place=place, parts=parts, stop=Stop())  # type: ignore[arg-type]
        return Steps(agent, record, note)

    return make


def make_command(**env: str) -> Command:
    return Command(argv=("true",), env=env, from_env={}, needs_ray=True)


def test_a_command_that_needs_no_ray_gets_nothing(given: Callable[..., Steps]) -> None:
    found: list[Finding] = []
    ray = given("node-0", note=found.extend)
    with ray.serve("00-p1-baseline", Command(argv=("true",), env={}, from_env={})) as service:
        assert service.env == {}
    assert found == []


def test_a_lasting_ray_is_reported_once(given: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    found: list[Finding] = []
    monkeypatch.setattr(steps, "find_members", lambda *_: ("node-0",))
    ray = given("node-0", record=lambda event, **_: told.append(event), note=found.extend)
    for number in range(2):
        with ray.serve(f"{number:02d}-p1-baseline", make_command(VIME_RL_KERNEL=str(number))) as service:
            config = json.loads(service.env["RAY_JOB_CONFIG_JSON_ENV_VAR"])
            assert config["runtime_env"]["env_vars"]["VIME_RL_KERNEL"] == str(number)
            assert service.env["RAY_ADDRESS"] == "127.0.0.1:6379"
    assert told == ["ray up", "ray down"] * 2
    assert [finding.where for finding in found] == ["ray"]
    assert ray.lost == {}


def test_nodes_that_stay_away_are_an_error(
    given: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(steps, "find_members", lambda *_: ("node-0",))
    ray = given("node-0", "node-1", address="127.0.0.1:1", folder=tmp_path, ray_up_s=0.2, **QUICK_END)
    with pytest.raises(EnvironmentMissing, match="expected 2 nodes"), ray.serve("rollouts-1", make_command()):
        pass


@pytest.mark.parametrize(
    ("report", "loss"),
    [
        (Report(allocation="a", has_left=True), "the node's agent has ended"),
        (Report(allocation="a", number=1), "its agent did not report the end of the step within 1 s"),
        (Report(allocation="a", number=1, is_over=True), ""),
    ],
)
def test_a_trial_that_lost_a_node_is_interrupted(
    given: Callable[..., Steps], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report, loss: str
) -> None:
    monkeypatch.setattr(steps, "find_members", lambda *_: ("node-0", "node-1"))
    run_dir = RunDir(tmp_path)
    ray = given("node-0", "node-1", folder=tmp_path, **QUICK_END)
    ended = Ended(code=1, signal=None, cause=None, num_leftovers=0, duration_s=1.0)
    failed = Outcome(status=TrialStatus.FAILED, reason="exit code 1", ended=ended, started_unix_s=0.0)
    is_lost = pytest.raises(EnvironmentMissing, match=f"nodes.node-1: is lost: {loss}") if loss else nullcontext()
    with is_lost, ray.serve("00-p1-baseline", make_command()) as service:
        assert service.find_trouble() == ""
        write_report(run_dir, "node-1", report)
        settled = service.settle(failed)
    if loss:
        assert settled.status is TrialStatus.INTERRUPTED
        assert settled.reason == f"node node-1 is lost: {loss}; exit code 1"
        assert ray.lost == {"node-1": loss}
    else:
        assert (settled, ray.lost) == (failed, {})


def test_what_a_command_asks_of_ray_s_workers_is_kept_beside_its_environment(
    given: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "find_members", lambda *_: ("node-0",))
    asked = json.dumps({"runtime_env": {"py_executable": "nsys profile python"}, "metadata": {}})
    ray = given("node-0")
    with ray.serve("00-p1-baseline", make_command(RAY_JOB_CONFIG_JSON_ENV_VAR=asked, A="1")) as service:
        config = json.loads(service.env["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"]
    assert config["py_executable"] == "nsys profile python"
    assert config["env_vars"]["A"] == "1"
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" not in config["env_vars"]


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A head of Ray that runs in no trial's environment, with a token, as KubeRay hands it to a pod."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    folder = tempfile.mkdtemp(prefix="rlk-given-", dir="/tmp")  # short: paths of sockets have 107 bytes
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", PORT]
    argv += ["--temp-dir", folder, "--include-dashboard", "false", "--num-cpus", "1"]
    with (tmp_path / "ray.log").open("wb") as log:
        head = proc.start(argv, output_fd=log.fileno(), env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"})
    yield f"127.0.0.1:{PORT}"
    proc.signal_process(head.pid, signal.SIGTERM)
    if not proc.wait(head, 30):
        proc.signal_group(head.pid, signal.SIGKILL)
        head.wait()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.real
def test_the_variants_environment_reaches_the_workers_of_a_ray_that_stays(
    given: Callable[..., Steps], address: str
) -> None:
    ray = given("node-0", address=address, ray_up_s=120)
    for value in ("0", "1"):
        command = make_command(VIME_RL_KERNEL=value)
        with ray.serve("00-p1-baseline", command) as service:
            assert os.environ["RAY_AUTH_TOKEN"] not in service.env["RAY_JOB_CONFIG_JSON_ENV_VAR"]
            env = resolve_env(command, os.environ)
            assert "RAY_AUTH_TOKEN" not in env
            assert run_driver({**env, **service.env}) == {"VIME_RL_KERNEL": value}
    stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    done = proc.run([sys.executable, "-c", DRIVER], env={**stranger, "RAY_ADDRESS": address}, timeout_s=90)
    assert not done.is_ok, "a process without the token came in"


@pytest.mark.real
def test_workers_of_a_ray_that_stays_start_under_what_the_command_asks(
    given: Callable[..., Steps], address: str, tmp_path: Path
) -> None:
    tool = tmp_path / "nsys"
    tool.write_text('#!/bin/sh\nshift 2\nexport VIME_RL_KERNEL=traced\nexec "$@"\n')
    tool.chmod(0o755)
    config = {"runtime_env": {"py_executable": f"{tool} profile --trace=cuda {sys.executable}"}, "metadata": {}}
    command = make_command(RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps(config))
    with given("node-0", address=address, ray_up_s=120).serve("00-p1-baseline", command) as service:
        assert run_driver({**resolve_env(command, os.environ), **service.env}) == {"VIME_RL_KERNEL": "traced"}


def run_driver(env: dict[str, str]) -> object:
    """The head may not be up yet."""
    argv = [sys.executable, "-c", DRIVER, "VIME_RL_KERNEL"]
    done = proc.run(argv, env=env, timeout_s=90)
    for _ in range(5):
        if done.is_ok:
            break
        done = proc.run(argv, env=env, timeout_s=90)
    assert done.is_ok, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
