"""The node agent from start to exit code, with a trainer that is a small script and everything else real."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.agent import budget, process
from rlk_repro.agent.agent import run_agent
from rlk_repro.agent.node import read_preflight
from rlk_repro.agent.parts import Deadlines, make_place
from rlk_repro.agent.step import Report, Stage, Step, read_report, write_report, write_step
from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.base.findings import Level
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.bundle.verify import open_verified
from rlk_repro.job.__main__ import main
from rlk_repro.probes.environment import select
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.rundir.manifest import Manifest
from rlk_repro.rundir.paths import FIND_BUNDLE, RunDir
from rlk_repro.rundir.state import read_state
from tests.support.job_examples import (
    PROFILE,
    QUICK,
    FakeWorkload,
    find_alive,
    make_parts,
    make_staged,
    run_example,
    statuses,
)
from tests.support.make_run import verify_bundle
from tests.support.waiting import is_written, let_time_pass, signal_when, wait_until

ONE_PAIR = ["measure.pairs=1"]
OK_ONE_PAIR = {"00-p1-baseline": "ok", "01-p1-enabled": "ok"}
OK_TWO_PAIRS = OK_ONE_PAIR | {"02-p2-enabled": "ok", "03-p2-baseline": "ok"}
TOKEN = "hf_" + "Zz9" * 9
STRICT = PROFILE.replace(b"min_free_disk_gib: 0.01", b"min_free_disk_gib: 1000000000")


def events(run_dir: RunDir, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run_dir.agent_log.read_text().splitlines()]
    return [event for event in found if event["event"] == name]


def exit_of(run_dir: RunDir, name: str) -> dict[str, Any]:
    value: dict[str, Any] = load_json(run_dir.trial(name).exit)
    return value


def message(run_dir: RunDir) -> str:
    state = read_state(run_dir)
    assert state is not None
    return state.message


def test_a_run_is_executed_in_plan_order_sealed_and_packed(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run")
    assert run_example(run_dir) == 0
    assert statuses(run_dir) == OK_TWO_PAIRS
    assert [event["trial"] for event in events(run_dir, "trial")] == [trial.name for trial in plan.trials]
    assert verify_bundle(run_dir.bundle) == []
    assert load_json(run_dir.analysis) == {"num_trials": 4, "schema": 1}
    state = read_state(run_dir)
    assert state is not None
    assert (state.phase, state.exit_code, state.message) == ("ended", 0, "sealed, 4 of 4 trials ok")
    assert run_example(run_dir) == 0
    assert message(run_dir) == "sealed by an earlier agent"


def test_a_trial_leaves_its_command_environment_log_and_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in select(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("VIME_RL_KERNEL", "1")
    monkeypatch.setenv("NCCL_DEBUG", "VERSION")
    _, run_dir = make_staged(tmp_path / "run", ONE_PAIR)
    assert run_example(run_dir, FakeWorkload(actions=["env:VIME_RL_KERNEL", "env:NCCL_DEBUG"])) == 0
    baseline, enabled = run_dir.trial("00-p1-baseline"), run_dir.trial("01-p1-enabled")
    assert load_json(baseline.command)["argv"][-1] == "env:NCCL_DEBUG"
    assert load_json(baseline.env)["env"] == {
        "NCCL_DEBUG": "VERSION",
        "RLK_REPRO_OPS_DIR": "{run_dir}/trials/00-p1-baseline/ops",
    }
    lines = [line.split(" ", 1) for line in baseline.stdout.read_text().splitlines()]
    assert [text for _, text in lines] == ["VIME_RL_KERNEL=None", "NCCL_DEBUG=VERSION"]
    assert all(stamp.endswith("Z") and len(stamp) == 24 for stamp, _ in lines)
    assert "VIME_RL_KERNEL=1" in enabled.stdout.read_text()
    record = exit_of(run_dir, baseline.name)
    assert set(record) == {
        "schema", "status", "code", "signal", "reason", "allocation", "started_at", "ended_at", "duration_s",
    }  # fmt: skip
    assert record["started_at"] < record["ended_at"]
    assert record["allocation"] == exit_of(run_dir, enabled.name)["allocation"]


def test_failed_trials_are_results_and_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run_dir = make_staged(tmp_path / "run", ["measure.pairs=2", "time_limit_min=10"])
    slow = tmp_path / "slow"
    let_time_pass(monkeypatch, 600, once=slow)
    by_trial = {
        "00-p1-baseline": ["exit:3"],
        "01-p1-enabled": ["print:torch.OutOfMemoryError: CUDA out of memory.", "exit:1"],
        "02-p2-enabled": [f"child:{slow}", "print:too slow", "sleep:60"],
    }
    assert run_example(run_dir, FakeWorkload(by_trial=by_trial)) == 1
    assert list(statuses(run_dir).values()) == ["failed", "out of memory", "timeout", "ok"]
    assert exit_of(run_dir, "00-p1-baseline")["code"] == 3
    assert exit_of(run_dir, "02-p2-enabled")["signal"] == "SIGTERM"
    assert run_dir.is_sealed
    assert message(run_dir) == "sealed, 1 of 4 trials ok"


def test_a_run_in_which_nothing_ends_well_is_given_up(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run", ["measure.pairs=3"])
    assert run_example(run_dir, FakeWorkload(actions=["exit:3"])) == 1
    assert list(statuses(run_dir).values()) == ["failed"] * 4
    assert not run_dir.is_sealed
    assert not inspect_bundle(run_dir.bundle).is_sealed
    assert message(run_dir).startswith("trials: 03-p2-baseline: failed, like all of the first 4 trials")


def test_a_stop_packs_without_sealing_and_resuming_redoes_the_pair(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    pids = tmp_path / "pids"
    signal_when(lambda: is_written(pids), signal.SIGINT)
    slow = FakeWorkload(by_trial={"03-p2-baseline": [f"child:{pids}", "sleep:60"]})
    assert run_example(run_dir, slow) == 130
    assert statuses(run_dir) == OK_TWO_PAIRS | {"03-p2-baseline": "interrupted"}
    assert not run_dir.is_sealed
    assert not inspect_bundle(run_dir.bundle).is_sealed
    assert find_alive([int(pid) for pid in pids.read_text().split()]) == []
    assert message(run_dir) == "stopped by SIGINT"

    first = exit_of(run_dir, "00-p1-baseline")
    assert run_example(run_dir) == 0
    assert statuses(run_dir) == OK_TWO_PAIRS
    assert exit_of(run_dir, "00-p1-baseline") == first
    allocations = [exit_of(run_dir, name)["allocation"] for name in OK_TWO_PAIRS]
    assert allocations[0] == allocations[1] != allocations[2] == allocations[3]
    moved = [path.name for path in run_dir.interrupted.glob("1/*")]
    assert sorted(moved) == ["02-p2-enabled", "03-p2-baseline"]
    assert verify_bundle(run_dir.bundle) == []


def test_a_pair_that_cannot_end_in_time_does_not_begin_and_a_requeue_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run_dir = make_staged(tmp_path / "run", ["measure.pairs=3"])
    monkeypatch.setattr(budget, "SAFETY", 1e6)
    assert run_example(run_dir, until=time.time() + 3600) == 75
    assert statuses(run_dir) == OK_ONE_PAIR
    assert re.fullmatch(r"trials: p2: not begun, because too little time is left, got .* at least .*", message(run_dir))
    assert not inspect_bundle(run_dir.bundle).is_sealed
    assert run_dir.again.read_text() == exit_of(run_dir, "00-p1-baseline")["allocation"]
    run_dir.again.unlink()
    # the first pair of an allocation begins in any case, or none ever would
    assert run_example(run_dir, until=time.time() + 0.1) == 75
    assert list(statuses(run_dir))[2:] == ["02-p2-enabled", "03-p2-baseline"]
    assert run_dir.again.exists()
    assert run_example(run_dir) == 0
    assert verify_bundle(run_dir.bundle) == []


@pytest.mark.parametrize(
    ("until_s", "trial", "goes_on"),
    [
        (60.0, "03-p2-baseline", True),
        (60.0, "01-p1-enabled", False),  # no pair came in: another allocation would bring none in either
        (3600.0, "03-p2-baseline", False),  # stopped, and not by the end of its time
    ],
)
def test_only_a_run_out_of_time_with_new_pairs_requests_a_requeue(
    tmp_path: Path, until_s: float, trial: str, goes_on: bool
) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    pids = tmp_path / "pids"
    signal_when(lambda: is_written(pids), signal.SIGTERM)
    slow = FakeWorkload(by_trial={trial: [f"child:{pids}", "sleep:60"]})
    assert run_example(run_dir, slow, until=time.time() + until_s) == 143
    assert run_dir.again.exists() is goes_on


def test_blocking_findings_stop_before_the_first_trial_unless_the_profile_continues(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run", profile=STRICT)
    assert run_example(run_dir) == 3
    assert statuses(run_dir) == {}
    findings = load_json(run_dir.node("node-0").preflight)["findings"]
    assert [item["where"] for item in findings if item["level"] == "blocking"] == ["disk"]
    assert not inspect_bundle(run_dir.bundle).is_sealed
    assert message(run_dir).startswith("preflight: disk: preflight check failed, got ")
    lenient = STRICT.replace(b"preflight: {", b"preflight: {on_blocking: continue, ")
    assert run_example(make_staged(tmp_path / "lenient", ONE_PAIR, profile=lenient)[1]) == 0


@pytest.mark.parametrize(
    ("profile", "problems", "text"),
    [
        (
            PROFILE + b"env: {HF_TOKEN: {from_env: NO_SUCH_VARIABLE}}\n", (),
            "environment variable NO_SUCH_VARIABLE: is not set, expected a value\n  hint: export NO_SUCH_VARIABLE=…",
        ),
        (PROFILE, (Problem("layout", "two nodes"),), "layout: two nodes"),
    ],
)  # fmt: skip
def test_what_no_trial_could_run_with_is_an_error_before_any_trial(
    tmp_path: Path, profile: bytes, problems: tuple[Problem, ...], text: str
) -> None:
    _, run_dir = make_staged(tmp_path / "run", profile=profile)
    assert run_example(run_dir, FakeWorkload(problems=problems)) == 2
    assert run_dir.trial_dirs() == []
    assert message(run_dir) == f"preflight: {text}"


def test_planted_secrets_are_nowhere_in_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_OWN", "correct-horse-battery")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-wandb-value")
    profile = PROFILE + b"env: {HUB_AUTH: {from_env: MY_OWN}, HF_HOME: /data/hf}\n"
    _, run_dir = make_staged(tmp_path / "run", ONE_PAIR, profile=profile)
    actions = ["env:HUB_AUTH", "env:HF_TOKEN", "env:WANDB_API_KEY", f"print:--token={TOKEN}", "exit:1"]
    assert run_example(run_dir, FakeWorkload(actions=actions)) == 1
    with open_verified(run_dir.bundle) as (opened, _):
        everything = b"".join(path.read_bytes() for path in opened.root.rglob("*") if path.is_file())
    for secret in ("correct-horse-battery", TOKEN, "s3cr3t-wandb-value"):
        assert secret.encode() not in everything
    assert load_json(run_dir.trial("00-p1-baseline").env)["env"]["HUB_AUTH"] == "<from MY_OWN>"
    assert b"HUB_AUTH=<redacted:known-value>" in everything


def break_analysis(_: RunDir) -> dict[str, Any]:
    raise ZeroDivisionError("a bug in the analysis")


def test_a_bug_in_the_analysis_does_not_lose_the_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run_dir = make_staged(tmp_path / "run", ONE_PAIR)
    assert run_example(run_dir, analyse=break_analysis) == 70
    info = inspect_bundle(run_dir.bundle)
    assert (info.is_sealed, list(info.trials.values())) == (False, ["ok"] * 2)
    (error,) = events(run_dir, "error")
    assert (error["phase"], error["kind"]) == ("analyse", "ZeroDivisionError")
    assert "a bug in the analysis" in error["error"]
    assert 'File "{packages}/tests/agent/test_agent.py", line ' in error["error"]
    assert "Traceback" in capsys.readouterr().err
    assert run_example(run_dir) == 0
    assert verify_bundle(run_dir.bundle) == []


def test_a_failed_pack_is_reported(tmp_path: Path) -> None:
    def refuse(_: RunDir) -> Path:
        raise CheckFailed(Problem("trials/x", "a symbolic link"))

    _, run_dir = make_staged(tmp_path / "run", ONE_PAIR)
    assert run_example(run_dir, pack=refuse) == 1
    assert message(run_dir) == "not packed: trials/x: a symbolic link"


GOOD_GPUS: dict[str, dict[str, Any]] = {
    "gpu": {"vendor": "nvidia", "count": 2, "driver": "580.1",
            "devices": [{"index": index, "name": "NVIDIA H200", "memory_total_mib": 143771} for index in range(2)]},
    "host": {"machine": "x86_64"},
}  # fmt: skip
TWO_GPUS = [*ONE_PAIR, "layouts.h200={num_nodes: 1, gpus_per_node: 2, tensor_parallel: 2}"]


@pytest.mark.parametrize(
    ("preflight", "idle_s"),
    [
        (b"policy: {gpu_idle: warn, other_runs: warn}", 3600),
        (b"policy: {gpu_idle: warn}", 0),
        (b"on_blocking: continue", 0),
    ],
)
def test_gpus_that_stay_busy_are_a_finding_of_each_trial_and_no_run_waits_for_gpus_that_it_shares(
    tmp_path: Path, preflight: bytes, idle_s: float
) -> None:
    profile = PROFILE.replace(b"preflight: {", b"preflight: {" + preflight + b", ")
    deadlines = Deadlines(idle_s=idle_s, shared_s=3600 - idle_s)
    _, run_dir = make_staged(tmp_path / "run", TWO_GPUS, profile=profile, hardware="h200")
    busy = [[GpuUse(index=0, memory_used_mib=40_000)] for _ in range(1 + len(OK_ONE_PAIR))]
    own = Manifest(node="node-0", sections=GOOD_GPUS)
    assert run_example(run_dir, busy_gpus=busy.pop, probe_node=lambda _: own, deadlines=deadlines) == 0
    findings = load_json(run_dir.node("node-0").preflight)["findings"]
    late = [item["where"] for item in findings if item["where"].endswith(": gpu")]
    assert (late, busy) == ([f"{name}: gpu" for name in OK_ONE_PAIR], [])


@pytest.mark.parametrize(("path", "policy", "code"), [("P2P/IPC", "fail", 0), ("SHM", "fail", 3), ("SHM", "warn", 0)])
def test_a_fall_back_of_nccl_ends_trial_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, policy: str, code: int
) -> None:
    monkeypatch.setattr(process, "_TROUBLE_S", 0.05)
    profile = PROFILE.replace(b"preflight: {", f"preflight: {{policy: {{nccl_transport: {policy}}}, ".encode())
    _, run_dir = make_staged(tmp_path / "run", TWO_GPUS, profile=profile, hardware="h200")
    first = next(iter(OK_ONE_PAIR))
    told = f"record:{run_dir.trial(first).libraries_file(1)}:" + json.dumps({"transport": {"paths": [path]}})
    workload = FakeWorkload(by_trial={first: [told, "sleep:20" if code else "sleep:0.5"]})
    assert run_example(run_dir, workload, probe_node=lambda node: Manifest(node=node, sections=GOOD_GPUS)) == code
    found = load_json(run_dir.node("node-0").preflight)["findings"]
    told_of = [item["found"] for item in found if item["where"] == "libraries.transport"]
    assert told_of == ([] if path == "P2P/IPC" else ["SHM, network None, on rank 1"])
    assert len(statuses(run_dir)) == (1 if code else 2)
    if code:
        assert message(run_dir).startswith("trials: libraries.transport: NCCL fell back to a slower path, got 'SHM")


@pytest.mark.parametrize(
    ("runs", "where", "level", "found"),
    [
        ((["theirs"], []), "host.other_runs", "warning", "other runs: theirs"),
        (([], ["theirs"]), "host.runs_beside", "info", "on other GPUs: theirs"),
    ],
)
def test_a_run_that_began_beside_this_one_is_a_finding_for_each_trial(
    tmp_path: Path, runs: tuple[list[str], list[str]], where: str, level: str, found: str
) -> None:
    _, run_dir = make_staged(tmp_path / "run", ONE_PAIR)
    assert run_example(run_dir, find_runs=lambda: runs) == 0
    findings = load_json(run_dir.node("node-0").preflight)["findings"]
    of_trials = [item for item in findings if item["where"].endswith(f": {where}")]
    assert [item["where"].partition(":")[0] for item in of_trials] == list(OK_ONE_PAIR)
    assert {(item["level"], item["found"]) for item in of_trials} == {(level, found)}


def test_a_node_that_changed_since_the_earlier_agent_is_a_finding(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run", ONE_PAIR)
    assert run_example(run_dir, analyse=break_analysis) == 70
    changed = {"gpu": {"driver": "580.1"}, "host": {"machine": os.uname().machine}}
    assert run_example(run_dir, probe_node=lambda node: Manifest(node=node, sections=changed)) == 0
    findings = load_json(run_dir.node("node-0").preflight)["findings"]
    assert ("warning", "gpu.driver", "580.1") in [(item["level"], item["where"], item["found"]) for item in findings]
    assert (run_dir.node("node-0").earlier / "1" / "manifest.json").is_file()


TRAIN_ONLY = ["measure.pairs=1", "measure.warmup_steps=1", "measure.scored_steps=2", "lane=train-only"]


def test_rollouts_are_stored_once_used_again_and_refused_if_they_changed(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run", TRAIN_ONLY)
    workload = FakeWorkload(rollouts={7: [f"save:{run_dir.rollouts_of(7).template}:3"]})
    assert run_example(run_dir, workload, analyse=break_analysis) == 70
    files = load_json(run_dir.prepared)["rollouts"]["7"]["files"]
    assert list(files) == ["0.pt", "1.pt", "2.pt"]
    moment = run_dir.rollouts_of(7).file(0).stat().st_mtime_ns
    assert run_example(run_dir, workload) == 0
    assert run_dir.rollouts_of(7).file(0).stat().st_mtime_ns == moment
    run_dir.checksums.unlink()
    write_text(run_dir.rollouts_of(7).file(1), "other")
    assert run_example(run_dir, workload) == 1
    assert "rollouts/7: stored rollouts changed since they were made" in message(run_dir)


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        (["exit:5"], "stdout.log: rollouts were not stored (exit code 5)"),
        (QUICK, "rollouts/7: 3 of 3 rollouts are missing, the first is 0.pt"),
    ],
)
def test_missing_stored_rollouts_are_an_error(tmp_path: Path, actions: list[str], expected: str) -> None:
    _, run_dir = make_staged(tmp_path / "run", TRAIN_ONLY)
    assert run_example(run_dir, FakeWorkload(rollouts={7: actions})) == 1
    assert message(run_dir).endswith(expected)
    assert statuses(run_dir) == {}
    (error,) = events(run_dir, "error")
    assert error["error"].startswith("{run_dir}/rollouts/7")


@pytest.mark.parametrize(
    ("has_left", "found"), [(True, "no record: the agent of this node has ended"), (False, "no record")]
)
def test_a_follower_without_a_record_blocks_and_one_that_ended_is_a_lost_node(
    tmp_path: Path, has_left: bool, found: str
) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    if has_left:
        write_report(run_dir, "b", Report(allocation="job-7", has_left=True))
    assert run_agent(run_dir, make_place("a", ("a", "b"), "job-7"), parts=make_parts()) == 3
    assert run_dir.lost.is_file() == has_left
    assert message(run_dir) == (
        f"preflight: nodes.b: preflight check failed, got '{found}', expected a preflight record within 0.1 s\n"
        "  hint: rlk-repro doctor repeats the checks; preflight.policy in the profile makes a check a warning"
    )


def test_a_follower_describes_its_node_and_ends_with_the_leader(tmp_path: Path) -> None:
    profile = STRICT + b"telemetry_interval_s: 0.05\n"
    plan, run_dir = make_staged(tmp_path / "run", ONE_PAIR, profile=profile)
    follower = make_place("b", ("a", "b"), "job-7")
    write_step(run_dir, Step(allocation="job-7"))
    telemetry = run_dir.node("b").telemetry

    def lead() -> None:
        wait_until(lambda: telemetry.exists() and telemetry.read_text().count("\n") > 2)
        write_step(run_dir, Step(allocation="job-7", stage=Stage.ENDED))

    threading.Thread(target=lead).start()
    assert run_agent(run_dir, follower, parts=make_parts()) == 0
    assert read_report(run_dir, "b", "job-7").has_left
    found = read_preflight(run_dir, "b", "job-7") or []
    assert [finding.where for finding in found if finding.level is Level.BLOCKING] == ["nodes.b.disk"]
    assert read_preflight(run_dir, "b", "job-8") is None
    assert telemetry.read_text().count("\n") > 2
    assert plan.cluster == "local"


def test_leader_and_follower_make_one_bundle(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run", ONE_PAIR)
    run_dir.node("b").path.mkdir(parents=True)
    write_json(run_dir.node("b").preflight, {"schema": 1, "allocation": "job-7", "findings": []})
    parts = make_parts(deadlines=Deadlines(grace_s=20, idle_s=0.05, followers_s=60, followers_end_s=0.1))
    assert run_agent(run_dir, make_place("a", ("a", "b"), "job-7"), parts=parts) == 0
    assert events(run_dir, "no end marker") != []


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--node", "x/y"], "input: --nodes: is not a node name, got 'x/y', expected a name without a slash\n"),
        (["--node", "c", "--nodes", "a,b", "--allocation", "1"],
         "input: --node: not among --nodes, got 'c', expected one of a, b\n"),
    ],
)  # fmt: skip
def test_wrong_places_are_usage_errors(
    tmp_path: Path, argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), *argv]) == 2
    assert capsys.readouterr().err == expected


def test_a_directory_without_a_plan_is_an_error_that_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent")]) == 5
    assert (
        capsys.readouterr().err
        == f"bundle: {tmp_path}/absent/plan.json: missing, expected a file\n  hint: {FIND_BUNDLE}\n"
    )
    assert list(tmp_path.iterdir()) == []
