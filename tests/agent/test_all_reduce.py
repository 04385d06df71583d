"""The all-reduce before the trials: two real processes over gloo, what the manifests say, and the hardware's floor."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.agent import all_reduce
from rlk_repro.agent.all_reduce import find_floor, follow_all_reduce, measure_all_reduce
from rlk_repro.agent.node import mark_ended
from rlk_repro.agent.parts import Deadlines, make_place
from rlk_repro.agent.ray.member import RayMember
from rlk_repro.agent.stop import Stop
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Plan
from rlk_repro.rundir.manifest import Manifest, Unknown, severity
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Hardware, Layout
from rlk_repro.spec.load import load_hardware
from tests.support.job_examples import PROFILE, make_parts, make_staged
from tests.support.waiting import wait_until

NODES = ("a", "b")
TWO_NODES = ["measure.pairs=1", "layouts.cpu.num_nodes=2"]
ASKED = PROFILE.replace(b"preflight: {", b"preflight: {policy: {all_reduce: warn}, ")
LOOPBACK = "127.0.0.1"


def make_member(plan: Plan, run_dir: RunDir, node: str, nodes: tuple[str, ...] = NODES, **limits: Any) -> RayMember:
    deadlines = Deadlines(**{"grace_s": 5, "all_reduce_s": 120, **limits})
    parts = make_parts(deadlines=deadlines, find_address=lambda *_: LOOPBACK)
    write_json(run_dir.node(node).manifest, Manifest(node=node).to_json())
    return RayMember(plan=plan, run_dir=run_dir, place=make_place(node, nodes, "job-7"), parts=parts, stop=Stop())


def read_fact(run_dir: RunDir, node: str) -> Any:
    path = run_dir.node(node).manifest
    return Manifest.from_json(load_json(path), str(path)).sections["network"]["all_reduce"]


def test_two_nodes_measure_their_bus_bandwidth_and_every_manifest_holds_it(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run", TWO_NODES, profile=ASKED)
    leader, other = (make_member(plan, run_dir, node) for node in NODES)
    orders: list[str] = []

    def follow() -> None:
        wait_until(run_dir.all_reduce_order.is_file)
        orders.append(follow_all_reduce(other))

    follower = threading.Thread(target=follow)
    follower.start()
    assert measure_all_reduce(leader) == []
    follower.join()
    first, second = (read_fact(run_dir, node) for node in NODES)
    assert first == second
    assert (first["backend"], first["num_ranks"], first["largest_bytes"]) == ("gloo", 2, 1 << 20)
    assert first["bus_gb_s_by_bytes"].keys() == {"1024", "32768", "1048576"}
    assert first["bus_gb_s"] == first["bus_gb_s_by_bytes"]["1048576"] > 0
    assert follow_all_reduce(other, orders[0]) == orders[0], "it takes part once"
    assert all(run_dir.node(node).all_reduce_log.is_file() for node in NODES)


def test_ranks_that_fail_are_a_finding_with_their_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, run_dir = make_staged(tmp_path / "run", TWO_NODES, profile=ASKED)
    words = (sys.executable, "-c", "raise SystemExit('NCCL error: unhandled system error')")
    monkeypatch.setattr(all_reduce, "_render", lambda *_: words)
    found = measure_all_reduce(make_member(plan, run_dir, "a"))
    reason = "failed: exit code 1; its log ends: NCCL error: unhandled system error"
    expected = [Finding(Level.WARNING, "network.all_reduce", "an all-reduce over 2 nodes", f"unknown ({reason})")]
    assert found == expected
    assert read_fact(run_dir, "a") == Unknown(reason)


def test_a_follower_s_part_ends_with_the_leader_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, run_dir = make_staged(tmp_path / "run", TWO_NODES, profile=ASKED)
    leader, other = (make_member(plan, run_dir, node) for node in NODES)
    waits, fails = (sys.executable, "-c", "import time; time.sleep(100)"), (sys.executable, "-c", "raise SystemExit(1)")
    is_following = run_dir.node("b").all_reduce_log.is_file

    def render(member: RayMember, _: str) -> tuple[str, ...]:
        if member is other:
            return waits
        wait_until(is_following)
        return fails

    monkeypatch.setattr(all_reduce, "_render", render)
    begun = time.monotonic()

    def follow() -> None:
        wait_until(run_dir.all_reduce_order.is_file)
        follow_all_reduce(other)

    follower = threading.Thread(target=follow)
    follower.start()
    assert len(measure_all_reduce(leader)) == 1
    follower.join(60)
    assert not follower.is_alive()
    assert time.monotonic() - begun < 60
    assert not run_dir.all_reduce_order.exists()


def test_a_follower_ends_its_part_when_the_leader_has_ended(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run", TWO_NODES, profile=ASKED)
    leader, other = (make_member(plan, run_dir, node) for node in NODES)
    write_json(run_dir.all_reduce_order, {})
    assert all_reduce._find_end(other) == ""
    mark_ended(run_dir, leader.place)
    assert all_reduce._find_end(other) == "the leader has ended the all-reduce"


@pytest.mark.parametrize(("num_nodes", "level"), [(1, Level.WARNING), (2, Level.BLOCKING)])
def test_what_could_not_be_measured_blocks_several_nodes_alone(tmp_path: Path, num_nodes: int, level: Level) -> None:
    plan, _ = make_staged(tmp_path / "run")
    plan = fit_gpus(plan, load_hardware("h200").model, num_nodes, 8)
    assert [item.level for item in all_reduce._judge(plan, Unknown("failed: no result"))] == [level]


def test_an_address_that_cannot_be_used_is_recorded(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run", TWO_NODES, profile=ASKED)
    member = make_member(plan, run_dir, "a")
    parts = dataclasses.replace(member.parts, find_address=lambda *_: "203.0.113.1")
    (found,) = measure_all_reduce(dataclasses.replace(member, parts=parts))
    assert found.level is Level.WARNING
    assert str(read_fact(run_dir, "a")).startswith("unknown (failed: no free port at 203.0.113.1: ")


def test_one_rank_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "run_command", None)
    plan, run_dir = make_staged(tmp_path / "run", ["measure.pairs=1"])
    assert measure_all_reduce(make_member(plan, run_dir, "a", ("a",))) == []
    assert read_fact(run_dir, "a") == Unknown("skipped: there is only one rank")


def test_a_run_without_gpus_measures_where_the_profile_asks_for_it(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run", TWO_NODES)
    assert measure_all_reduce(make_member(plan, run_dir, "a")) == []
    assert "preflight.policy of the profile does not name all_reduce" in str(read_fact(run_dir, "a"))


def test_without_torch_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "find_spec", lambda _: None)
    plan, run_dir = make_staged(tmp_path / "run", TWO_NODES, profile=ASKED)
    assert measure_all_reduce(make_member(plan, run_dir, "a")) == []
    assert read_fact(run_dir, "a") == Unknown("skipped: torch is not installed")


def fit_gpus(plan: Plan, hardware: Hardware, num_nodes: int, gpus_per_node: int, policy: str | None = None) -> Plan:
    layout = Layout(num_nodes=num_nodes, gpus_per_node=gpus_per_node)
    run = plan.run.model_copy(update={"layouts": {hardware.hardware: layout}})
    preflight = plan.profile.preflight.model_copy(update={"policy": {"all_reduce": policy} if policy else {}})
    profile = plan.profile.model_copy(update={"preflight": preflight})
    return dataclasses.replace(plan, run=run, hardware=hardware, profile=profile)


@pytest.mark.parametrize(
    ("measured", "num_nodes", "num_gpus", "policy", "level"),
    [
        (290.0, 1, 8, None, Level.BLOCKING),
        (290.0, 1, 8, "warn", Level.WARNING),
        (310.0, 1, 8, None, None),
        (290.0, 1, 4, None, None),
        (5.0, 2, 8, None, None),
    ],
)
def test_less_than_the_floor_blocks_where_whole_nodes_have_one(
    tmp_path: Path, measured: float, num_nodes: int, num_gpus: int, policy: str | None, level: Level | None
) -> None:
    plan, _ = make_staged(tmp_path / "run")
    plan = fit_gpus(plan, load_hardware("h200").model, num_nodes, num_gpus, policy)
    fact = {"bus_gb_s": measured, "largest_bytes": 1 << 30}
    found = list(all_reduce._judge(plan, fact))
    assert [item.level for item in found] == ([] if level is None else [level])
    if found:
        assert found[0] == Finding(found[0].level, "network.all_reduce.bus_gb_s", "at least 300 GB/s",
                                   "290 GB/s at 1024 MiB")  # fmt: skip


def test_a_floor_of_several_nodes_is_used_where_a_site_knows_one(tmp_path: Path) -> None:
    plan, _ = make_staged(tmp_path / "run")
    hardware = load_hardware("h200").model
    assert hardware.all_reduce is not None
    floors = hardware.all_reduce.model_copy(update={"nodes_gb_s": 150.0})
    hardware = hardware.model_copy(update={"all_reduce": floors})
    assert find_floor(fit_gpus(plan, hardware, 2, 8)) == 150.0
    assert find_floor(fit_gpus(plan, hardware, 1, 8)) == 300.0


@pytest.mark.parametrize("name", ["a100", "h200", "gb200", "mi300x"])
def test_every_floor_names_its_source(name: str) -> None:
    floors = load_hardware(name).model.all_reduce
    assert floors is not None
    assert floors.one_node_gb_s
    assert "Azure's node health checks" in floors.source


def test_another_floor_is_no_other_experiment(tmp_path: Path) -> None:
    plan, _ = make_staged(tmp_path / "run")
    hardware = load_hardware("h200").model
    plain = dataclasses.replace(plan, hardware=hardware.model_copy(update={"all_reduce": None}), run=plan.run)
    floored = dataclasses.replace(plan, hardware=hardware)
    assert floored.experiment_hash == plain.experiment_hash
    assert floored.plan_hash != plain.plan_hash
    assert "all_reduce" in floored.experiment["hardware"]


def test_two_runs_never_measure_the_same_bandwidth() -> None:
    assert severity("network.all_reduce.bus_gb_s") is Level.INFO
