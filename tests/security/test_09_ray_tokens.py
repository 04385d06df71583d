"""Ray authenticates by token in every job, and the token stays where it is needed."""

from __future__ import annotations

import base64
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from rlk_repro.agent.ray.launch import RaySeat, render_env, render_start, require_tokens
from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.clusters.k8s.objects import render_objects
from rlk_repro.clusters.k8s.pod.supervise import start_ray
from tests.support.kube.cluster import Cluster
from tests.support.kube.examples import list_plans, plan_for, run_dir_of, with_site
from tests.support.kube.plane import ControlPlane
from tests.support.kube.runs import collect, needs_kubectl, running_server, submit, wait_for_end, wait_until


def test_no_rendered_rayjob_has_a_dashboard_that_asks_for_no_token() -> None:
    clusters = [
        item["spec"]["rayClusterSpec"]
        for name, plan in list_plans()
        if "rayjob" in name
        for item in render_objects(plan, run_dir_of(plan))
        if item["kind"] == "RayJob"
    ]
    assert clusters
    for cluster in clusters:
        assert cluster["authOptions"] == {"mode": "token"}
        assert tuple(map(int, cluster["rayVersion"].split(".")[:2])) >= (2, 52)


def test_a_profile_that_names_a_ray_without_tokens_is_refused() -> None:
    plan = with_site(plan_for(), ray_version="2.51.1")
    with pytest.raises(SpecError, match=r"kubernetes\.ray_version: has no authentication by token"):
        render_objects(plan, run_dir_of(plan))
    plan = with_site(plan_for(), ray_version="2.60.0")
    assert render_objects(plan, run_dir_of(plan))[0]["spec"]["rayClusterSpec"]["rayVersion"] == "2.60.0"


@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_TOKEN": "0" * 32}])
def test_a_pod_starts_no_ray_without_a_token(given: dict[str, str], tmp_path: Path) -> None:
    """An operator that is older than authOptions drops them silently."""
    mark = tmp_path / "started"
    with pytest.raises(EnvironmentMissing, match=r"anyone who reaches Ray's ports .* KubeRay 1\.5\.1"):
        start_ray({"KUBERAY_GEN_RAY_START_CMD": f"touch {mark}", "PATH": "/usr/bin:/bin", **given})
    assert not mark.exists()


def test_a_ray_that_ignores_tokens_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2.51.1")
    with pytest.raises(EnvironmentMissing, match="python module ray: has no authentication"):
        require_tokens()
    with pytest.raises(EnvironmentMissing, match="has no authentication"):
        start_ray({"KUBERAY_GEN_RAY_START_CMD": "true"})


def test_our_own_ray_has_no_dashboard_and_its_token_is_a_file() -> None:
    seat = RaySeat(index=0, node="n0", address="192.0.2.1", head="192.0.2.1:6379", num_gpus=8, first_port=6379,
                has_client=True, store_bytes=1 << 30)  # fmt: skip
    argv = render_start(seat, "/tmp/x")
    assert argv[argv.index("--include-dashboard") + 1] == "false"
    assert not [word for word in argv if "token" in word]
    env = render_env(seat, "/run/dir/.ray-token")
    assert (env["RAY_AUTH_MODE"], env["RAY_AUTH_TOKEN_PATH"]) == ("token", "/run/dir/.ray-token")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_plane: ControlPlane | None) -> Iterator[Cluster]:
    with running_server(tmp_path / "kube", monkeypatch, control_plane) as running:
        yield running


@pytest.mark.real
@needs_kubectl
@pytest.mark.timeout(280)
def test_the_token_of_a_cluster_is_in_no_file_of_the_run(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, kind="rayjob")
    wait_until(launched, lambda _: bool(server.running))
    names = {pod["metadata"]["labels"]["ray.io/cluster"] for pod in server.store.list("pods")}
    held = next(item for item in server.store.list("secrets") if item["metadata"]["name"] in names)
    token = base64.b64decode(held["data"]["auth_token"])
    assert len(token) >= 32
    wait_for_end(launched)
    bundle = collect(launched)
    with tarfile.open(bundle) as archive:
        texts = [archive.extractfile(member) for member in archive if member.isfile()]
        assert not [text.name for text in texts if text is not None and token in text.read()]
    for root in (launched.run_dir.root, server.claim("results")):
        assert not [path for path in root.rglob("*") if path.is_file() and token in path.read_bytes()]
