"""``profile init`` and ``profile check`` on a cluster that the real kubectl describes, and words for states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.errors import SpecError
from rlk_repro.base.proc import Completed
from rlk_repro.base.resources import all_profile_folders
from rlk_repro.clusters.api import JobState
from rlk_repro.clusters.k8s import backend as kubernetes
from rlk_repro.clusters.k8s.check import find_obstacle
from rlk_repro.clusters.k8s.facts import Facts
from rlk_repro.clusters.k8s.kubectl import Unreachable, explain
from rlk_repro.clusters.k8s.pods import make_pod
from rlk_repro.clusters.k8s.propose import group_nodes, list_sizes, list_taints
from rlk_repro.clusters.k8s.states import CONDITIONS, RAYJOB_STATES, WORDS, Judged, judge, judge_job
from rlk_repro.clusters.profiles import load_all_hardware
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_profile, load_stack
from tests.support.how_to import read_commands
from tests.support.kube.cluster import Cluster
from tests.support.kube.examples import num_nodes, plan_for
from tests.support.kube.plane import ControlPlane
from tests.support.kube.runs import needs_kubectl, running_server

Call = Callable[..., tuple[int, str, str]]


TAINT = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
PRODUCT = "nvidia.com/gpu.product"


def node(
    name: str = "n",
    labels: dict[str, str] | None = None,
    gpus: int = 8,
    resource: str = "nvidia.com/gpu",
    taints: Sequence[dict[str, str]] = (TAINT,),
    **spec: Any,
) -> dict[str, Any]:
    allocatable = {"cpu": "190", "memory": "1900Gi", resource: str(gpus)}
    given = {PRODUCT: "NVIDIA-H200"} if labels is None else labels
    known = {"kubernetes.io/arch": "amd64"} | given
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": known},
        "spec": {"taints": [*taints], **spec},
        "status": {"allocatable": allocatable},
    }


def away(name: str = "n") -> dict[str, Any]:
    found = node(name)
    found["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    return found


DEDICATED = {"key": "dedicated", "value": "rl", "effect": "NoExecute"}
LOST = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
GKE = {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}
VIRTUAL = {"amd.com/gpu.device-id": "74b5", "amd.com/gpu.product-name": "AMD_Instinct_MI300X_VF"}


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([node(), node(labels={PRODUCT: "NVIDIA-B300"})], {"h200": 1}),
        ([node(labels=GKE)], {"h200": 1}),
        ([node(labels=VIRTUAL, resource="amd.com/gpu")], {"mi300x": 1}),
        ([node(labels={PRODUCT: "NVIDIA-A100-SXM4-80GB", **GKE})], {}),  # its own words contradict each other
        ([node(taints=[LOST]), away(), node(unschedulable=True), node(taints=[DEDICATED])], {"h200": 1}),
    ],
)
def test_hardware_comes_from_usable_nodes_own_words(nodes: list[Any], found: dict[str, int]) -> None:
    assert {name: len(items) for name, items in group_nodes(nodes, load_all_hardware()).items()} == found


def test_a_taint_is_tolerated_as_it_is() -> None:
    soft = {"key": "soft", "effect": "PreferNoSchedule"}
    assert list_taints(node(taints=[DEDICATED, soft])) == [DEDICATED]
    assert list_sizes([node(), node()]) == {"cpu": "171", "memory": "1710Gi", "shm": "64Gi"}


@pytest.mark.parametrize(
    ("item", "obstacle"),
    [
        (node(), ""),
        (node(gpus=7), "nvidia.com/gpu: 7 of 8"),
        (node(taints=[DEDICATED]), "taint dedicated"),
        (node(taints=[{**DEDICATED, "effect": "PreferNoSchedule"}]), ""),
        (node(labels={PRODUCT: "NVIDIA-H100-80GB-HBM3"}), "other labels"),
        (node(labels={PRODUCT: "NVIDIA-H200", "kubernetes.io/arch": "arm64"}), "other labels"),
        (node(labels=GKE), ""),
        (node(unschedulable=True), "not ready"),
        (away(), "not ready"),
    ],
)
def test_a_node_fits_by_label_taint_readiness_and_allocatable(item: Any, obstacle: str) -> None:
    pod = make_pod(plan_for(settings=num_nodes("h200", 4)), RunDir(Path("/r/id")), "leader", (), ())["spec"]
    assert find_obstacle(item, pod) == obstacle


def claim(name: str, mode: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "default"},
            "spec": {"accessModes": [mode], "storageClassName": "", "resources": {"requests": {"storage": "1Gi"}}},
            "status": {"phase": "Bound"}}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_plane: ControlPlane | None) -> Iterator[Cluster]:
    with running_server(tmp_path / "kube", monkeypatch, control_plane, claims=(), num_nodes=0) as running:
        for number in range(2):
            running.add("nodes", node(f"n{number}"))
        running.add("persistentvolumeclaims", claim("shared", "ReadWriteMany"))
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "labels": {}}}
        running.add("namespaces", space)
        yield running


def write_profile(folder: Path, **settings: Any) -> Path:
    value = {
        "profile": "here",
        "cluster": "k8s",
        "hardware": "h200",
        "kubernetes": {"results": {"claim": "shared"}, "cpu": "100", "memory": "500Gi", **settings},
    }
    path = folder / "here.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def check(call: Call, path: Path, *options: str) -> tuple[int, list[dict[str, str]]]:
    code, out, err = call("profile", "check", str(path), "--json", *options)
    assert out, err
    return code, list(json.loads(out)["findings"])


@needs_kubectl
def test_a_profile_is_proposed_that_the_cluster_takes(server: Cluster, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "mine.yaml"
    code, _, err = call("profile", "init", "--cluster", "k8s", "--yes", "-o", str(path))
    assert code == 0, err
    profile = load_profile(str(path), all_profile_folders()).model
    settings = profile.kubernetes
    assert settings is not None
    assert (profile.hardware, settings.kind, settings.results.claim) == ("h200", "rayjob", "shared")
    assert (settings.cpu, settings.memory, settings.shm) == ("171", "1710Gi", "64Gi")
    assert check(call, path)[0] == 0


@needs_kubectl
def test_the_page_on_installing_works_command_by_command(
    server: Cluster, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in read_commands("kubernetes.md", "Install on a Kubernetes cluster"):
        code, out, err = call(*command)
        assert code == 0, (command, out + err)


@needs_kubectl
def test_nodes_that_do_not_fit_are_counted_and_the_server_is_asked(
    server: Cluster, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlk_repro.submit.planning.load_stack", lambda _: load_stack("example"))
    path = write_profile(tmp_path)
    assert check(call, path, "--run", "smoke")[0] == 0
    code, findings = check(call, write_profile(tmp_path, cpu="400"), "--run", "smoke")
    blocking = [(item["where"], item["found"]) for item in findings if item["level"] == "blocking"]
    assert (code, blocking) == (1, [("nodes", "0 of 2: cpu: 190 of 400 (2 nodes)")])


def test_a_profile_of_an_unknown_kind_names_the_known_kinds(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text("profile: here\ncluster: k8s\nkubernetes:\n  kind: jobset\n")
    with pytest.raises(SpecError) as caught:
        load_profile(str(path), all_profile_folders())
    assert ":4: kubernetes.kind: wrong value, got 'jobset', expected 'rayjob' or 'job'" in str(caught.value)


@needs_kubectl
def test_a_restricted_namespace_wants_another_user(server: Cluster, tmp_path: Path, call: Call) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    server.add(
        "namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "labels": labels}}
    )
    path = tmp_path / "mine.yaml"
    call("profile", "init", "--cluster", "k8s", "--yes", "-o", str(path))
    assert yaml.safe_load(path.read_text())["kubernetes"]["run_as"] == {"user": 1000, "group": 1000}


@needs_kubectl
def test_without_a_cluster_there_is_no_profile(
    server: Cluster, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.stop()
    code, _, err = call("profile", "check", str(write_profile(tmp_path)))
    assert code == 3
    assert "no cluster answers" in err
    server.start()


def pod(role: str = "leader", phase: str = "Pending", **status: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": role}
    return {
        "metadata": {"name": role, "labels": labels},
        "spec": {"nodeName": "n1"},
        "status": {"phase": phase, **status},
    }


JOB: dict[str, Any] = {"kind": "Job", "metadata": {"name": "j"}, "spec": {}, "status": {"active": 1}}


@pytest.mark.parametrize("phase", ["Running", "Succeeded", "Failed"])
def test_a_job_whose_leader_has_begun_does_not_wait_again(phase: str) -> None:
    """Its controller takes a while to say that it is over."""
    assert judge(JOB, [pod(phase=phase)]).state is JobState.RUNNING
    assert judge(JOB, [pod()]).state is JobState.PENDING


def test_a_job_that_its_queue_took_back_has_not_ended(tmp_path: Path) -> None:
    """Its pod packed what it had; it will begin again."""
    packed = Facts(state=None, is_sealed=False, waits_for="", failure="", bundle_bytes=9, bundle_sha256="", trials=())
    told = kubernetes._judge_present(Judged(state=JobState.PENDING, reason="held back"), packed, RunDir(tmp_path))
    assert (told.state, told.reason) == (JobState.PENDING, "held back")


@pytest.mark.parametrize("word", RAYJOB_STATES)
def test_every_state_of_a_rayjob_has_a_meaning(word: str) -> None:
    state, _ = judge_job({"kind": "RayJob", "status": {"jobDeploymentStatus": word, "jobStatus": "SUCCEEDED"}})
    assert state is RAYJOB_STATES[word]


def test_a_state_of_a_later_version_is_unknown() -> None:
    assert judge_job({"kind": "RayJob", "status": {"jobDeploymentStatus": "Floating"}})[0] is JobState.UNKNOWN


@pytest.mark.parametrize(("kind", "state"), CONDITIONS)
def test_conditions_decide(kind: str, state: JobState) -> None:
    job = {**JOB, "status": {"conditions": [{"type": kind, "status": "True", "reason": "X", "message": "y"}]}}
    assert judge_job(job) == (state, "X: y")


# states on the way, which are no reasons
USUAL = {"Error", "PodInitializing", "ContainerCreating", "ContainersNotReady"}


@pytest.mark.parametrize("reason", sorted(WORDS.keys() - USUAL))
def test_every_reason_is_explained(reason: str) -> None:
    waiting = pod(containerStatuses=[{"state": {"waiting": {"reason": reason, "message": "its own\nwords"}}}])
    told = judge(JOB, [waiting])
    assert told.reason == f"{WORDS[reason]} ({reason}: its own words)"
    assert told.state is JobState.PENDING


def test_the_last_two_lines_of_an_agent_are_told_apart() -> None:
    message = "rlk-repro: one\ngpu.devices: none\n  hint: another node\n"
    ended = pod(containerStatuses=[{"state": {"terminated": {"reason": "Error", "exitCode": 3, "message": message}}}])
    assert judge(JOB, [ended]).reason.endswith(" ended with code 3: gpu.devices: none; hint: another node")


def test_an_event_gives_the_reason_where_pod_and_job_give_none() -> None:
    events = [
        {"type": "Warning", "reason": "FailedMount", "message": "configmap not found", "lastTimestamp": "2026-01-02"},
        {"type": "Warning", "reason": "FailedCreate", "message": "exceeded quota", "lastTimestamp": "2026-01-03"},
        {"type": "Normal", "reason": "Pulled", "message": "ok", "lastTimestamp": "2026-01-04"},
    ]
    assert (
        judge(JOB, [], events).reason == "a pod may not be created (quota or admission) (FailedCreate: exceeded quota)"
    )


def test_an_event_of_a_pod_that_is_gone_gives_no_reason() -> None:
    """The first pod of a suspended job waited for its ConfigMap, as every first pod does."""
    of = {"kind": "Pod", "name": "gone"}
    event = {"type": "Warning", "reason": "FailedMount", "message": "configmap not found", "involvedObject": of}
    job = {**JOB, "status": {"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended"}]}}
    assert judge(job, [], [event]).reason == "suspended by its queue or by hand (JobSuspended)"
    waiting = {"metadata": {"name": "gone"}, "status": {"phase": "Pending"}}
    assert judge(job, [waiting], [event]).reason.endswith(
        "a volume cannot be mounted (FailedMount: configmap not found)"
    )


@pytest.mark.parametrize(
    "words",
    [
        "Error from server (TooManyRequests): storage is (re)initializing",
        "Error from server (ServiceUnavailable): the server is currently unable to handle the request",
        "The connection to the server 192.0.2.7:6443 was refused - did you specify the right host or port?",
    ],
)
def test_a_server_that_restarts_does_not_refuse(words: str) -> None:
    assert isinstance(explain(Completed(argv=(), returncode=1, stdout="", stderr=words)), Unreachable)
    quota = 'Error from server (Forbidden): pods "p" is forbidden: exceeded quota'
    assert not isinstance(explain(Completed(argv=(), returncode=1, stdout="", stderr=quota)), Unreachable)


def test_preemption_and_lack_of_memory_are_named() -> None:
    disrupted = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "by x"}]
    failed = {**JOB, "status": {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}}
    told = judge(failed, [pod(phase="Failed", conditions=disrupted)])
    assert told.state is JobState.FAILED
    assert "preempted by a job of higher priority (PreemptionByScheduler: by x)" in told.reason
    ended = [{"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]
    assert "out of memory" in judge(failed, [pod(phase="Failed", containerStatuses=ended)]).reason
