"""From submit to the collected bundle: real agents in pods that are processes, and a small kubectl."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, SchedulerRefused
from rlk_repro.base.files import load_json, load_record, sha256_bytes
from rlk_repro.base.findings import has_blocking
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.clusters.api import JobState, JobStatus
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
    assert sending.poll(launched) == JobStatus(state=JobState.CANCELLED, reason="")
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
    first, other = site.start_pod(0), site.start_pod(1)
    run_dir = on_claim(site, launched)
    wait_until(run_dir.trial("00-p1-baseline").stdout.is_file)
    assert load_json(run_dir.roster)["nodes"] == ["node-0", "node-1"]
    assert sending.poll(launched).nodes == "node-0, node-1"
    proc.signal_process(site.pods[first].pid, signal.SIGKILL)
    assert site.wait_for_pod(first) == -signal.SIGKILL
    again = site.start_pod(0)
    wait_until(lambda: load_json(run_dir.roster)["allocation"].endswith(".2"))
    wait_until(run_dir.interrupted_trial(1, "00-p1-baseline").stdout.is_file)
    wait_until(lambda: load_record(run_dir.node("node-1").preflight).get("allocation", "").endswith(".2"))
    assert site.pods[other].poll() is None
    for name in (again, other):
        proc.signal_process(site.pods[name].pid, signal.SIGTERM)
        assert site.wait_for_pod(name) == 128 + signal.SIGTERM


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


@pytest.mark.parametrize(
    ("pieces", "error"), [((b"wh", b"other", b"whole"), None), ((b"wh",) * 6, "not copied in 6 tries: it was damaged")]
)
def test_a_bundle_is_copied_over_connections_that_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...], error: str | None
) -> None:
    run_dir, left = RunDir(tmp_path), list(pieces)
    monkeypatch.setattr(collect, "PAUSE_S", 0.0)
    monkeypatch.setattr(Target, "stream", lambda *_: nullcontext(io.BytesIO(left.pop(0))))
    with nullcontext() if error is None else pytest.raises(Unreachable, match=error):
        copy_bundle(Target(namespace="n"), (), run_dir, sha256_bytes(b"whole"))
    assert (left, run_dir.bundle.is_file()) == ([], error is None)
    assert list(run_dir.work.iterdir()) == []
