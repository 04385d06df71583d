"""One experiment runs on a real Slurm in containers, then in pods, then on Slurm; each run replays the one before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlk_repro.bundle.seal import inspect_bundle
from rlk_repro.replay import steps as replay
from rlk_repro.replay.compare import Comparison
from rlk_repro.submit import finishing, planning, sending
from tests.support.images.container_image import REFERENCE, make_image
from tests.support.images.podman_engine import Engine, make_podman_profile, running_engine
from tests.support.kube import runs as k8s_runs
from tests.support.slurm.runs import Site

pytestmark = [pytest.mark.real, k8s_runs.needs_kubectl]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running_engine(tmp_path_factory.mktemp("podman")) as made:
        yield made


def repeat(bundle: Path, cluster: str, profile: Path) -> tuple[Comparison, Path]:
    recorded = replay.reanalyse(bundle)
    prepared = replay.prepare(recorded, cluster=cluster, profile=str(profile))
    assert prepared.launch.plan.experiment_hash == recorded.plan.experiment_hash
    comparison, result = replay.run(prepared, lambda _: None, is_quiet=True)
    return comparison, result.bundle


def test_a_bundle_is_replayed_in_pods_and_back_on_slurm(
    site: Site, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_profile = make_podman_profile(site.folder, engine)
    image = {"reference": REFERENCE, "digest": make_image().digest}
    stack = tmp_path / "stack.yaml"
    stack.write_text(yaml.safe_dump({"stack": "test", "purpose": "An empty image.", "images": {"cpu": image}}))
    request = planning.Request(run="smoke", cluster="slurm", profile=str(slurm_profile), stack=str(stack),
                             settings=k8s_runs.SETTINGS, is_exploratory=True)  # fmt: skip
    launched = sending.submit(planning.prepare(request))
    sending.wait(launched, lambda _: None)
    bundle = finishing.finish(launched).bundle
    with k8s_runs.running_server(tmp_path / "kube", monkeypatch) as server:
        folder = tmp_path / "pods"
        folder.mkdir()
        pods_profile, _ = k8s_runs.write_site(folder, kind="rayjob")
        in_pods, pods_bundle = repeat(bundle, "k8s", pods_profile)
        k8s_runs.wait_gone(server)
    assert in_pods.is_ok
    assert inspect_bundle(pods_bundle).facts["cluster"] == "k8s"
    back, last_bundle = repeat(pods_bundle, "slurm", slurm_profile)
    assert back.is_ok
    assert inspect_bundle(last_bundle).facts["cluster"] == "slurm"
