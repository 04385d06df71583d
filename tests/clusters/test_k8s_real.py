"""What only a real API server says: its admission of every shipped example, Pod Security, the eviction API."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.bundle.seal import inspect_bundle
from rlk_repro.clusters.api import JobState
from rlk_repro.clusters.k8s.propose import SECURITY_LABEL
from rlk_repro.clusters.registry import get_backend
from rlk_repro.submit import sending
from tests.support.kube import runs as k8s_runs
from tests.support.kube.client import ROWS, path_of
from tests.support.kube.examples import render_examples
from tests.support.kube.plane import APISERVER, ControlPlane
from tests.support.kube.real import RealCluster
from tests.support.kube.runs import (
    LONG,
    collect,
    first_trial_runs,
    running_server,
    submit,
    wait_for_end,
    wait_gone,
    wait_until,
)
from tests.support.kube.store import Gone
from tests.support.kube.templates import find_templates

pytestmark = [
    k8s_runs.needs_kubectl,
    pytest.mark.timeout(280),
    pytest.mark.skipif(not APISERVER, reason="RLK_KUBE_APISERVER names no kube-apiserver"),
]
PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_plane: ControlPlane) -> Iterator[RealCluster]:
    with running_server(tmp_path / "kube", monkeypatch, control_plane) as running:
        assert isinstance(running, RealCluster)
        yield running


@pytest.fixture
def controlled(server: RealCluster) -> RealCluster:
    if not server.has_jobs:
        pytest.skip("no kube-controller-manager beside kube-apiserver")
    return server


def enforce(server: RealCluster, level: str) -> None:
    labels = {SECURITY_LABEL: level, "pod-security.kubernetes.io/warn": level}
    server.add("namespaces", {"metadata": {"name": "default", "labels": labels}})


def apply(*words: str) -> subprocess.CompletedProcess[str]:
    argv = ["kubectl", "apply", "--dry-run=server", "--validate=strict", "--output=name", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the objects of every run on every hardware."""
    folder = tmp_path_factory.mktemp("rendered")
    for name, text in render_examples().items():
        (folder / name).write_text(text)
    return folder


def test_every_object_is_accepted_as_it_is(server: RealCluster, rendered: Path) -> None:
    enforce(server, "privileged")
    done = apply(f"--filename={rendered}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == sum(len(load_all(path)) for path in rendered.iterdir())


def load_all(path: Path) -> list[dict[str, Any]]:
    return [item for item in yaml.load_all(path.read_text(), yaml.CSafeLoader) if item is not None]


def level_of(path: Path) -> str:
    """What docs/kubernetes.md says the pods of an example are fit for."""
    return "privileged" if ".rdma." in path.name else "restricted" if ".restricted." in path.name else "baseline"


@pytest.mark.parametrize("level", ["privileged", "baseline", "restricted"])
def test_every_pod_is_admitted_at_its_level_of_security(server: RealCluster, rendered: Path, level: str) -> None:
    enforce(server, level)
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **template.value, "metadata": {**template.value["metadata"], "name": "p"}}
        for path in sorted(rendered.iterdir())
        if level_of(path) == level
        for item in load_all(path)
        for template in find_templates(item)
    ]
    assert pods
    for name in {pod["spec"].get("priorityClassName") for pod in pods} - {None}:
        with contextlib.suppress(Gone):
            server.add("priorityclasses", {"metadata": {"name": name}, "value": 1})
    for text in {json.dumps(pod, sort_keys=True) for pod in pods}:
        made = server.store.client.ask("POST", f"{PODS}?dryRun=All&fieldValidation=Strict", json.loads(text))
        assert made["status"]["phase"] == "Pending"


@pytest.mark.parametrize("level", ["baseline", "restricted"])
def test_examples_are_admitted_at_their_documented_pod_security_level(
    server: RealCluster, rendered: Path, level: str
) -> None:
    """RDMA's capability is refused everywhere else, and an image's own user where it would be root."""
    enforce(server, level)
    path = rendered / ("smoke.h200.rayjob.rdma.yaml" if level == "baseline" else "smoke.h200.job.yaml")
    if level == "restricted":  # of the owner of a pod the server only warns
        done = apply(f"--filename={path}")
        assert done.returncode == 0
        assert "would violate PodSecurity" in done.stderr
    template = next(find_templates(load_all(path)[0])).value
    pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "p"}}
    refused = subprocess.run(["kubectl", "create", "--dry-run=server", "--filename=-"], input=json.dumps(pod),
                             capture_output=True, text=True, check=False)  # fmt: skip
    assert "violates PodSecurity" in refused.stderr


def test_a_pod_that_admission_refuses_is_reported(controlled: RealCluster, tmp_path: Path) -> None:
    server = controlled
    enforce(server, "restricted")
    launched = submit(tmp_path, kind="job")
    status = wait_until(launched, lambda status: bool(status.reason))
    assert status.state is JobState.PENDING
    assert "a pod may not be created (quota or admission)" in status.reason
    assert "violates PodSecurity" in status.reason
    assert get_backend("k8s").cancel(launched.submission, launched.run_dir)
    assert wait_for_end(launched).state is JobState.CANCELLED
    wait_gone(server)


def test_a_restricted_namespace_takes_pods_of_another_user(server: RealCluster, tmp_path: Path) -> None:
    enforce(server, "restricted")
    user = {"user": os.getuid() or 1000, "group": os.getgid() or 1000}
    launched = submit(tmp_path, kind="job", run_as=user)
    assert wait_for_end(launched).state is JobState.DONE
    collect(launched)
    assert launched.run_dir.is_sealed


def test_a_queue_that_takes_the_nodes_back_is_waited_for(controlled: RealCluster, tmp_path: Path) -> None:
    """As Kueue preempts: it suspends the job, whose controller ends the pods, and resumes it some time."""
    server = controlled
    launched = submit(tmp_path, LONG, kind="job")
    wait_until(launched, first_trial_runs(launched))
    suspend(server, launched, True)
    status = wait_until(launched, lambda status: status.state is not JobState.RUNNING)
    assert status.state is JobState.PENDING
    words = "suspended by its queue or by hand (JobSuspended: Job suspended)"
    status = wait_until(launched, lambda status: status.reason == words)  # after those of the pod that ends
    assert status.state is JobState.PENDING
    launched.run_dir.state.unlink()  # what the pod said that is gone
    suspend(server, launched, False)
    wait_until(launched, lambda status: status.state is JobState.RUNNING)
    wait_until(launched, first_trial_runs(launched))
    assert get_backend("k8s").cancel(launched.submission, launched.run_dir)
    assert wait_for_end(launched).state is JobState.CANCELLED
    bundle = collect(launched)
    assert "interrupted/1/00-p1-baseline/exit.json" in names_of(bundle)


def suspend(server: RealCluster, launched: sending.Launched, is_suspended: bool) -> None:
    metadata = {"name": launched.submission.details["name"], "namespace": "default"}
    server.store.patch("jobs", {"metadata": metadata}, {"spec": {"suspend": is_suspended}})


def names_of(bundle: Path) -> list[str]:
    with tarfile.open(bundle) as archive:
        return archive.getnames()


def test_who_drains_a_node_is_named(controlled: RealCluster, tmp_path: Path) -> None:
    """``kubectl drain`` asks the eviction API; the server itself marks the pod."""
    server = controlled
    launched = submit(tmp_path, LONG, kind="job", restarts=0)
    wait_until(launched, first_trial_runs(launched))
    pod = server.pod("leader")
    assert pod is not None
    name = pod["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
    server.store.client.ask("POST", f"{path_of(ROWS['pods'], 'default', name)}/eviction", eviction)
    status = wait_for_end(launched)
    assert status.state is JobState.FAILED
    assert "a pod failed, or was evicted or preempted" in status.reason
    bundle = collect(launched)
    assert inspect_bundle(bundle).trials == {"00-p1-baseline": "interrupted"}
    wait_gone(server)
