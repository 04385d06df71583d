"""A real Slurm with slurmdbd and a database, which enforces accounts and forgets ended jobs after seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.bundle.verify import open_verified
from rlk_repro.clusters.api import JobState
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.runs import LONG, Site, start_or_skip

pytestmark = pytest.mark.real

# Accounting hears of a job's details some seconds after its start.
WAIT_FOR_ACCOUNTING = 'until [ -n "$(sacct -nXPo Partition -j "$SLURM_JOB_ID")" ]; do sleep 0.2; done'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start_or_skip(tmp_path_factory.mktemp("slurm") / "c", has_accounting=True, min_job_age_s=2)
    yield running
    running.close()


def test_accounting_records_are_in_the_bundle(site: Site) -> None:
    run = site.submit(account="lab", setup=[WAIT_FOR_ACCOUNTING])
    assert run.wait_for_end().state is JobState.DONE
    with open_verified(run.collect()) as (sealed, _):
        names, row = (sealed.scheduler / f"accounting-{run.job_id}.0.txt").read_text().splitlines()
    record = dict(zip(names.split("|"), row.split("|"), strict=True))
    assert (record["JobIDRaw"], record["Account"]) == (run.job_id, "lab")
    assert record["State"] in {"PENDING", "RUNNING"}
    assert record["Partition"] == "gpu"
    assert record["SubmitLine"].startswith("sbatch --parsable --chdir=")


def test_accounting_remembers_how_a_forgotten_job_ended(site: Site) -> None:
    run = site.submit(LONG, account="lab", requeue=False)
    run.wait_for_step()
    node = run.poll().nodes
    site.cluster.kill_node(node)
    try:
        run.wait_for_end()
        run.wait_until(lambda: not site.cluster.job_field(run.job_id, "%i"), "forgotten by the controller")
        # Whether the job's log got a last line as well depends on whether its script outlived its node.
        expected = f"Slurm says NODE_FAIL, lost node {node}, the agent ended without a report"
        assert run.poll().reason.startswith(expected)
        assert not inspect_bundle(run.collect()).is_sealed
        assert "|NODE_FAIL|" in run.run_dir.scheduler_file("accounting-at-end").read_text()
    finally:
        site.cluster.start_node(node)
        site.cluster.wait_for_nodes()
