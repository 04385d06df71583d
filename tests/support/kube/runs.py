"""Runs of the reference trainer on the test server, through the real kubectl."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.files import load_json
from rlk_repro.clusters.api import JobStatus
from rlk_repro.clusters.registry import get_backend
from rlk_repro.submit import planning, sending
from tests.support import waiting
from tests.support.kube.cluster import Cluster
from tests.support.kube.plane import APISERVER, ControlPlane
from tests.support.kube.real import RealCluster
from tests.support.kube.server import KubeServer

# setup-envtest brings the one of its API server's version
KUBECTL = (shutil.which("kubectl", path=str(Path(APISERVER).parent)) if APISERVER else None) or shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None and not APISERVER, reason="no kubectl on PATH")
DIGEST = "sha256:" + "0123456789abcdef" * 4
SETTINGS = (
    "measure.pairs=1", "measure.warmup_steps=1", "measure.scored_steps=3", "workload.grpo.rollout_batch_size=2",
    "workload.model.hidden_size=32",
)  # fmt: skip
LONG = (*SETTINGS[:2], "measure.scored_steps=400", "workload.grpo.rollout_batch_size=8")
WAIT_S = 120.0


@contextlib.contextmanager
def running_server(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    plane: ControlPlane | None = None,
    claims: tuple[str, ...] = ("results",),
    **options: Any,
) -> Iterator[Cluster]:
    """A cluster, of a real API server where there is one, and the real kubectl that asks it."""
    folder.mkdir()
    with make_server(folder, plane, **options) as server:
        use_server(server, folder, monkeypatch)
        for name in claims:
            server.claim(name)
        yield server


def make_server(folder: Path, plane: ControlPlane | None, **options: Any) -> Cluster:
    return KubeServer(folder, **options) if plane is None else RealCluster(folder, plane, **options)


def use_server(server: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real kubectl, with a configuration and a home of its own."""
    assert KUBECTL is not None
    tools = folder / "tools"
    tools.mkdir()
    (tools / "kubectl").symlink_to(KUBECTL)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.setenv("HOME", str(folder))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def write_site(folder: Path, policy: dict[str, str] | None = None, **settings: Any) -> tuple[Path, Path]:
    """A profile and a stack."""
    results = {"claim": "results", "path": "/results"}
    profile = {
        "profile": "here",
        "cluster": "k8s",
        "hardware": "cpu",
        "kubernetes": {"results": results, "python": "python3", "grace_s": 60, **settings},
        "preflight": {"min_free_disk_gib": 0.01, "min_free_memory_gib": 0.01, "policy": policy or {}},
    }
    image = {"reference": "registry.example/rlk-repro/cpu", "digest": DIGEST}
    stack = {"stack": "pods", "purpose": "An image that nothing pulls.", "images": {"cpu": image}}
    for name, value in (("profile", profile), ("stack", stack)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(value))
    return folder / "profile.yaml", folder / "stack.yaml"


def submit(folder: Path, settings: tuple[str, ...] = SETTINGS, **options: Any) -> sending.Launched:
    profile, stack = write_site(folder, **options)
    request = planning.Request(
        run="smoke", cluster="k8s", profile=str(profile), stack=str(stack), settings=settings, is_exploratory=True
    )
    return sending.submit(planning.prepare(request))


def wait_until(
    launched: sending.Launched, is_there: Callable[[JobStatus], bool], timeout_s: float = WAIT_S
) -> JobStatus:
    until = time.monotonic() + timeout_s
    while True:
        status = sending.poll(launched)
        if is_there(status):
            return status
        assert time.monotonic() < until, f"{status} after {timeout_s} s"
        time.sleep(0.2)


def wait_for_end(launched: sending.Launched) -> JobStatus:
    return wait_until(launched, lambda status: status.state.is_final)


def first_trial_runs(launched: sending.Launched) -> Callable[[Any], bool]:
    def is_there(status: Any) -> bool:
        state = load_state(launched)
        return bool(state and state.get("trial"))

    return is_there


def load_state(launched: sending.Launched) -> dict[str, Any] | None:
    path = launched.run_dir.state
    return load_json(path) if path.is_file() else None


def wait_ended(server: Cluster, role: str) -> None:
    """Until its pod serves nothing any more: a sealed run is done some tenths of a second before."""
    waiting.wait_until(lambda: (pod := server.pod(role)) is None or pod["status"]["phase"] != "Running")


def wait_gone(server: Cluster) -> None:
    until = time.monotonic() + 60
    while server.ours() and time.monotonic() < until:
        time.sleep(0.1)
    assert server.ours() == []


def collect(launched: sending.Launched) -> Path:
    return get_backend("k8s").collect(launched.submission, launched.run_dir)
