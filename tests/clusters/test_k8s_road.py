"""From submit to the collected bundle: real agents in pods that are processes, and a small kubectl."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, SchedulerRefused
from rlk_repro.base.files import load_json, load_record, sha256_file
from rlk_repro.base.findings import has_blocking
from rlk_repro.bundle.seal import inspect_bundle
from rlk_repro.clusters.api import JobState
from rlk_repro.clusters.k8s import collect
from rlk_repro.clusters.k8s.collect import copy_bundle
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable
from rlk_repro.clusters.registry import get_backend
from rlk_repro.replay import steps as replay
from rlk_repro.rundir.paths import RunDir
from rlk_repro.submit import finishing, planning, sending
from rlk_repro.workloads import WORKLOADS
from tests.support.k8s.runs import LONG, SETTINGS, TWO_NODES, Site
from tests.support.make_run import verify_bundle
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(280)
BACKEND = get_backend("k8s")
TWO = ("-m", "tests.support.two_node_agent")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    here = Site(tmp_path / "site")
    for name, value in here.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(WORKLOADS["reference"], "find_problems", lambda _: [])
    yield here
    here.close()


def on_claim(site: Site, launched: sending.Launched) -> RunDir:
    return RunDir(site.claim / "smoke" / launched.run_dir.run_id)


def test_a_run_is_submitted_watched_collected_verified_and_replayed(site: Site) -> None:
    launched = site.submit()
    (job,) = site.objects("Job")
    owners = [
        item["metadata"]["ownerReferences"] for kind in ("NetworkPolicy", "ConfigMap") for item in site.objects(kind)
    ]
    assert owners == [[{"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"],
                        "uid": job["metadata"]["uid"]}]] * 2  # fmt: skip
    assert sending.poll(launched).state is JobState.PENDING
    pod = site.start_pod()
    wait_until(lambda: sending.poll(launched).state is JobState.RUNNING and launched.run_dir.state.is_file())
    with pytest.raises(CheckFailed, match="has not ended: running"):
        BACKEND.collect(launched.submission, launched.run_dir)
    assert site.wait_for_pod(pod) == 0
    site.end_job("Complete")
    lines = list(BACKEND.logs(launched.submission, launched.run_dir, is_following=True))
    assert {line.trial for line in lines} == {"00-p1-baseline", "01-p1-enabled"}
    assert sum("perf/step_time" in line.text for line in lines) == 2 * 4
    assert sending.poll(launched).state is JobState.DONE
    assert load_json(launched.run_dir.state)["exit_code"] == 0
    result = finishing.finish(launched)
    assert result.is_ok
    assert not has_blocking(verify_bundle(result.bundle))
    assert inspect_bundle(result.bundle).nodes == ("node-0",)
    assert [site.objects(kind) for kind in ("Job", "Pod", "ConfigMap", "NetworkPolicy")] == [[]] * 4
    assert sending.poll(launched).state is JobState.DONE
    assert replay.reanalyse(result.bundle).bundle_id == result.bundle_id


def test_a_cancelled_run_is_packed_on_its_claim_and_goes_on_later(site: Site) -> None:
    launched = site.submit(LONG)
    pod = site.start_pod()
    wait_until(on_claim(site, launched).trial("00-p1-baseline").stdout.is_file)
    assert BACKEND.cancel(launched.submission, launched.run_dir)
    wait_until(lambda: site.pods[pod].poll() is not None)
    assert site.pods[pod].returncode == 128 + signal.SIGTERM
    assert sending.poll(launched).state is JobState.CANCELLED
    assert not BACKEND.cancel(launched.submission, launched.run_dir)
    bundle = BACKEND.collect(launched.submission, launched.run_dir)
    assert inspect_bundle(bundle).trials == {"00-p1-baseline": "interrupted"}
    again = sending.submit(planning.prepare_resume(str(launched.run_dir.root)))
    second = site.start_pod()
    run_dir = on_claim(site, launched)
    wait_until(run_dir.interrupted_trial(1, "00-p1-baseline").exit.is_file)
    assert sending.poll(again).state is JobState.RUNNING
    proc.signal_process(site.pods[second].pid, signal.SIGTERM)
    assert site.wait_for_pod(second) == 128 + signal.SIGTERM


def test_an_agent_that_fails_says_why_and_its_files_come_here(site: Site) -> None:
    launched = site.submit(
        (*SETTINGS, "workload.grpo.rollout_batch_size=3"), results={"claim": "r", "path": "/proc/no"}
    )
    assert site.wait_for_pod(site.start_pod()) == 3
    site.end_job("Failed", "PodFailurePolicy", "Container agent failed with exit code 3")
    status = sending.poll(launched)
    assert status.state is JobState.FAILED
    assert "PodFailurePolicy: Container agent failed with exit code 3; " in status.reason


def test_two_pods_meet_on_the_claim_and_a_leading_pod_that_is_taken_away_comes_back(site: Site) -> None:
    launched = site.submit((*LONG, TWO_NODES), gang="waived")
    first, other = site.start_pod(0, program=TWO), site.start_pod(1, program=TWO)
    run_dir = on_claim(site, launched)
    wait_until(run_dir.trial("00-p1-baseline").stdout.is_file)
    assert load_json(run_dir.roster)["nodes"] == ["node-0", "node-1"]
    assert sending.poll(launched).nodes == "node-0, node-1"
    proc.signal_process(site.pods[first].pid, signal.SIGTERM)
    assert site.wait_for_pod(first) == 128 + signal.SIGTERM
    again = site.start_pod(0, program=TWO)
    wait_until(lambda: load_json(run_dir.roster)["allocation"].endswith(".2"))
    wait_until(run_dir.interrupted_trial(1, "00-p1-baseline").exit.is_file)
    wait_until(lambda: load_record(run_dir.node("node-1").preflight).get("allocation", "").endswith(".2"))
    assert site.pods[other].poll() is None
    for name in (again, other):
        proc.signal_process(site.pods[name].pid, signal.SIGTERM)
        assert site.wait_for_pod(name) == 128 + signal.SIGTERM


@pytest.mark.real
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray, which has no build for this Python")
def test_a_run_over_two_pods_of_one_ray_goes_on_after_one_was_evicted(site: Site) -> None:
    launched = site.submit((*SETTINGS[:2], "measure.scored_steps=40", TWO_NODES), gang="waived")
    leader, other = (site.start_pod(index, program=(*TWO, "--ray")) for index in (0, 1))
    run_dir = on_claim(site, launched)
    wait_until(lambda: b"perf/step_time" in read_log(run_dir, "00-p1-baseline"))
    proc.signal_process(site.pods[other].pid, signal.SIGTERM)
    assert site.wait_for_pod(other) == 128 + signal.SIGTERM
    wait_until(lambda: load_json(run_dir.roster)["allocation"].endswith(".2"))
    again = site.start_pod(1, program=(*TWO, "--ray"))
    for trial in ("00-p1-baseline", "01-p1-enabled"):
        wait_until(lambda trial=trial: b"perf/step_time" in read_log(run_dir, trial))  # type: ignore[misc]
        wait_until(run_dir.trial(trial).exit.is_file)
    assert [site.wait_for_pod(name) for name in (leader, again)] == [0, 0]
    site.end_job("Complete")
    assert finishing.finish(launched).is_ok
    assert launched.run_dir.interrupted_trial(1, "00-p1-baseline").exit.is_file()


def read_log(run_dir: RunDir, trial: str) -> bytes:
    path = run_dir.trial(trial).stdout
    return path.read_bytes() if path.is_file() else b""


def test_a_job_that_the_cluster_refuses_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Target.send

    def refuse(self: Target, verb: str, objects: bytes, *options: str) -> proc.Completed:
        if verb == "create":
            return proc.Completed(argv=(), returncode=1, stdout="", stderr="Error from server (Forbidden): quota")
        return real(self, verb, objects, *options)

    monkeypatch.setattr(Target, "send", refuse)
    with pytest.raises(SchedulerRefused, match='refused: "quota"'):
        site.submit()
    assert [site.objects(kind) for kind in ("Job", "NetworkPolicy")] == [[], []]


class Cut:
    """An ``exec`` whose connection breaks after some bytes, or brings others."""

    def __init__(self, data: bytes, *pieces: bytes | int) -> None:
        self.asked: list[int] = []
        self._data, self._pieces = data, list(pieces)

    @contextmanager
    def stream(self, *words: str) -> Iterator[io.BytesIO]:
        begin = int(words[-1]) - 1
        self.asked.append(begin)
        piece = self._pieces.pop(0) if self._pieces else 0
        yield io.BytesIO(piece if isinstance(piece, bytes) else self._data[begin : begin + piece])


@pytest.mark.parametrize(
    ("pieces", "asked", "error"),
    [
        ((4, 0, 6), [0, 4, 4], None),
        ((4,), [0, *[4] * 6], Unreachable),
        ((4, b"others"), [0, 4], CheckFailed),
    ],
)
def test_a_bundle_is_copied_over_connections_that_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes | int, ...], asked: list[int],
    error: type[Exception] | None,
) -> None:  # fmt: skip
    run_dir, data = RunDir(tmp_path), os.urandom(10)
    (tmp_path / "whole").write_bytes(data)
    digest = sha256_file(tmp_path / "whole")
    monkeypatch.setattr(collect, "PAUSE_S", 0.0)
    cut = Cut(data, *pieces)
    monkeypatch.setattr(Target, "stream", lambda _, *words: cut.stream(*words))
    with nullcontext() if error is None else pytest.raises(error):
        copy_bundle(Target(namespace="n"), (), run_dir, 10, digest, lambda _: None)
    assert cut.asked == asked
    assert run_dir.bundle.is_file() is (error is None)
