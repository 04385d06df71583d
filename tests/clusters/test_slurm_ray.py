"""Ray and containers on a real Slurm: one of the shipped scripts on two nodes, sessions, and what a container leaves.

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
from collections.abc import Iterator, Mapping

import pytest

from rlk_repro.base.files import load_json
from rlk_repro.clusters.api import JobState
from rlk_repro.rundir.paths import RunDir
from rlk_repro.submit import planning, sending
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
from tests.support.slurm.runs import LONG, REPOSITORY, SETTINGS, Run, Site, start_or_skip
from tests.support.two_node_agent import ADDRESSES, allow_nodes, write_agent

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


def require_ray_around_every_trial(run_dir: RunDir, trials: Mapping[str, str]) -> None:
    """Each trial saw both nodes of a Ray of its own, with its own switch; no Ray lived longer than its trial."""
    for trial, switch in trials.items():
        log = run_dir.trial(trial).stdout.read_text()
        for node in NODES:
            assert f"task on {node} host={ADDRESSES[node]} switch={switch}\n" in log
            assert not run_dir.node(node).ray_logs(trial).exists()
    events = [json.loads(line) for line in run_dir.agent_log.read_text().splitlines()]
    ups_and_downs = [(item["event"], item["use"]) for item in events if item["event"] in {"ray up", "ray down"}]
    assert ups_and_downs == [(event, trial) for trial in trials for event in ("ray up", "ray down")]
    assert not run_dir.ray_token.exists()


def submit_in_containers(site: Site, settings: tuple[str, ...], python: str | None = None) -> Run:
    """Submit with the example's files; ``python`` other than the image's own starts no Ray."""
    profile = examples.TWO_NODES_PROFILE.decode()
    if python is not None:
        profile = profile.replace("{runtime: podman}", f"{{runtime: podman, python: {python}}}")
    (site.folder / "profile.yaml").write_text(profile)
    (site.folder / "stack.yaml").write_bytes(examples.TWO_NODES_STACK)
    request = planning.Request(
        run="smoke",
        cluster="slurm",
        profile=str(site.folder / "profile.yaml"),
        stack=str(site.folder / "stack.yaml"),
        settings=settings,
        is_exploratory=True,
    )
    return Run(site=site, launched=sending.submit(planning.prepare(request)))


def require_nothing_left(run: Run, engine: Engine) -> None:
    run.wait_for_script()
    assert (engine.list_containers(), engine.list_mounts()) == ([], [])


def test_the_shipped_script_runs_on_two_nodes_in_containers_and_its_bundle_is_replayed_here(
    call, site: Site, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_nodes(monkeypatch)
    run = submit_in_containers(site, examples.TWO_NODES_SETTINGS)
    assert run.wait_for_end(480).reason == "sealed, 4 of 4 trials ok"
    require_ray_around_every_trial(run.run_dir, TRIALS)
    for node in NODES:
        facts = load_json(run.run_dir.node(node).manifest)["sections"]["container"]
        assert (facts["runtime"], facts["image_digest"]) == ("podman", make_image().digest)
    bundle = str(run.collect())
    assert verify_bundle(run.run_dir.bundle) == []
    require_nothing_left(run, engine)
    # here are one node and no container: that has to be accepted, and the comparison says so
    code, _, err = call("replay", bundle, "--cluster", "local")
    assert (code, "layouts.cpu.num_nodes: differs" in err, "images: differs" in err) == (6, True, True), err
    code, out, err = call("replay", bundle, "--cluster", "local", "--yes", "--json")
    assert code == 0, out + err
    found = json.loads(out)
    assert (found["level"], found["num_blocking_drift"]) == ("bitwise", 2), found


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.FAILED])
def test_a_run_that_was_cancelled_or_whose_client_was_killed_leaves_no_container(
    site: Site, engine: Engine, state: JobState
) -> None:
    run = submit_in_containers(site, LONG, sys.executable)
    run.wait_for_step()
    assert engine.list_containers() != []
    if state is JobState.CANCELLED:
        assert run.cancel()
    else:
        site.cluster.ask("scancel", "--signal=KILL", f"{run.job_id}.0")
    assert run.wait_for_end().state is state
    assert run.run_dir.bundle.is_file()
    require_nothing_left(run, engine)


def test_sessions_run_on_a_ray_of_two_nodes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both variants by turns in the processes of one session, each session in a Ray of its own."""
    allow_nodes(monkeypatch)
    design = ("measure.design=crossover", "measure.sessions=2", "measure.blocks=2", "measure.control_blocks=1")
    python = write_agent(site.folder, "--ray")
    run = site.submit((*design, *SETTINGS[3:], "layouts.cpu.num_nodes=2"), python=python)
    assert run.wait_for_end(480).reason == "sealed, 2 of 2 trials ok"
    require_ray_around_every_trial(run.run_dir, dict.fromkeys(("00-s1-crossover", "01-s2-crossover"), "1"))
    assert verify_bundle(run.collect()) == []
    analysis = json.loads(run.run_dir.analysis.read_text())
    assert [pair["status"] for pair in analysis["pairs"]] == ["scored", "scored"]
    assert len(analysis["blocks"]) == 6
    assert not any(block["reason"] for block in analysis["blocks"])
    assert {trial["proof"] for trial in analysis["trials"]} == {"not requested", "native"}
