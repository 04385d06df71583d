"""One of the shipped scripts, run: two nodes of a real Slurm, a container on each, Ray up and down around every trial.

The script is the shipped one, byte for byte, but for the folder of the run, which ends in the run id that the comment
repeats: a test writes nowhere else than into its own folder.  All that this site needs beside it is the site's own, as
on any cluster: podman's configuration mounts the software that real images hold (``containers.conf``), and Slurm's task
prolog names that configuration.  The image's ``python3`` puts a Ray driver around the reference trainer.

Both nodes are this machine: what lies between two machines (their network, a shared file system that shows changes
late, images that each node has to fetch) is not tested.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.base.files import load_json
from rlk_repro.submit import planning, sending
from tests.clusters.test_slurm_ray import require_ray_around_every_trial
from tests.support.images.container_image import (
    INTERPRETER,
    PROGRAM_DIR,
    Engine,
    make_image,
    mount_python,
    running_engine,
)
from tests.support.make_run import verify_bundle
from tests.support.slurm import examples
from tests.support.slurm.cluster import NODES, Cluster
from tests.support.slurm.runs import REPOSITORY, Run, Site, start_or_skip
from tests.support.two_node_agent import allow_nodes

TRIALS = {"00-p1-baseline": "0", "01-p1-enabled": "1", "02-p2-enabled": "1", "03-p2-baseline": "0"}

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    env = (f"PATH={PROGRAM_DIR}:/usr/bin:/bin", f"{INTERPRETER}={sys.executable}", f"PYTHONPATH={REPOSITORY}")
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    folder = tmp_path_factory.mktemp("podman")
    with running_engine(folder, volumes=mount_python(), env=env, num_files=num_files) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    prolog = folder / "prolog"
    prolog.write_text(f"#!/bin/sh\necho 'export CONTAINERS_CONF={engine.configuration}'\n")
    prolog.chmod(0o755)
    running = start_or_skip(folder / "c", site_lines=f"TaskProlog={prolog}\n")
    yield running
    running.close()


def prepare(folder: Path) -> planning.Prepared:
    """What ``rlk-repro submit`` prepares of the example's files and settings."""
    (folder / "profile.yaml").write_bytes(examples.TWO_NODES_PROFILE)
    (folder / "stack.yaml").write_bytes(examples.TWO_NODES_STACK)
    return planning.prepare(
        planning.Request(
            run="smoke",
            cluster="slurm",
            profile=str(folder / "profile.yaml"),
            stack=str(folder / "stack.yaml"),
            settings=examples.TWO_NODES_SETTINGS,
            is_exploratory=True,
        )
    )


def test_the_shipped_script_runs_on_two_nodes_in_containers_and_its_bundle_is_replayed_here(
    call, site: Site, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_nodes(monkeypatch)
    prepared = prepare(site.folder)
    run = Run(site=site, launched=sending.submit(prepared))
    assert run.wait_for_end(480).reason == "sealed, 4 of 4 trials ok"
    require_ray_around_every_trial(run.run_dir, TRIALS)
    for node in NODES:
        facts = load_json(run.run_dir.node(node).manifest)["sections"]["container"]
        assert (facts["runtime"], facts["image_digest"]) == ("podman", make_image().digest)
    bundle = run.collect()
    assert verify_bundle(bundle) == []
    run.wait_for_script()
    assert (engine.list_containers(), engine.list_mounts()) == ([], [])
    require_replay_here(call, str(bundle))


def require_replay_here(call, bundle: str) -> None:
    """On this machine there is one node and no container: that has to be accepted, and the comparison says so."""
    code, _, err = call("replay", bundle, "--cluster", "local")
    assert (code, "layouts.cpu.num_nodes: differs" in err, "images: differs" in err) == (6, True, True), err
    code, out, err = call("replay", bundle, "--cluster", "local", "--yes", "--json")
    assert code == 0, out + err
    found = json.loads(out)
    assert (found["level"], found["num_blocking_drift"]) == ("bitwise", 2), found
