"""A run in a real container on a real Slurm: podman, and an image that the test builds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlk_repro.base.files import load_json
from rlk_repro.clusters.api import JobState
from rlk_repro.submit import planning, sending
from tests.support.images.container_image import REFERENCE, Engine, make_image, make_podman_profile, running_engine
from tests.support.make_run import verify_bundle
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.runs import LONG, SETTINGS, Run, Site, start_or_skip

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("podman")
    with running_engine(folder) as made:
        yield made


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stack") / "stack.yaml"
    image = {"reference": REFERENCE, "digest": make_image().digest}
    path.write_text(yaml.safe_dump({"stack": "test", "purpose": "An empty image.", "images": {"cpu": image}}))
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[Cluster]:
    running = start_or_skip(tmp_path_factory.mktemp("slurm") / "c")
    yield running
    running.close()


def submit(site: Site, engine: Engine, stack: Path, settings: tuple[str, ...]) -> Run:
    profile = make_podman_profile(site.folder, engine)
    request = planning.Request(run="smoke", cluster="slurm", profile=str(profile), stack=str(stack), settings=settings,
                             is_exploratory=True)  # fmt: skip
    return Run(site=site, launched=sending.submit(planning.prepare(request)))


def test_a_run_in_a_container_is_sealed_and_names_its_image(site: Site, engine: Engine, stack: Path) -> None:
    run = submit(site, engine, stack, SETTINGS)
    assert (run.wait_for_end().state, run.poll().reason) == (JobState.DONE, "sealed, 2 of 2 trials ok")
    assert verify_bundle(run.collect()) == []
    node = run.run_dir.node_dirs()[0]
    facts = load_json(node.manifest)["sections"]["container"]
    assert (facts["runtime"], facts["image_digest"]) == ("podman", make_image().digest)
    run.wait_for_script()
    assert (engine.list_containers(), engine.list_mounts()) == ([], [])


def test_a_cancelled_run_leaves_no_container(site: Site, engine: Engine, stack: Path) -> None:
    run = submit(site, engine, stack, LONG)
    run.wait_for_step()
    assert engine.list_containers() != []
    assert run.cancel()
    assert run.wait_for_end().state is JobState.CANCELLED
    assert run.run_dir.bundle.is_file()
    run.wait_for_script()
    assert (engine.list_containers(), engine.list_mounts()) == ([], [])


def test_a_container_whose_client_was_killed_is_removed(site: Site, engine: Engine, stack: Path) -> None:
    run = submit(site, engine, stack, LONG)
    run.wait_for_step()
    site.cluster.ask("scancel", "--signal=KILL", f"{run.job_id}.0")
    assert run.wait_for_end().state is JobState.FAILED
    assert run.run_dir.bundle.is_file()
    run.wait_for_script()
    assert (engine.list_containers(), engine.list_mounts()) == ([], [])
