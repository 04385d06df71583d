"""What needs a newer Slurm than 22.05, on a real 24.11: segments, GPUs that are devices; and a chain of jobs on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from rlk_repro.base.errors import SchedulerRefused
from rlk_repro.bundle.seal import open_bundle
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_profile
from tests.clusters import test_sbatch_real as scripts
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.examples import plan_for, with_site
from tests.support.slurm.newer import running_newer_cluster
from tests.support.slurm.runs import SETTINGS, Site
from tests.support.two_node_agent import allow_nodes
from tests.support.verifying import verify_bundle

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NODES = ("node-0", "node-1", "node-2", "node-3")
BLOCKS = "BlockName=b0 Nodes=node-[0-1]\nBlockName=b1 Nodes=node-[2-3]\nBlockSizes=2\n"
# Stands for Python: what Slurm gave each node.
SHOW_GPUS = '#!/bin/sh\n[ "$3" = rlk_repro.job ] && echo "$CUDA_VISIBLE_DEVICES" > "$0.$SLURMD_NODENAME"\nexit 0\n'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm") / "c"
    with running_newer_cluster(folder, nodes=NODES, topology=BLOCKS) as running:
        yield running


@pytest.fixture
def agent(site: Site, monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter of several nodes, of which one trains."""
    allow_nodes(monkeypatch)
    text = f'#!/bin/sh\nexec {sys.executable} -m tests.support.two_node_agent "$@"\n'
    return str(scripts.write_python(site.folder / "agent", text))


def test_a_run_on_one_segment_is_sealed_and_replays(call, site: Site, agent: str) -> None:
    run = site.submit((*SETTINGS, "layouts.cpu.num_nodes=2"), python=agent, block_size=2)
    assert run.wait_for_end().reason == "sealed, 2 of 2 trials ok"
    nodes = {node.path.name for node in run.run_dir.node_dirs()}
    assert nodes in ({"node-0", "node-1"}, {"node-2", "node-3"})
    bundle = run.collect()
    assert verify_bundle(bundle) == []
    with open_bundle(bundle) as sealed:
        assert "SLURM_VERSION = 24.11." in sealed.scheduler_file("config").read_text()
        assert "BlockName=b0" in sealed.scheduler_file("topology").read_text()
        assert "#SBATCH --segment=2\n" in (sealed.job / "job.sbatch").read_text()
    code, out, err = call("replay", str(bundle), "--analyze-only")
    assert (code, err) == (0, "")
    assert "the analysis is reproduced byte for byte" in out


def test_two_segments_fill_two_blocks_and_one_of_four_is_refused(site: Site, agent: str) -> None:
    nodes = (*SETTINGS, "layouts.cpu.num_nodes=4")
    run = site.submit(nodes, python=agent, block_size=2)
    assert run.wait_for_end().reason == "sealed, 2 of 2 trials ok"
    assert len(run.run_dir.node_dirs()) == 4
    with pytest.raises(SchedulerRefused, match="Requested node configuration is not available"):
        site.submit(nodes, python=agent, block_size=4)


@pytest.mark.parametrize(("gpus", "seen"), [(1, "0"), (2, "0,1")])
def test_a_job_sees_the_gpus_that_it_asked_for(site: Site, gpus: int, seen: str) -> None:
    python = scripts.write_python(site.folder / "python", SHOW_GPUS)
    plan = plan_for("smoke", "a100", settings=(f"layouts.a100={{num_nodes: 1, gpus_per_node: {gpus}}}",))
    slurm = {"gres": "gpu:a100", "exclusive": False, "stop_before_s": 60}
    run_dir = RunDir(site.folder / "run")
    container = {"runtime": "host", "python": str(python)}
    job_id = scripts.submit(site.cluster, with_site(plan, slurm=slurm, container=container), run_dir)
    scripts.wait_for_end(site.cluster, job_id)
    (found,) = site.folder.glob("python.node-*")
    assert found.read_text() == f"{seen}\n", run_dir.job_output(job_id).read_text()


@pytest.mark.parametrize(("gres", "num_gpus"), [("gpu:h100", 1), ("gpu:a100", 3)])
def test_gpus_that_the_nodes_do_not_have_are_refused(site: Site, gres: str, num_gpus: int) -> None:
    plan = plan_for("smoke", "a100", settings=(f"layouts.a100={{num_nodes: 1, gpus_per_node: {num_gpus}}}",))
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        scripts.submit(site.cluster, with_site(plan, slurm={"gres": gres}), RunDir(site.folder / "run"))


def test_the_cluster_is_described_with_its_blocks_and_takes_the_job(call, site: Site) -> None:
    path = site.folder / "proposed.yaml"
    code, _, err = call("profile", "init", "--yes", "-o", str(path))
    assert code == 0, err
    found = load_profile(str(path), []).model.slurm
    assert found is not None
    assert (found.gres, found.block_size) == ("gpu:a100", 2)
    code, out, _ = call("profile", "check", str(path), "--run", "smoke")
    assert code == 0, out
    assert "info: sbatch --test-only: expected accepted, found Job " in out
