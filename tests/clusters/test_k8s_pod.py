"""Pods of one job find each other, whatever earlier ones left; the staged files come in."""

from __future__ import annotations

import dataclasses
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import pytest

from rlk_repro.agent.stop import Stop
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.files import dump_json_line, write_json, write_text
from rlk_repro.base.guarded import Guarded
from rlk_repro.clusters.k8s.pod import roster, supervise
from rlk_repro.clusters.k8s.pod.notes import Notes
from rlk_repro.clusters.k8s.pod.roster import Gathering, PodSeat, Roster, join, read_roster
from rlk_repro.clusters.k8s.pod.supervise import bring_in, find_seat, start_ray, wait_for_end
from rlk_repro.pod.__main__ import main
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import Phase, Progress, read_last_word
from tests.support.waiting import wait_until

LEADER = PodSeat(pod="head", uid="u0", node="n0", group="g")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(roster, "BEAT_S", 0.02)
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def seat(number: int, group: str = "g") -> PodSeat:
    return PodSeat(pod=f"w{number}", uid=f"u{number}", node=f"n{number}", group=group)


def gather(run_dir: RunDir, num_nodes: int, timeout_s: float = 20.0) -> Roster | None:
    gathering = Gathering(run_dir, LEADER, num_nodes)
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        found = gathering.look()
        if found is not None:
            return found
        time.sleep(0.02)
    return None


def join_all(run_dir: RunDir, seats: list[PodSeat]) -> tuple[list[threading.Thread], dict[str, Roster | None]]:
    found: dict[str, Roster | None] = {}
    over = threading.Event()

    def run(one: PodSeat) -> None:
        found[one.uid] = join(run_dir, one, over.wait)

    threads = [threading.Thread(target=run, args=(one,)) for one in seats]
    for thread in threads:
        thread.start()
    threads.append(threading.Thread(target=over.set))
    return threads, found


def test_everybody_gets_the_same_roster_with_the_leader_first(run_dir: RunDir) -> None:
    threads, found = join_all(run_dir, [seat(10), seat(2), seat(1)])
    roster = gather(run_dir, 4)
    for thread in threads[:-1]:
        thread.join(20)
    assert roster is not None
    assert roster.nodes == ("n0", "n1", "n2", "n10")
    assert set(found.values()) == {roster}
    assert run_dir.pod_joins() == []


def test_files_of_an_earlier_attempt_do_not_count(run_dir: RunDir) -> None:
    old = {"schema": 1, "pod": "w9", "uid": "old", "node": "n9", "group": "g"}
    write_text(run_dir.pod_join("w9"), f"7\n{dump_json_line(old)}")
    write_json(run_dir.roster, {"schema": 1, "allocation": "old", "nodes": ["n0", "n1"], "uids": ["old", "older"]})
    threads, found = join_all(run_dir, [seat(1), seat(5, group="other")])
    roster = gather(run_dir, 2)
    assert roster is not None
    assert roster.uids == ("u0", "u1")
    threads[0].join(20)
    assert found["u1"] == roster
    threads[-1].start()  # the one of another cluster is never taken
    threads[1].join(20)
    assert found["u5"] is None


def test_a_pod_that_goes_away_while_others_are_awaited_does_not_count(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evicted pod removes its file; the file of a pod that was killed stays and no longer changes."""
    monkeypatch.setattr(roster, "SILENT_S", 0.5)
    gathering = Gathering(run_dir, LEADER, 4)
    threads, _ = join_all(run_dir, [seat(1), seat(2)])
    wait_until(lambda: gathering.look() is None and gathering.num_missing == 1)
    threads[-1].start()
    for thread in threads:
        thread.join(20)
    write_text(run_dir.pod_join("w1"), f"7\n{dump_json_line({'schema': 1, **asdict(seat(1))})}")
    gathering.look()
    assert gathering.num_missing == 2
    wait_until(lambda: gathering.look() is None and gathering.num_missing == 3)


def test_one_pod_waits_for_no_other(run_dir: RunDir) -> None:
    found = gather(run_dir, 1)
    assert found is not None
    assert (found.nodes, found.allocation) == (("n0",), "u0")
    assert read_roster(run_dir) == found


def test_a_pod_that_stays_away_is_waited_for(run_dir: RunDir) -> None:
    assert gather(run_dir, 2, timeout_s=0.3) is None


@dataclass(frozen=True)
class EndedAgent:
    code: int

    def release(self) -> None:
        pass


def test_after_lost_nodes_the_agents_begin_again_with_the_pods_that_replace_theirs(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, list[str]] = {}

    def start_agent(_: RunDir, node: str, roster: Roster, env: dict[str, str]) -> EndedAgent:
        begun.setdefault(roster.allocation, []).append(node)
        if node != LEADER.node:
            return EndedAgent(0)
        wait_until(lambda: len(begun[roster.allocation]) == 3)  # a follower that finds a complete run does not begin
        if roster.allocation == LEADER.uid:
            write_text(run_dir.lost, roster.allocation)
            return EndedAgent(3)
        write_text(run_dir.checksums, "")
        return EndedAgent(0)

    def run(worker: PodSeat, num_restarts: int) -> threading.Thread:
        duty = dataclasses.replace(lasting, num_restarts=num_restarts)
        thread = threading.Thread(target=supervise._take_part, args=(duty, worker, {}, Stop(), None))
        thread.start()
        return thread

    monkeypatch.setattr(supervise, "start_agent", start_agent)
    monkeypatch.setattr(supervise, "_pack", lambda _: "")
    lasting = supervise.Duty(run_dir=run_dir, inputs=run_dir.root, num_nodes=3, is_kuberay=False, num_restarts=2)
    names = {"RLK_REPRO_POD": LEADER.pod, "RLK_REPRO_POD_UID": LEADER.uid, "RLK_REPRO_NODE": LEADER.node}
    environ = {**names, "RLK_REPRO_GROUP": LEADER.group}
    stays, goes = run(seat(1), 2), run(seat(2), 0)
    codes: list[int] = []
    leader = threading.Thread(
        target=lambda: codes.append(supervise._run_agent(lasting, environ, Stop(), None, Notes(run_dir, environ)))
    )
    leader.start()
    goes.join(20)
    replaces = run(seat(3), 2)
    for thread in (leader, stays, replaces):
        thread.join(20)
    assert codes == [0]
    assert {allocation: sorted(nodes) for allocation, nodes in begun.items()} == {
        "u0": ["n0", "n1", "n2"],
        "u0.1": ["n0", "n1", "n3"],
    }


@dataclass(frozen=True)
class EndedRay:
    code: int | None


@pytest.mark.parametrize(
    ("ray_code", "exit_code", "message"),
    [(1, 143, "Ray ended with 1; stopped by SIGTERM"), (1, 1, "refused"), (None, 143, "stopped by SIGTERM")],
)
def test_a_run_that_ends_because_ray_ended_says_so(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, ray_code: int | None, exit_code: int, message: str
) -> None:
    words = message.rpartition("; ")[2]
    last = Progress(phase=Phase.ENDED, num_trials=2, num_steps=4, message=words, exit_code=exit_code)
    write_json(run_dir.state, last.to_json())
    monkeypatch.setattr(supervise, "start_agent", lambda *_: EndedAgent(exit_code))
    monkeypatch.setattr(supervise, "_pack", lambda _: "")
    environ = {"RLK_REPRO_POD": LEADER.pod, "RLK_REPRO_POD_UID": LEADER.uid, "RLK_REPRO_NODE": LEADER.node}
    duty = supervise.Duty(run_dir=run_dir, inputs=run_dir.root, num_nodes=1, is_kuberay=True)
    code = supervise._run_agent(duty, environ, Stop(), cast("Guarded", EndedRay(ray_code)), Notes(run_dir, environ))
    assert code == exit_code
    assert read_last_word(run_dir) == dataclasses.replace(last, message=message)


def test_a_run_is_packed_where_the_disk_has_no_room_for_the_end_of_ray(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise EnvironmentMissing(Problem("state.json", "cannot be written"))

    packed: list[RunDir] = []
    last = Progress(phase=Phase.ENDED, num_trials=2, num_steps=4, message="stopped by SIGTERM", exit_code=143)
    write_json(run_dir.state, last.to_json())
    monkeypatch.setattr(supervise, "start_agent", lambda *_: EndedAgent(143))
    monkeypatch.setattr(supervise, "_pack", packed.append)
    monkeypatch.setattr(supervise, "write_json", refuse)
    environ = {"RLK_REPRO_POD": LEADER.pod, "RLK_REPRO_POD_UID": LEADER.uid, "RLK_REPRO_NODE": LEADER.node}
    duty = supervise.Duty(run_dir=run_dir, inputs=run_dir.root, num_nodes=1, is_kuberay=True)
    code = supervise._run_agent(duty, environ, Stop(), cast("Guarded", EndedRay(1)), Notes(run_dir, environ))
    assert (code, packed) == (143, [run_dir])


def test_an_earlier_bundle_stays_until_all_pods_are_there(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"RLK_REPRO_POD": LEADER.pod, "RLK_REPRO_POD_UID": LEADER.uid, "RLK_REPRO_NODE": LEADER.node}
    duty = supervise.Duty(run_dir=run_dir, inputs=run_dir.root, num_nodes=2, is_kuberay=False, num_restarts=1)
    notes = Notes(run_dir, environ)
    write_text(run_dir.bundle, "earlier")
    monkeypatch.setattr(supervise, "GATHER_S", 0.0)
    with pytest.raises(EnvironmentMissing):
        supervise._gather(duty, LEADER, Stop(), notes, 1)
    assert run_dir.bundle.read_text() == "earlier"
    alone = dataclasses.replace(duty, num_nodes=1)
    assert supervise._gather(alone, LEADER, Stop(), notes, 1) is not None
    assert not run_dir.bundle.exists()


def test_staged_files_are_copied_in_and_an_earlier_end_marker_is_removed(run_dir: RunDir, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    (inputs / "..2026").mkdir(parents=True)
    (inputs / "job").mkdir()
    (inputs / "..2026" / "plan.json").write_text("old")
    (inputs / "plan.json").write_text("{}")
    (inputs / "job" / "objects.yaml").write_text("a: 1\n")
    run_dir.bundle.write_text("earlier")
    bring_in(run_dir, inputs)
    assert sorted(path.relative_to(run_dir.root).as_posix() for path in run_dir.root.rglob("*") if path.is_file()) == [
        "job/objects.yaml", "plan.json",
    ]  # fmt: skip


def test_a_config_map_without_a_plan_is_refused(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="holds no plan"):
        bring_in(run_dir, tmp_path / "nothing")


def test_an_entrypoint_ends_as_the_agent_did(run_dir: RunDir) -> None:
    write_json(run_dir.pod_end, {"schema": 1, "exit_code": 3})
    assert wait_for_end(run_dir, {}) == 3
    assert main(["wait", str(run_dir.root)]) == 3


def test_an_entrypoint_does_not_take_the_end_of_an_earlier_pod(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended job leaves its end on the claim; the pods that come later begin beside it."""
    write_json(run_dir.pod_end, {"schema": 1, "exit_code": 143, "pod": "earlier"})
    later = {"schema": 1, "exit_code": 0, "pod": "u0"}
    monkeypatch.setattr("time.sleep", lambda _: write_json(run_dir.pod_end, later))
    assert wait_for_end(run_dir, {"RLK_REPRO_POD_UID": "u0"}) == 0


@pytest.mark.parametrize(("group", "code"), [("cluster-1", 143), ("cluster-2", None)])
def test_a_head_of_the_same_cluster_repeats_the_end_that_an_earlier_head_reported(
    run_dir: RunDir, group: str, code: int | None
) -> None:
    write_json(run_dir.pod_end, {"schema": 1, "exit_code": 143, "pod": "earlier", "group": "cluster-1"})
    duty = supervise.Duty(run_dir=run_dir, inputs=run_dir.root, num_nodes=1, is_kuberay=True)
    assert supervise._find_earlier_end(duty, {"RLK_REPRO_GROUP": group}) == code


def test_a_foreign_pod_is_reported(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EnvironmentMissing, match="RLK_REPRO_NODE: not set"):
        find_seat({"RLK_REPRO_POD": "a", "RLK_REPRO_POD_UID": "b"})
    with pytest.raises(EnvironmentMissing, match=r"a pod that KubeRay 1\.5\.1 or later made"):
        start_ray({})
    assert main(["serve", str(run_dir.root)]) == 3
    assert "because no agent started" in capsys.readouterr().err


def test_kuberays_ray_command_is_run_word_by_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", str(tmp_path))
    out = tmp_path / "a b; touch pwned"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 32}
    command = {"KUBERAY_GEN_RAY_START_CMD": "touch '$WHERE/a b; touch pwned'", "PATH": "/usr/bin:/bin"}
    child = start_ray(command | token)
    wait_until(lambda: child.code is not None)
    assert child.code == 0
    child.release()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
