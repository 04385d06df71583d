"""The whole road with the real kubectl: submit, watch, collect, verify, replay; and what goes wrong on the way.

The API is tests/support/kube/server.py, or a real one (docs/testing.md); the pods are local processes in which the real
node agent runs.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, SchedulerRefused
from rlk_repro.base.files import load_json
from rlk_repro.base.findings import has_blocking
from rlk_repro.bundle.seal import inspect_bundle
from rlk_repro.clusters.api import JobState
from rlk_repro.clusters.k8s import backend as kubernetes
from rlk_repro.clusters.k8s import pod_exec as k8s_pod
from rlk_repro.clusters.k8s.pod.answers import read_facts
from rlk_repro.clusters.k8s.pod.notes import UID_VARIABLE, Notes
from rlk_repro.clusters.k8s.states import is_running
from rlk_repro.clusters.registry import get_backend
from rlk_repro.replay import steps as replay
from rlk_repro.rundir.paths import RunDir
from rlk_repro.submit import finishing, sending
from rlk_repro.workloads import WORKLOADS
from tests.support import waiting
from tests.support.job_examples import fill_disk
from tests.support.kube import runs as k8s_runs
from tests.support.kube.cluster import Cluster
from tests.support.kube.plane import ControlPlane
from tests.support.kube.runs import (
    LONG,
    collect,
    first_trial_runs,
    load_state,
    running_server,
    submit,
    wait_ended,
    wait_for_end,
    wait_gone,
    wait_until,
)
from tests.support.verifying import verify_bundle

REFERENCE = WORKLOADS["reference"]

pytestmark = [k8s_runs.needs_kubectl, pytest.mark.timeout(280)]
BACKEND = get_backend("k8s")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_plane: ControlPlane | None) -> Iterator[Cluster]:
    with running_server(tmp_path / "kube", monkeypatch, control_plane) as running:
        yield running


@pytest.mark.real
def test_a_rayjob_is_submitted_watched_collected_verified_and_replayed(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LOG_POLL_S", 0.2)  # the trials are over in seconds
    launched = submit(tmp_path, kind="rayjob")
    seen = {line.trial for line in BACKEND.logs(launched.submission, launched.run_dir, is_following=True)}
    assert seen == {"00-p1-baseline", "01-p1-enabled"}
    assert wait_for_end(launched).state is JobState.DONE
    result = finishing.finish(launched)
    assert result.is_ok
    assert launched.run_dir.is_sealed
    wait_gone(server)
    assert not has_blocking(verify_bundle(result.bundle))
    assert inspect_bundle(result.bundle).facts["cluster"] == "k8s"
    assert sending.poll(launched).state is JobState.DONE
    recorded = replay.reanalyse(result.bundle)
    assert recorded.bundle_id == result.bundle_id
    images = load_json(launched.run_dir.kubernetes_record)["images"]
    assert all(k8s_runs.DIGEST in item["image_id"] for item in images)


@pytest.mark.real
def test_a_bundle_from_kubernetes_is_replayed_on_this_machine(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, kind="job")
    wait_for_end(launched)
    bundle = finishing.finish(launched).bundle
    recorded = replay.reanalyse(bundle)
    again = replay.prepare(recorded, cluster="k8s", profile=str(tmp_path / "profile.yaml"))
    assert again.launch.plan.experiment_hash == recorded.plan.experiment_hash
    prepared = replay.prepare(recorded, cluster="local")
    told: list[str] = []
    comparison, result = replay.run(prepared, told.append)
    assert comparison is not None
    assert result.bundle.is_file()
    assert any(line.startswith("run directory: ") for line in told)


ALLOW = "from rlk_repro.workloads import WORKLOADS\nWORKLOADS['reference'].find_problems = lambda _: []\n"


def submit_to_two(
    server: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], **site: Any
) -> sending.Launched:
    """The reference trainer is of one node: in the pods it is let onto two, where the second describes itself."""
    (folder / "sitecustomize.py").write_text(ALLOW)
    server.kubelet.python_path = (str(folder),)
    monkeypatch.setattr(REFERENCE, "find_problems", lambda _: [])
    return submit(folder, (*settings, "layouts.cpu={num_nodes: 2, gpus_per_node: 0}"), gang="waived", **site)


@pytest.mark.real
@pytest.mark.parametrize("kind", ["job", "rayjob"])
def test_agents_of_two_pods_find_each_other(
    server: Cluster, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = submit_to_two(server, tmp_path, monkeypatch, k8s_runs.SETTINGS, kind=kind)
    status = wait_until(launched, lambda status: "," in status.nodes or status.state.is_final)
    assert len({f"node-{number}" for number in range(4)} & {*status.nodes.split(", ")}) == 2, status
    assert wait_for_end(launched).state is JobState.DONE
    bundle = collect(launched)
    assert len(inspect_bundle(bundle).nodes) == 2
    wait_gone(server)


@pytest.mark.real
def test_without_a_claim_the_bundle_is_fetched_from_the_leading_pod(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = submit(tmp_path, kind="job", results={"path": "/results"})
    assert wait_for_end(launched).state is JobState.DONE
    assert server.pod("leader") is not None
    with monkeypatch.context() as busy:
        # a pod that misses a question is still the one that gave the last answer
        busy.setattr(k8s_pod.Pod, "read_facts", lambda _: None)
        assert sending.poll(launched).state is JobState.DONE
    collect(launched)
    assert launched.run_dir.is_sealed
    wait_gone(server)


# what goes wrong


def test_a_job_that_fits_no_node_gives_the_reason_and_can_be_cancelled(server: Cluster, tmp_path: Path) -> None:
    server.faults.unschedulable = True
    launched = submit(tmp_path, kind="rayjob")
    words = "no node fits (Unschedulable: 0/4 nodes are available"
    status = wait_until(launched, lambda status: status.reason.startswith(words))
    assert status.state is JobState.PENDING
    assert BACKEND.cancel(launched.submission, launched.run_dir)
    assert wait_for_end(launched).state is JobState.CANCELLED
    assert not BACKEND.cancel(launched.submission, launched.run_dir)
    wait_gone(server)


@pytest.mark.real
def test_an_image_that_cannot_be_pulled_is_explained(server: Cluster, tmp_path: Path) -> None:
    server.faults.bad_image = True
    launched = submit(tmp_path, kind="job")
    status = wait_until(launched, lambda status: bool(status.reason))
    assert status.state is JobState.PENDING
    assert status.reason == "the image cannot be pulled (ImagePullBackOff: Back-off pulling image: manifest unknown)"
    server.faults.bad_image = False
    assert wait_for_end(launched).state is JobState.DONE


def test_a_queue_that_holds_a_job_back_does_not_end_it(server: Cluster, tmp_path: Path) -> None:
    server.faults.suspend = True
    launched = submit(tmp_path, kind="rayjob", queue="benchmarks")
    status = wait_until(launched, lambda status: bool(status.reason))
    assert (status.state, status.reason) == (JobState.PENDING, "held back by its queue")
    server.faults.suspend = False
    wait_until(launched, lambda status: status.state is JobState.RUNNING)
    assert BACKEND.cancel(launched.submission, launched.run_dir)
    wait_for_end(launched)


def test_a_refusal_is_quoted_and_nothing_is_left(server: Cluster, tmp_path: Path) -> None:
    server.refuse("RayJob")
    with pytest.raises(SchedulerRefused, match="exceeded quota: gpus"):
        submit(tmp_path, kind="rayjob")
    server.refuse("ConfigMap")
    with pytest.raises(SchedulerRefused, match="exceeded quota: gpus"):
        submit(tmp_path, kind="rayjob")
    wait_gone(server)


def test_a_missing_operator_is_reported(server: Cluster, tmp_path: Path) -> None:
    server.remove_operators()
    with pytest.raises(SchedulerRefused, match=r"rayjobs|RayJob"):
        submit(tmp_path, kind="rayjob")


def test_a_missing_namespace_is_reported(server: Cluster, tmp_path: Path) -> None:
    with pytest.raises(SchedulerRefused, match=r"namespaces .*not found|cannot list resource .* in the namespace"):
        submit(tmp_path, kind="job", namespace="nowhere")


@pytest.mark.real
def test_an_evicted_leaders_records_are_collected(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, LONG, kind="job", restarts=0)
    wait_until(launched, first_trial_runs(launched))
    server.evict("leader")
    status = wait_for_end(launched)
    assert status.state is JobState.FAILED
    assert "the node ended the pod" in status.reason
    bundle = collect(launched)
    assert not launched.run_dir.is_sealed
    assert inspect_bundle(bundle).trials == {"00-p1-baseline": "interrupted"}
    wait_gone(server)


@pytest.mark.real
def test_an_evicted_run_is_resumed_with_whole_pairs(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, LONG, kind="job", restarts=0)
    wait_until(launched, first_trial_runs(launched))
    server.evict("leader", condition="PreemptionByScheduler")
    assert "preempted" in wait_for_end(launched).reason
    prepared = sending.prepare_resume(launched.run_dir.run_id)
    again = sending.submit(prepared)
    wait_until(again, first_trial_runs(again))
    assert BACKEND.cancel(again.submission, again.run_dir)
    wait_for_end(again)
    bundle = collect(again)
    assert "interrupted/1/00-p1-baseline/exit.json" in names_of(bundle)


@pytest.mark.real
def test_a_lost_node_ends_the_other_pods_of_its_job(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod that goes does not lead; what its leader wrote until it was ended is collected."""
    launched = submit_to_two(server, tmp_path, monkeypatch, k8s_runs.LONG, kind="job", restarts=0)
    wait_until(launched, first_trial_runs(launched))
    server.evict("agent", condition="PreemptionByScheduler")
    status = wait_for_end(launched)
    assert status.state is JobState.FAILED
    assert "preempted" in status.reason
    bundle = collect(launched)
    assert inspect_bundle(bundle).trials == {"00-p1-baseline": "interrupted"}
    wait_gone(server)


TWO_PAIRS = ("measure.pairs=2", "measure.warmup_steps=1", "measure.scored_steps=6", *k8s_runs.SETTINGS[3:])


def second_pair_runs(launched: sending.Launched) -> Callable[[Any], bool]:
    def is_there(_: Any) -> bool:
        state = load_state(launched)
        return bool(state and (state.get("trial") or "").startswith("02-p2"))

    return is_there


def check_goes_on(launched: sending.Launched) -> None:
    """One sealed bundle: the first pair as it was, the second one whole in the next allocation."""
    assert wait_for_end(launched).state is JobState.DONE
    bundle = collect(launched)
    assert launched.run_dir.is_sealed
    assert set(inspect_bundle(bundle).trials.values()) == {"ok"}
    assert "interrupted/1/02-p2-enabled/exit.json" in names_of(bundle)
    exits = [load_json(folder.exit)["allocation"] for folder in launched.run_dir.trial_dirs()]
    assert exits[0] == exits[1] != exits[2] == exits[3]


@pytest.mark.real
@pytest.mark.parametrize("kind", ["job", "rayjob"])
def test_an_evicted_job_goes_on_by_itself(server: Cluster, tmp_path: Path, kind: str) -> None:
    launched = submit(tmp_path, TWO_PAIRS, kind=kind)
    wait_until(launched, second_pair_runs(launched))
    server.evict("leader", condition="PreemptionByScheduler")
    status = sending.poll(launched)
    assert not status.state.is_final, status
    check_goes_on(launched)
    wait_gone(server)


@pytest.mark.real
@pytest.mark.parametrize("kind", ["job", "rayjob"])
def test_a_suspended_job_goes_on_by_itself(server: Cluster, tmp_path: Path, kind: str) -> None:
    """As Kueue preempts: the pods are ended, and made again some time later."""
    launched = submit(tmp_path, TWO_PAIRS, kind=kind)
    wait_until(launched, second_pair_runs(launched))
    server.faults.suspend = True
    wait_until(launched, lambda status: status.state is JobState.PENDING)
    waiting.wait_until(lambda: server.pod("leader") is None)
    server.faults.suspend = False
    check_goes_on(launched)


@pytest.mark.real
@pytest.mark.parametrize("kind", ["job", "rayjob"])
def test_a_job_that_is_evicted_too_often_ends(server: Cluster, tmp_path: Path, kind: str) -> None:
    launched = submit(tmp_path, LONG, kind=kind, restarts=1)
    wait_until(launched, first_trial_runs(launched))
    server.evict("leader")
    waiting.wait_until(lambda: is_running(server.pod("leader")))
    wait_until(launched, lambda status: status.state is JobState.RUNNING)
    interrupted = server.claim("results") / "smoke" / launched.run_dir.run_id / "interrupted"
    waiting.wait_until(interrupted.is_dir)  # a pod that has not begun yet is replaced, and counts as no loss
    server.evict("leader")
    status = wait_for_end(launched)
    assert status.state is JobState.FAILED
    # KubeRay deletes the pods of a job that has ended, and with them the node's reason and perhaps the agent's
    in_rayjob = ["stopped by SIGTERM", "the agent ended without a report"]
    expected = {"job": ["the node ended the pod"], "rayjob": in_rayjob}[kind]
    assert any(words in status.reason for words in expected)
    collect(launched)
    wait_gone(server)


@pytest.mark.real
def test_a_pod_that_replaces_an_evicted_one_ends_with_the_run(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the trial does not need it, as without Ray."""
    launched = submit_to_two(server, tmp_path, monkeypatch, TWO_PAIRS, kind="job")
    wait_until(launched, first_trial_runs(launched))
    server.evict("agent", condition="PreemptionByScheduler")
    assert wait_for_end(launched).state is JobState.DONE
    collect(launched)
    assert launched.run_dir.is_sealed
    wait_gone(server)


def names_of(bundle: Path) -> list[str]:
    import tarfile

    with tarfile.open(bundle) as archive:
        return archive.getnames()


@pytest.mark.parametrize("kind", ["job", "rayjob"])
def test_cancelling_a_running_job_records_and_packs(server: Cluster, tmp_path: Path, kind: str) -> None:
    launched = submit(tmp_path, LONG, kind=kind)
    wait_until(launched, first_trial_runs(launched))
    assert BACKEND.cancel(launched.submission, launched.run_dir)
    status = wait_for_end(launched)
    assert status.state is JobState.CANCELLED
    bundle = collect(launched)
    assert inspect_bundle(bundle).trials == {"00-p1-baseline": "interrupted"}
    wait_gone(server)
    assert sending.poll(launched).state is JobState.CANCELLED


def test_without_a_claim_a_cancelled_run_stays_in_its_pod_until_it_is_collected(
    server: Cluster, tmp_path: Path
) -> None:
    launched = submit(tmp_path, LONG, kind="job", results={"path": "/results"})
    wait_until(launched, first_trial_runs(launched))
    assert BACKEND.cancel(launched.submission, launched.run_dir)
    assert wait_for_end(launched).state is JobState.CANCELLED
    with pytest.raises(CheckFailed, match="its trials are in its pods only"):
        sending.prepare_resume(launched.run_dir.run_id)
    time.sleep(2)
    assert inspect_bundle(collect(launched)).trials == {"00-p1-baseline": "interrupted"}
    wait_gone(server)


def test_a_cancel_that_cannot_reach_the_leading_pod_deletes_nothing(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, LONG, kind="job", results={"path": "/results"})
    wait_until(launched, first_trial_runs(launched))
    server.faults.no_exec = True
    with pytest.raises(SchedulerRefused, match=r"was not asked to stop: .*\n  hint: cancel again"):
        BACKEND.cancel(launched.submission, launched.run_dir)
    assert is_running(server.pod("leader"))
    assert BACKEND.cancel(launched.submission, launched.run_dir)
    wait_gone(server)


def test_a_submission_that_breaks_off_names_what_it_may_leave(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = kubernetes._send_inputs

    def break_off(*args: Any) -> None:
        server.stop()
        send(*args)

    monkeypatch.setattr(kubernetes, "_send_inputs", break_off)
    with pytest.raises(SchedulerRefused) as caught:
        submit(tmp_path, kind="job")
    words = shlex.split(caught.value.problems[-1].hint)
    server.start()
    assert server.pod("leader") is not None
    assert proc.run(words, timeout_s=60).is_ok
    wait_gone(server)


@pytest.mark.real
def test_a_job_deleted_behind_our_back_can_still_be_collected(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, LONG, kind="rayjob")
    wait_until(launched, first_trial_runs(launched))
    server.delete("rayjobs", launched.submission.details["name"])
    status = wait_for_end(launched)
    assert status.state is JobState.FAILED
    assert "no longer exists" in status.reason
    wait_gone(server)
    bundle = collect(launched)
    assert inspect_bundle(bundle).trials == {"00-p1-baseline": "interrupted"}
    wait_gone(server)


@pytest.mark.real
def test_an_api_that_restarts_is_waited_for(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, kind="job")
    server.stop()
    status = sending.poll(launched)
    assert (status.state, status.is_unreachable) == (JobState.UNKNOWN, True)
    with pytest.raises(EnvironmentMissing, match="may still be running"):
        BACKEND.cancel(launched.submission, launched.run_dir)
    with pytest.raises(EnvironmentMissing, match="may still be running"):
        collect(launched)
    server.start()
    assert wait_for_end(launched).state is JobState.DONE
    assert finishing.finish(launched).is_ok


@pytest.mark.real
def test_an_interrupted_collection_continues(server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = submit(tmp_path, kind="job")
    wait_for_end(launched)
    server.faults.cut_every_bytes, server.faults.cuts_left = 1 << 14, 2
    collect(launched)
    assert server.faults.cuts_left <= 1
    assert launched.run_dir.is_sealed


@pytest.mark.real
def test_a_leader_that_ends_while_it_is_asked_is_followed_by_a_collector(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sealed run is done, and may be collected, before its pod has ended."""
    launched = submit(tmp_path, kind="job")
    wait_for_end(launched)
    far = RunDir(server.claim("results") / "smoke" / launched.run_dir.run_id)
    env = {UID_VARIABLE: "ended"}
    Notes(far, env).write_bundle()
    facts, ask = read_facts(far, env), k8s_pod.Pod.read_facts
    leaders = iter(["ended"])
    monkeypatch.setattr(k8s_pod, "find_leader", lambda _: next(leaders, ""))
    monkeypatch.setattr(k8s_pod.Pod, "read_facts", lambda pod: facts if pod.name == "ended" else ask(pod))
    told: list[str] = []
    BACKEND.collect(launched.submission, launched.run_dir, told.append)
    assert launched.run_dir.is_sealed
    assert [line.rpartition("-")[2] for line in told if line.startswith("fetching")][1:] == ["collect"]
    wait_gone(server)


@pytest.mark.real
def test_a_collector_that_dies_midway_is_replaced(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, kind="job")
    wait_for_end(launched)
    wait_ended(server, "leader")  # until then it would serve the bundle itself
    killer = threading.Thread(target=kill_collector, args=(server,))
    killer.start()
    with pytest.raises((CheckFailed, SchedulerRefused)):
        collect(launched)
    killer.join()
    collect(launched)
    assert launched.run_dir.is_sealed
    wait_gone(server)


@pytest.mark.real
def test_a_collector_that_cannot_start_gives_the_reason(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = submit(tmp_path, kind="job")
    wait_for_end(launched)
    wait_ended(server, "leader")
    server.faults.bad_image = True
    monkeypatch.setattr(k8s_pod, "START_TIMEOUT_S", 10.0)
    told: list[str] = []
    with pytest.raises(CheckFailed, match="the image cannot be pulled"):
        BACKEND.collect(launched.submission, launched.run_dir, told.append)
    assert [line.partition(" waits: ")[2].partition(" (")[0] for line in told[1:]] == ["the image cannot be pulled"]
    server.faults.bad_image = False
    collect(launched)
    assert launched.run_dir.is_sealed


def kill_collector(server: Cluster) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pod = server.pod("collector")
        running = None if pod is None else server.running.get(pod["metadata"]["name"])
        if running is not None and running.process is not None:
            os.kill(running.process.pid, signal.SIGKILL)
            return
        time.sleep(0.01)


@pytest.mark.real
def test_an_unreachable_pod_is_reported_and_loses_no_result(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = submit(tmp_path, kind="job")
    wait_for_end(launched)
    monkeypatch.setattr("rlk_repro.clusters.k8s.pod_exec.START_TIMEOUT_S", 3.0)
    server.faults.no_exec = True
    with pytest.raises(CheckFailed, match="offers no bundle"):
        collect(launched)
    server.faults.no_exec = False
    collect(launched)
    assert launched.run_dir.is_sealed
    wait_gone(server)


@pytest.mark.real
def test_a_full_claim_ends_the_run_and_its_records_are_collected_later(
    server: Cluster, small_disk: Path, tmp_path: Path
) -> None:
    claim = server.claim("results")
    claim.rmdir()
    claim.symlink_to(small_disk)
    launched = submit(tmp_path, LONG, kind="job")
    wait_until(launched, first_trial_runs(launched))
    ballast = fill_disk(small_disk)
    end = wait_for_end(launched)
    assert end.state is JobState.FAILED
    assert f"(No space left on device), expected room on the file system at {small_disk}" in end.reason
    wait_ended(server, "leader")
    ballast.unlink()
    ballast = fill_disk(small_disk)  # the agent gave up room for its last words, and left what it did not need
    with pytest.raises(CheckFailed, match=r"No space left"):
        collect(launched)
    ballast.unlink()
    bundle = collect(launched)
    status = inspect_bundle(bundle).trials["00-p1-baseline"]
    assert status in {"interrupted", "missing"}, "its end could not be written"
    assert "trials/00-p1-baseline/stdout.log" in names_of(bundle)
    wait_gone(server)


def test_a_claim_that_cannot_be_written_is_a_failure_with_a_reason(server: Cluster, tmp_path: Path) -> None:
    full = server.claim("results") / "smoke"
    full.write_text("a file where a folder must be")
    launched = submit(tmp_path, kind="job")
    status = wait_for_end(launched)
    assert status.state is JobState.FAILED
    assert "ended with code 3: " in status.reason
    assert "cannot be written (Not a directory)" in status.reason
    BACKEND.cancel(launched.submission, launched.run_dir)


def test_results_lost_with_their_pod_are_reported(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, LONG, kind="job", results={"path": "/results"})
    wait_until(launched, first_trial_runs(launched))
    server.delete("jobs", launched.submission.details["name"])
    wait_for_end(launched)
    wait_gone(server)
    with pytest.raises(CheckFailed, match="the results are lost: they were in the leading pod, which no longer exists"):
        collect(launched)


def test_a_job_that_was_ended_before_it_began_left_nothing(server: Cluster, tmp_path: Path) -> None:
    server.faults.unschedulable = True
    launched = submit(tmp_path, kind="job")
    wait_until(launched, lambda status: bool(status.reason))
    kubernetes.cancel(launched.submission, launched.run_dir)
    assert wait_for_end(launched).state is JobState.CANCELLED
    wait_gone(server)
    server.faults.unschedulable = False
    with pytest.raises(CheckFailed, match="offers no bundle"):
        collect(launched)
    wait_gone(server)


@pytest.mark.real
def test_a_job_that_runs_cannot_be_collected(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, LONG, kind="job")
    wait_until(launched, first_trial_runs(launched))
    with pytest.raises(CheckFailed, match="has not ended: running"):
        collect(launched)
    assert kubernetes.cancel(launched.submission, launched.run_dir)
    assert kubernetes.cancel(launched.submission, launched.run_dir) in {True, False}
    wait_for_end(launched)
    wait_gone_or_collect(server, launched)


def wait_gone_or_collect(server: Cluster, launched: sending.Launched) -> None:
    collect(launched)
    wait_gone(server)
